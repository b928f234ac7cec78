// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <thread>

// clang-format off: device.h defines the language that the kernel is written in
#include "tests/kernels/cuda_on_host/device.h"
#include "tests/comm/on_device/sum_over_ranks.cuh"
#include "tests/kernels/cuda_on_host/backend.h"
// clang-format on

namespace normscope::testing {

void queue_sum_over_ranks(Stream stream, const SharedSlots& shared, int rank, double* values,
                          std::int64_t size) {
  cuda_on_host::queue(stream, [=] {
    // Several warps: enough to miss a barrier.
    cuda_on_host::run_grid({1, 1, 1}, {64, 1, 1}, cuda_on_host::Start::kAfterOthers,
                           [=] { cuda::sum_over_ranks(shared, rank, values, size); });
  });
}

}  // namespace normscope::testing
