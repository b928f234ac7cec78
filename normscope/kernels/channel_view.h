// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "normscope/core/attributes.h"
#include "normscope/core/dtype.h"

namespace normscope NORMSCOPE_EXPORT {

// A non-owning view of per-channel numbers [C]: weight, bias, running statistics, or their
// gradients.
template <class Pointer>
struct BasicChannelView {
  Pointer data = nullptr;  // nullptr: absent
  DType dtype = DType::kFloat32;

  // The channels from `begin` to the last.
  [[nodiscard]] BasicChannelView channel_range(std::int64_t begin) const noexcept {
    using Byte = std::conditional_t<std::is_same_v<Pointer, const void*>, const char, char>;
    if (data == nullptr) return *this;
    return {static_cast<Byte*>(data) + begin * size_of(dtype), dtype};
  }
};
using ChannelView = BasicChannelView<const void*>;
using MutableChannelView = BasicChannelView<void*>;

}  // namespace normscope
