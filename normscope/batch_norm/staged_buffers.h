// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/cache_lines.h"

namespace normscope {

// Copies of the buffers that a forward on the host updates. The forward works on the copies: if it
// throws, for example because memory runs out after the exchange, the buffers are as before.
class StagedBuffers {
 public:
  explicit StagedBuffers(const ForwardArguments& given)
      : arguments_(given), buffers_(buffers_of(given)) {
    std::size_t bytes = 0;
    for (const Buffer& buffer : buffers_) bytes += whole_cache_lines(buffer.size());
    copies_.resize(bytes);
    for_each(
        [](Buffer buffer, std::byte* copy) { std::memcpy(copy, buffer.data(), buffer.size()); });
    arguments_.running.mean.data = copy_of(buffers_[0]);
    arguments_.running.var.data = copy_of(buffers_[1]);
    arguments_.running.updates = static_cast<std::int64_t*>(copy_of(buffers_[2]));
    arguments_.accumulated.data = static_cast<double*>(copy_of(buffers_[3]));
  }

  // With the copies in place of the buffers.
  [[nodiscard]] const ForwardArguments& arguments() const noexcept { return arguments_; }

  // Writes the copies back.
  void commit() noexcept {
    for_each([](Buffer buffer, const std::byte* copy) {
      std::memcpy(buffer.data(), copy, buffer.size());
    });
  }

 private:
  using Buffer = std::span<std::byte>;  // empty if it is absent

  static Buffer buffer_of(void* data, std::int64_t bytes) {
    return {static_cast<std::byte*>(data), data == nullptr ? 0 : static_cast<std::size_t>(bytes)};
  }

  static std::array<Buffer, 4> buffers_of(const ForwardArguments& given) {
    const std::int64_t channels = given.x.channels;
    const auto of_channels = [&](const MutableChannelView& view) {
      return buffer_of(view.data, channels * size_of(view.dtype));
    };
    constexpr std::int64_t kNumber = sizeof(double);
    return {of_channels(given.running.mean), of_channels(given.running.var),
            buffer_of(given.running.updates, sizeof(std::int64_t)),
            buffer_of(given.accumulated.data, (limbs_size(channels) + kHeaderSize) * kNumber)};
  }

  // Calls function(buffer, its copy) for the buffers that are present.
  template <class Function>
  void for_each(const Function& function) noexcept {
    std::byte* copy = copies_.data();
    for (const Buffer& buffer : buffers_) {
      if (buffer.empty()) continue;
      function(buffer, copy);
      copy += whole_cache_lines(buffer.size());
    }
  }

  // nullptr if the buffer is absent.
  [[nodiscard]] void* copy_of(const Buffer& wanted) noexcept {
    void* found = nullptr;
    for_each([&](Buffer buffer, std::byte* copy) {
      if (buffer.data() == wanted.data()) found = copy;
    });
    return found;
  }

  ForwardArguments arguments_;
  std::array<Buffer, 4> buffers_;
  AlignedVector<std::byte> copies_;
};

}  // namespace normscope
