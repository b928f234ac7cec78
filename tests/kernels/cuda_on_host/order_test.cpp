// SPDX-License-Identifier: Apache-2.0
//
// The order in which the kernels that write outputs read their inputs: backwards, because those
// that sum read them forwards, and leave the end in the second-level cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

// clang-format off: device.h defines the language that the kernels are written in
#include "tests/kernels/cuda_on_host/device.h"
#include "normscope/kernels/cuda/apply.cuh"
#include "normscope/kernels/cuda/grid.h"
// clang-format on

namespace normscope::cuda {
namespace {

using cuda_on_host::ThisThread;

// Which elements each thread of a grid has read, in its order.
class Record {
 public:
  using Thread = std::tuple<unsigned, unsigned, unsigned, unsigned>;  // block z, y, x; thread

  void add(float element) {
    const auto block = ThisThread::block();
    const auto thread = ThisThread::thread();
    const std::lock_guard lock(mutex_);
    elements_[{block.z, block.y, block.x, thread.y * ThisThread::block_size().x + thread.x}]
        .push_back(element);
  }
  [[nodiscard]] const std::map<Thread, std::vector<float>>& elements() const { return elements_; }

  // The first element that any thread of a block has read.
  [[nodiscard]] std::map<Thread, float> first_of_blocks() const {
    std::map<Thread, float> first;
    for (const auto& [thread, elements] : elements_) {
      const auto& [z, y, x, in_block] = thread;
      float& of_block = first.try_emplace({z, y, x, 0}, elements[0]).first->second;
      of_block = std::max(of_block, elements[0]);
    }
    return first;
  }

 private:
  std::mutex mutex_;
  std::map<Thread, std::vector<float>> elements_;
};

struct RecordedElements {
  using ElementType = float;
  using Real = float;
  struct Formula {};
  static constexpr int kCount = 0;
  static constexpr int kInputs = 1;
  static constexpr int kAtOnce = 4;
  static constexpr bool kIsLong = false;

  Elements<const float> inputs[kInputs];
  const float* coefficients;
  Record* record;

  float output(const Formula& /*formula*/, const float (&in)[kInputs]) const {
    record->add(in[0]);
    return in[0];
  }
};

// Runs a kernel on elements that are their own places in memory.
template <Access kAccess, class Run>
void expect_backwards(Layout layout, std::int64_t samples, std::int64_t channels,
                      std::int64_t positions, std::int64_t slices, const Run& run) {
  alignas(16) static thread_local float memory[2][1 << 15];
  const std::int64_t size = samples * channels * positions;
  ASSERT_LE(size, std::int64_t{1} << 15);
  std::iota(memory[0], memory[0] + size, 0.0F);
  const auto view = [&](float* data) {
    return layout == Layout::kChannelsFirst
               ? channels_first(static_cast<void*>(data), DType::kFloat32, samples, channels,
                                positions)
               : channels_last(static_cast<void*>(data), DType::kFloat32, samples, channels,
                               positions);
  };
  const MutableTensorView x = view(memory[0]);
  const MutableTensorView y = view(memory[1]);
  Record record;

  run(RecordedElements{{elements_of<float>(x.read_only())}, nullptr, &record},
      norm_batches(x.read_only(), slices), elements_of<float>(y));

  std::int64_t seen = 0;
  constexpr int kPack = kPackSize<float, kAccess>;
  for (const auto& [thread, elements] : record.elements()) {
    seen += static_cast<std::int64_t>(elements.size());
    for (std::size_t i = kPack; i < elements.size(); i += kPack) {
      EXPECT_LT(elements[i], elements[i - kPack]);
    }
  }
  EXPECT_EQ(seen, size);
  // Blocks start in the order of their indices, of which the first one runs fastest.
  const auto first = record.first_of_blocks();
  for (const auto& [thread, element] : first) {
    const auto& [z, y_of_grid, x_of_grid, in_block] = thread;
    for (const Record::Thread& later : {Record::Thread{z + 1, y_of_grid, x_of_grid, 0},
                                        Record::Thread{z, y_of_grid + 1, x_of_grid, 0}}) {
      if (first.contains(later)) {
        EXPECT_GT(element, first.at(later));
      }
    }
    const Record::Thread beside{z, y_of_grid, x_of_grid + 1, 0};
    const bool is_later = layout == Layout::kChannelsFirst;  // otherwise these are other channels
    if (is_later && first.contains(beside)) {
      EXPECT_GT(element, first.at(beside));
    }
  }
}

template <Access kAccess>
void expect_planes_backwards(std::int64_t samples, std::int64_t channels, std::int64_t positions,
                             std::int64_t slices) {
  expect_backwards<kAccess>(
      Layout::kChannelsFirst, samples, channels, positions, slices,
      [&](const RecordedElements& apply, const NormBatches& batches, const Elements<float>& y) {
        const auto blocks = static_cast<unsigned>(
            ceil_divide(batches.slice_size * channels, kBlockThreads / kWarp));
        cuda_on_host::run_grid(
            {blocks, 2, static_cast<unsigned>(slices)}, {kBlockThreads, 1, 1}, 1,
            cuda_on_host::Start::kEarly,
            [=] { apply_channels_first<kAccess, RecordedElements>(apply, batches, y, false); });
      });
}

TEST(OrderOfOutputs, PlanesAreWrittenBackwards) {
  expect_planes_backwards<Access::kPacks>(2, 9, 1300, 1);
  expect_planes_backwards<Access::kPacks>(7, 3, 1300, 3);
  expect_planes_backwards<Access::kElements>(2, 9, 701, 1);
}

TEST(OrderOfOutputs, RowsAreWrittenBackwards) {
  for (const bool joined : {true, false}) {
    expect_backwards<Access::kPacks>(
        Layout::kChannelsLast, 7, 8, 300, 3,
        [&](const RecordedElements& apply, const NormBatches& batches, const Elements<float>& y) {
          cuda_on_host::run_grid({1, 2, static_cast<unsigned>(joined ? 3 : 7)}, {2, 16, 1}, 1,
                                 cuda_on_host::Start::kEarly, [=] {
                                   apply_channels_last<Access::kPacks, RecordedElements>(
                                       apply, batches, y, joined, false);
                                 });
        });
  }
}

}  // namespace
}  // namespace normscope::cuda
