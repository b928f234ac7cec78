// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "normscope/core/cache_lines.h"
#include "normscope/core/element.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope::testing {

// The same number to the bit. Payloads of NaNs are not promised.
[[nodiscard]] inline bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

inline constexpr Layout kAllLayouts[] = {Layout::kChannelsFirst, Layout::kChannelsLast};

[[nodiscard]] inline std::string name_of(Layout layout) {
  return layout == Layout::kChannelsFirst ? "channels_first" : "channels_last";
}

// Unused elements: before the first row, after each row, and after each sample.
struct Gaps {
  std::int64_t before = 0;
  std::int64_t row = 0;
  std::int64_t sample = 0;
};

// A tensor [samples, channels, positions] in memory of its own, with guard bands.
class Tensor {
 public:
  Tensor(DType dtype, Layout layout, std::int64_t samples, std::int64_t channels,
         std::int64_t positions, Gaps gaps = {})
      : view_(
            layout == Layout::kChannelsFirst
                ? channels_first(static_cast<void*>(nullptr), dtype, samples, channels, positions)
                : channels_last(static_cast<void*>(nullptr), dtype, samples, channels, positions)) {
    std::int64_t& row =
        layout == Layout::kChannelsFirst ? view_.channel_stride : view_.position_stride;
    const std::int64_t rows = layout == Layout::kChannelsFirst ? channels : positions;
    row += gaps.row;
    view_.sample_stride = rows * row + gaps.sample;
    first_ = kGuard + gaps.before;
    bytes_.assign(static_cast<std::size_t>((first_ + samples * view_.sample_stride + kGuard) *
                                           size_of(dtype)),
                  kUntouched);
  }

  [[nodiscard]] MutableTensorView view() {
    MutableTensorView view = view_;
    view.data = bytes_.data() + first_ * size_of(view_.dtype);
    return view;
  }
  [[nodiscard]] TensorView view() const {
    TensorView view = view_.read_only();
    view.data = bytes_.data() + first_ * size_of(view_.dtype);
    return view;
  }

  // All of the memory, with gaps and guard bands.
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

  [[nodiscard]] DType dtype() const { return view_.dtype; }
  [[nodiscard]] std::int64_t samples() const { return view_.samples; }
  [[nodiscard]] std::int64_t channels() const { return view_.channels; }
  [[nodiscard]] std::int64_t positions() const { return view_.positions; }

  [[nodiscard]] double at(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return with_element_type(view_.dtype, [&]<class Element>(Element*) {
      Element element;
      std::memcpy(&element, bytes_.data() + offset(n, c, p), sizeof(Element));
      return static_cast<double>(widen(element));
    });
  }
  void set(std::int64_t n, std::int64_t c, std::int64_t p, double value) {
    with_element_type(view_.dtype, [&]<class Element>(Element*) {
      const Element element = round_once<Element>(value);
      std::memcpy(bytes_.data() + offset(n, c, p), &element, sizeof(Element));
    });
  }

  // Calls function(n, c, p) for every element.
  template <class Function>
  void for_each(const Function& function) const {
    for (std::int64_t n = 0; n < samples(); ++n) {
      for (std::int64_t c = 0; c < channels(); ++c) {
        for (std::int64_t p = 0; p < positions(); ++p) function(n, c, p);
      }
    }
  }

  // Whether nothing outside `written`, a part of this tensor, was ever written.
  [[nodiscard]] bool untouched_outside(const TensorView& written) const {
    const std::int64_t size = size_of(view_.dtype);
    std::vector<bool> may_be_written(bytes_.size());
    const auto first = static_cast<const std::byte*>(written.data) - bytes_.data();
    for (std::int64_t n = 0; n < written.samples; ++n) {
      for (std::int64_t c = 0; c < written.channels; ++c) {
        for (std::int64_t p = 0; p < written.positions; ++p) {
          const std::int64_t at =
              first + size * (n * written.sample_stride + c * written.channel_stride +
                              p * written.position_stride);
          for (std::int64_t i = 0; i < size; ++i) {
            may_be_written[static_cast<std::size_t>(at + i)] = true;
          }
        }
      }
    }
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if (!may_be_written[i] && bytes_[i] != kUntouched) return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t kGuard = 64;  // elements: beyond the widest vector
  static constexpr std::byte kUntouched{0xA5};

  [[nodiscard]] std::int64_t offset(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return size_of(view_.dtype) * (first_ + n * view_.sample_stride + c * view_.channel_stride +
                                   p * view_.position_stride);
  }

  MutableTensorView view_;
  std::int64_t first_;
  AlignedVector<std::byte> bytes_;  // as torch aligns it
};

// Per-channel numbers [C] of any type: a tensor of one sample and position.
class ChannelArray {
 public:
  ChannelArray(DType dtype, std::int64_t channels, double value)
      : tensor_(dtype, Layout::kChannelsFirst, 1, channels, 1) {
    for (std::int64_t c = 0; c < channels; ++c) set(c, value);
  }

  [[nodiscard]] double operator[](std::int64_t c) const { return tensor_.at(0, c, 0); }
  void set(std::int64_t c, double value) { tensor_.set(0, c, 0, value); }

  [[nodiscard]] ChannelView view() const { return {tensor_.view().data, tensor_.dtype()}; }
  [[nodiscard]] MutableChannelView view() { return {tensor_.view().data, tensor_.dtype()}; }

  [[nodiscard]] std::vector<double> values() const {
    std::vector<double> values;
    for (std::int64_t c = 0; c < tensor_.channels(); ++c) values.push_back((*this)[c]);
    return values;
  }

 private:
  Tensor tensor_;
};

}  // namespace normscope::testing
