// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/cache_lines.h"

namespace normscope {

// Copies of the buffers that a forward on the host updates. The forward works on the copies: if it
// throws, for example because memory runs out after the exchange, the buffers are as before.
class StagedBuffers {
 public:
  explicit StagedBuffers(const ForwardArguments& given) : given_(given), arguments_(given) {
    std::size_t size = 0;
    for_each_buffer(arguments_,
                    [&](const void*, std::size_t bytes) { size += whole_cache_lines(bytes); });
    copies_.resize(size);
    std::byte* copy = copies_.data();
    for_each_buffer(arguments_, [&]<class Data>(Data*& data, std::size_t bytes) {
      data = static_cast<Data*>(std::memcpy(copy, data, bytes));
      copy += whole_cache_lines(bytes);
    });
  }

  // With the copies in place of the buffers.
  [[nodiscard]] const ForwardArguments& arguments() const noexcept { return arguments_; }

  // Writes the copies back.
  void commit() noexcept {
    const std::byte* copy = copies_.data();
    for_each_buffer(given_, [&](void* data, std::size_t bytes) {
      std::memcpy(data, copy, bytes);
      copy += whole_cache_lines(bytes);
    });
  }

 private:
  // Calls function(pointer, bytes) for the buffers that are present.
  template <class Function>
  static void for_each_buffer(ForwardArguments& arguments, const Function& function) {
    const auto call = [&](auto*& data, std::int64_t numbers, std::int64_t size_of_number) {
      const auto bytes = static_cast<std::size_t>(numbers * size_of_number);
      if (data != nullptr && bytes > 0) function(data, bytes);
    };
    auto& [mean, var, momentum, updates] = arguments.running;
    const std::int64_t channels = arguments.x.channels;
    call(mean.data, channels, size_of(mean.dtype));
    call(var.data, channels, size_of(var.dtype));
    call(updates, 1, sizeof(*updates));
    call(arguments.accumulated.data, limbs_size(channels) + kHeaderSize, sizeof(double));
  }

  ForwardArguments given_;
  ForwardArguments arguments_;
  AlignedVector<std::byte> copies_;
};

}  // namespace normscope
