// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "normscope/core/error.h"
#include "normscope/kernels/backends.h"
#include "normscope/kernels/cuda/backend.h"
#include "normscope/kernels/cuda/refusal.h"

namespace normscope::cuda {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  // Clears the error. Otherwise the runtime would report it to its next caller, too.
  (void)cudaGetLastError();
  throw DeviceError(std::string("cuda: ") + call + ": " + cudaGetErrorString(error));
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// What CUDA answers the same each time. To ask takes longer than to launch a kernel.
template <class Key, class Value>
class Known {
 public:
  template <class Ask>
  Value get(const Key& key, const Ask& ask) {
    const std::lock_guard lock(mutex_);
    const auto found = answers_.find(key);
    return found != answers_.end() ? found->second : answers_[key] = ask();
  }

 private:
  std::mutex mutex_;
  std::map<Key, Value> answers_;
};

int attribute_of_current_device(cudaDeviceAttr attribute) {
  // Never destroyed, as the other ones: a program may launch kernels as it ends.
  static auto& known = *new Known<std::pair<int, cudaDeviceAttr>, int>;
  const int device = current_device();
  return known.get({device, attribute}, [&] {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
  });
}

// Lets the calling thread do what is forbidden while a stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { exchange(); }

 private:
  void exchange() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Free {
  void operator()(double* memory) const { (void)cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<double, Free>;

// [size] that work on the stream finds to be zeros.
DeviceMemory allocate_zeros(std::int64_t size, cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(double);
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  DeviceMemory zeros(static_cast<double*>(memory));
  check(cudaMemsetAsync(memory, 0, bytes, stream), "cudaMemsetAsync");
  return zeros;
}

// The same, which also other streams find to be zeros. On a stream of its own: the work must not be
// captured.
DeviceMemory allocate_zeros_at_once(std::int64_t size) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const std::unique_ptr<CUstream_st, decltype(&cudaStreamDestroy)> kept(stream, cudaStreamDestroy);
  DeviceMemory zeros = allocate_zeros(size, stream);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return zeros;
}

// Zeros for graphs. Each belongs to one graph, which leaves zeros, and then to another one.
class ZerosOfGraphs {
 public:
  static double* take(cudaGraph_t graph, std::int64_t size) {
    std::unique_ptr<Zeros> zeros = unused_of(current_device(), size);
    if (!zeros) zeros = allocate(size);
    double* const data = zeros->data.get();
    // From here on the zeros are the graph's, or go back to the unused ones.
    Zeros* const given = zeros.release();
    cudaUserObject_t kept = nullptr;
    const cudaError_t error =
        cudaUserObjectCreate(&kept, given, give_back, 1, cudaUserObjectNoDestructorSync);
    if (error != cudaSuccess) give_back(given);
    check(error, "cudaUserObjectCreate");
    const cudaError_t refusal = cudaGraphRetainUserObject(graph, kept, 1, cudaGraphUserObjectMove);
    if (refusal != cudaSuccess) (void)cudaUserObjectRelease(kept, 1);
    check(refusal, "cudaGraphRetainUserObject");
    return data;
  }

 private:
  struct Zeros {
    int device;
    std::int64_t size;
    DeviceMemory data;
  };
  struct Unused {
    std::mutex mutex;
    std::vector<std::unique_ptr<Zeros>> zeros;
  };

  // Never destroyed: CUDA may destroy graphs when the program ends.
  static Unused& unused() {
    static auto& all = *new Unused;
    return all;
  }

  static std::unique_ptr<Zeros> unused_of(int device, std::int64_t size) {
    auto& [mutex, all] = unused();
    const std::lock_guard lock(mutex);
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& zeros) {
      return zeros->device == device && zeros->size >= size;
    });
    if (found == all.end()) return nullptr;
    std::unique_ptr<Zeros> zeros = std::move(*found);
    all.erase(found);
    return zeros;
  }

  static std::unique_ptr<Zeros> allocate(std::int64_t size) {
    return std::make_unique<Zeros>(Zeros{current_device(), size, allocate_zeros_at_once(size)});
  }

  // CUDA calls this after the last run of a destroyed graph. It must not call CUDA.
  static void CUDART_CB give_back(void* zeros) {
    auto& [mutex, all] = unused();
    const std::lock_guard lock(mutex);
    all.emplace_back(static_cast<Zeros*>(zeros));
  }
};

// How many blocks of each kernel the devices run at the same time.
std::int64_t known_blocks_at_once(const void* kernel, int threads) {
  static auto& known = *new Known<std::tuple<int, const void*, int>, std::int64_t>;
  return known.get({current_device(), kernel, threads}, [&] {
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::int64_t{per_multiprocessor} *
           attribute_of_current_device(cudaDevAttrMultiProcessorCount);
  });
}

// The device that is current for the calling thread.
struct CurrentDevice {
  static int multiprocessors() {
    return attribute_of_current_device(cudaDevAttrMultiProcessorCount);
  }

  template <class Kernel>
  static std::int64_t blocks_at_once(Kernel* kernel, int threads) {
    return known_blocks_at_once(reinterpret_cast<const void*>(kernel), threads);
  }

  template <class Kernel>
  static std::int64_t most_in_cluster(Kernel* kernel) {
    const bool has_clusters = attribute_of_current_device(cudaDevAttrClusterLaunch) != 0 &&
                              has_code_since_90(reinterpret_cast<const void*>(kernel));
    return has_clusters ? kMostInCluster : 1;
  }

  static std::int64_t l2_bytes() { return attribute_of_current_device(cudaDevAttrL2CacheSize); }

  static bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.handle), &status),
          "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  static double* new_zeros(Stream stream, std::int64_t size) {
    // This thread or another one may be capturing, which otherwise forbids this.
    const RelaxedCapture relaxed;
    if (cudaGraph_t graph = graph_of(stream)) return ZerosOfGraphs::take(graph, size);
    return allocate_zeros(size, static_cast<cudaStream_t>(stream.handle)).release();
  }

  static double* allocate_for_peers(std::int64_t size, PeerHandle& handle) {
    const RelaxedCapture relaxed;
    DeviceMemory zeros = allocate_zeros_at_once(size);
    cudaIpcMemHandle_t of_cuda = {};
    check(cudaIpcGetMemHandle(&of_cuda, zeros.get()), "cudaIpcGetMemHandle");
    handle = std::bit_cast<PeerHandle>(of_cuda);
    return zeros.release();
  }

  static double* open_of_peer(const PeerHandle& handle) {
    const RelaxedCapture relaxed;
    void* opened = nullptr;
    check(cudaIpcOpenMemHandle(&opened, std::bit_cast<cudaIpcMemHandle_t>(handle),
                               cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle");
    return static_cast<double*>(opened);
  }

  static void order(Stream earlier, Stream later) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    cudaError_t error = cudaEventRecord(event, static_cast<cudaStream_t>(earlier.handle));
    if (error == cudaSuccess) {
      error = cudaStreamWaitEvent(static_cast<cudaStream_t>(later.handle), event, 0);
    }
    (void)cudaEventDestroy(event);  // CUDA keeps it until the work has ended
    check(error, "ordering streams");
  }

  static std::uint64_t* allocate_word() {
    const RelaxedCapture relaxed;
    void* word = nullptr;
    check(cudaHostAlloc(&word, sizeof(std::uint64_t), cudaHostAllocPortable), "cudaHostAlloc");
    return new (word) std::uint64_t(0);
  }

  template <class Kernel, class... Arguments>
  static void launch(Stream stream, const Grid& grid, Order order, Kernel kernel,
                     Arguments... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.attrs = attributes;
    if (order == Order::kEarly && has_code_since_90(reinterpret_cast<const void*>(kernel))) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster_y > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {1, static_cast<unsigned>(grid.cluster_y), 1};
    }
    config.gridDim =
        dim3(static_cast<unsigned>(grid.blocks_x), static_cast<unsigned>(grid.blocks_y),
             static_cast<unsigned>(grid.blocks_z));
    config.blockDim =
        dim3(static_cast<unsigned>(grid.threads_x), static_cast<unsigned>(grid.threads_y));
    config.stream = static_cast<cudaStream_t>(stream.handle);
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a kernel");
  }

 private:
  // The graph that the stream is being captured into; nullptr if it is not.
  static cudaGraph_t graph_of(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = nullptr;
    const auto handle = static_cast<cudaStream_t>(stream.handle);
#if CUDART_VERSION >= 13000
    check(cudaStreamGetCaptureInfo(handle, &status, nullptr, &graph), "cudaStreamGetCaptureInfo");
#else
    check(cudaStreamGetCaptureInfo_v2(handle, &status, nullptr, &graph),
          "cudaStreamGetCaptureInfo");
#endif
    return status == cudaStreamCaptureStatusActive ? graph : nullptr;
  }

  // Whether the code of the kernel that this device runs has wait_for_earlier_kernel() and
  // meet_in_cluster(). The device alone does not tell: a new one also runs code that the driver has
  // made of older PTX.
  static bool has_code_since_90(const void* kernel) {
    static auto& known = *new Known<std::pair<int, const void*>, bool>;
    return known.get({current_device(), kernel}, [&] {
      cudaFuncAttributes attributes = {};
      check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
      return attributes.ptxVersion >= kFirstArchitectureThatWaits;
    });
  }
};

// There is no code for architectures other than those that this file was compiled for.
std::string why_not() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, write_coefficients_of_statistics<float>);
  (void)cudaGetLastError();
  if (error == cudaSuccess) return "";
  Refusal refusal = {.has_no_code = error == cudaErrorNoKernelImageForDevice ||
                                    error == cudaErrorInvalidDeviceFunction,
                     .error = cudaGetErrorString(error)};
  (void)cudaDriverGetVersion(&refusal.driver);
  (void)cudaRuntimeGetVersion(&refusal.runtime);
  return refusal.text();
}

}  // namespace

const DeviceKernels kKernels = Backend<CurrentDevice>::kernels("cuda", why_not);

}  // namespace normscope::cuda
