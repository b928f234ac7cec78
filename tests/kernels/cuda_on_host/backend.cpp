// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda_on_host/backend.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "normscope/core/cache_lines.h"
#include "normscope/core/error.h"

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

  template <class Kernel>
  static std::int64_t most_in_cluster(Kernel /*kernel*/) {
    return cuda::kMostInCluster;
  }

  // Small: some outputs of the tests are then larger than half of it.
  static std::int64_t l2_bytes() { return 4096; }

  static bool is_capturing(Stream stream) { return cuda_on_host::is_capturing(stream); }

  static double* new_zeros(Stream /*stream*/, std::int64_t size) {
    double* const zeros = CacheLineAllocator<double>().allocate(static_cast<std::size_t>(size));
    std::fill_n(zeros, size, 0.0);
    return zeros;
  }

  // Shared memory of the host, which other processes open by the number of its file.
  struct File {
    int process;
    int descriptor;
    std::int64_t size;  // doubles
  };

  static double* allocate_for_peers(std::int64_t size, PeerHandle& handle) {
    const int descriptor = memfd_create("cuda_on_host", MFD_CLOEXEC);
    const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(double);
    if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
      throw DeviceError("cuda_on_host: out of memory");
    }
    const File file{getpid(), descriptor, size};
    std::memcpy(handle.data(), &file, sizeof(file));
    return open_of_peer(handle);
  }

  static double* open_of_peer(const PeerHandle& handle) {
    File file = {};
    std::memcpy(&file, handle.data(), sizeof(file));
    const std::string path =
        "/proc/" + std::to_string(file.process) + "/fd/" + std::to_string(file.descriptor);
    const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) throw DeviceError("cuda_on_host: cannot open " + path);
    void* const opened = mmap(nullptr, static_cast<std::size_t>(file.size) * sizeof(double),
                              PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (opened == MAP_FAILED) throw DeviceError("cuda_on_host: cannot map " + path);
    return static_cast<double*>(opened);
  }

  static void order(Stream /*earlier*/, Stream /*later*/) {}  // what is queued has ended

  static std::uint64_t* allocate_word() { return new std::uint64_t(0); }

  template <class Kernel, class... Arguments>
  static void launch(Stream stream, const cuda::Grid& grid, cuda::Order order, Kernel kernel,
                     Arguments... arguments) {
    const Index blocks{static_cast<unsigned>(grid.blocks_x), static_cast<unsigned>(grid.blocks_y),
                       static_cast<unsigned>(grid.blocks_z)};
    const Index threads{static_cast<unsigned>(grid.threads_x),
                        static_cast<unsigned>(grid.threads_y), 1};
    const auto cluster = static_cast<unsigned>(grid.cluster_y);
    const Start start = order == cuda::Order::kEarly ? Start::kEarly : Start::kAfterOthers;
    queue(stream, [=] {
      if (start == Start::kEarly && last_lets_next_start) ++started_early;
      last_lets_next_start =
          run_grid(blocks, threads, cluster, start, [=] { kernel(arguments...); });
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
