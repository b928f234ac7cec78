// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace normscope {

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                                       DType::kFloat16};

// Bytes of one element.
[[nodiscard]] constexpr std::int64_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
  }
  return 0;
}

// The name of the type in torch.
[[nodiscard]] constexpr std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
  }
  return "unknown";
}

}  // namespace normscope
