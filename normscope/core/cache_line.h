// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace normscope {

// Bytes.
inline constexpr std::int64_t kCacheLine = 64;

}  // namespace normscope
