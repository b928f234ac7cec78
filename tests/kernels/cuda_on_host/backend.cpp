// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda_on_host/backend.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "normscope/core/cache_lines.h"

// clang-format off: device.h defines the language that backend.h is written in
#include "tests/kernels/cuda_on_host/device.h"
#include "normscope/kernels/cuda/backend.h"
// clang-format on

namespace normscope::cuda_on_host {
namespace {

std::atomic<int> launched = 0;
std::atomic<int> started_early = 0;
thread_local bool last_lets_next_start = false;

struct Device {
  // Few: blocks then share channels, and have several warps or, for small tensors, one.
  static int multiprocessors() { return 4; }
  template <class Kernel>
  static std::int64_t blocks_at_once(Kernel /*kernel*/, int /*threads*/) {
    return 24;
  }

  // Small: some outputs of the tests are then larger than half of it.
  static std::int64_t l2_bytes() { return 4096; }

  static bool is_capturing(Stream stream) { return cuda_on_host::is_capturing(stream); }

  static double* new_zeros(Stream /*stream*/, std::int64_t size) {
    double* const zeros = CacheLineAllocator<double>().allocate(static_cast<std::size_t>(size));
    std::fill_n(zeros, size, 0.0);
    return zeros;
  }

  template <class Kernel, class... Arguments>
  static void launch(Stream stream, const cuda::Grid& grid, cuda::Order order, Kernel kernel,
                     Arguments... arguments) {
    const Index blocks{static_cast<unsigned>(grid.blocks_x), static_cast<unsigned>(grid.blocks_y),
                       static_cast<unsigned>(grid.blocks_z)};
    const Index threads{static_cast<unsigned>(grid.threads_x),
                        static_cast<unsigned>(grid.threads_y), 1};
    const Start start = order == cuda::Order::kEarly ? Start::kEarly : Start::kAfterOthers;
    queue(stream, [=] {
      if (start == Start::kEarly && last_lets_next_start) ++started_early;
      last_lets_next_start = run_grid(blocks, threads, start, [=] { kernel(arguments...); });
      ++launched;
    });
  }
};

}  // namespace

constinit const DeviceKernels kKernels =
    cuda::Backend<Device>::kernels("cuda_on_host", [] { return std::string(); });

int launches() noexcept { return launched; }
int early_starts() noexcept { return started_early; }

}  // namespace normscope::cuda_on_host
