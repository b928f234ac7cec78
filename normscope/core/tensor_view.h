// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "normscope/core/dtype.h"

namespace normscope {

// Which index varies fastest in memory.
enum class Layout { kChannelsFirst, kChannelsLast };

// A non-owning view of a tensor [N, C, *] folded to [samples, channels, positions]. Strides are in
// elements. Kernels need one of two layouts: position_stride == 1 (channels first: N, C, H, W) or
// channel_stride == 1 (channels last: N, H, W, C). The other strides are free.
template <class Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t samples = 0;
  std::int64_t channels = 0;
  std::int64_t positions = 0;
  std::int64_t sample_stride = 0;
  std::int64_t channel_stride = 0;
  std::int64_t position_stride = 0;

  [[nodiscard]] constexpr std::int64_t elements_per_channel() const noexcept {
    return samples * positions;
  }

  [[nodiscard]] constexpr bool empty() const noexcept {
    return samples == 0 || channels == 0 || positions == 0;
  }

  // With one position per channel, both layouts have the same tiles, so either may be chosen. With
  // more positions the layout follows from the strides alone and is the same on every rank.
  [[nodiscard]] constexpr Layout layout() const noexcept {
    if (positions == 1) return channel_stride == 1 ? Layout::kChannelsLast : Layout::kChannelsFirst;
    return position_stride == 1 ? Layout::kChannelsFirst : Layout::kChannelsLast;
  }

  [[nodiscard]] constexpr bool has_kernel_layout() const noexcept {
    return empty() || positions == 1 || position_stride == 1 || channel_stride == 1;
  }

  [[nodiscard]] constexpr BasicTensorView sample_range(std::int64_t begin,
                                                       std::int64_t end) const noexcept {
    BasicTensorView part = *this;
    part.data = at(begin * sample_stride);
    part.samples = end - begin;
    return part;
  }

  [[nodiscard]] constexpr BasicTensorView channel_range(std::int64_t begin,
                                                        std::int64_t end) const noexcept {
    BasicTensorView part = *this;
    part.data = at(begin * channel_stride);
    part.channels = end - begin;
    return part;
  }

  // The same tensor, read-only.
  [[nodiscard]] constexpr BasicTensorView<const void*> read_only() const noexcept {
    return {data,      dtype,         samples,        channels,
            positions, sample_stride, channel_stride, position_stride};
  }

 private:
  [[nodiscard]] constexpr Pointer at(std::int64_t elements) const noexcept {
    using Byte = std::conditional_t<std::is_same_v<Pointer, const void*>, const char, char>;
    return data == nullptr ? nullptr : static_cast<Byte*>(data) + elements * size_of(dtype);
  }
};

using TensorView = BasicTensorView<const void*>;
using MutableTensorView = BasicTensorView<void*>;

// C-contiguous [samples, channels, positions].
template <class Pointer>
[[nodiscard]] constexpr auto channels_first(Pointer data, DType dtype, std::int64_t samples,
                                            std::int64_t channels,
                                            std::int64_t positions) noexcept {
  using Void =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const void*, void*>;
  return BasicTensorView<Void>{data,      dtype, samples, channels, positions, channels * positions,
                               positions, 1};
}

// C-contiguous [samples, positions, channels].
template <class Pointer>
[[nodiscard]] constexpr auto channels_last(Pointer data, DType dtype, std::int64_t samples,
                                           std::int64_t channels, std::int64_t positions) noexcept {
  using Void =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const void*, void*>;
  return BasicTensorView<Void>{data, dtype,   samples, channels, positions, channels * positions,
                               1,    channels};
}

}  // namespace normscope
