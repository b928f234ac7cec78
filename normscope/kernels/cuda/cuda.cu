// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <cuda_runtime.h>

#include "normscope/core/error.h"
#include "normscope/kernels/cuda/backend.h"
#include "normscope/kernels/cuda/cuda.h"
#include "normscope/kernels/cuda/refusal.h"

namespace normscope::cuda {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  // Clears the error. Otherwise the runtime would report it to its next caller, too.
  (void)cudaGetLastError();
  throw DeviceError(std::string("cuda: ") + call + ": " + cudaGetErrorString(error));
}

int attribute_of_current_device(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
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

// The device that is current for the calling thread.
struct CurrentDevice {
  static int multiprocessors() {
    return attribute_of_current_device(cudaDevAttrMultiProcessorCount);
  }

  static bool is_capturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.handle), &status),
          "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  static double* new_zeros(Stream stream, std::int64_t size) {
    const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(double);
    void* zeros = nullptr;
    {
      // Another thread may be capturing, which otherwise forbids this.
      const RelaxedCapture relaxed;
      check(cudaMalloc(&zeros, bytes), "cudaMalloc");
    }
    check(cudaMemsetAsync(zeros, 0, bytes, static_cast<cudaStream_t>(stream.handle)),
          "cudaMemsetAsync");
    return static_cast<double*>(zeros);
  }

  template <class Kernel, class... Arguments>
  static void launch(Stream stream, const Grid& grid, Order order, Kernel kernel,
                     Arguments... arguments) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim =
        dim3(static_cast<unsigned>(grid.blocks_x), static_cast<unsigned>(grid.blocks_y),
             static_cast<unsigned>(grid.blocks_z));
    config.blockDim =
        dim3(static_cast<unsigned>(grid.threads_x), static_cast<unsigned>(grid.threads_y));
    config.stream = static_cast<cudaStream_t>(stream.handle);
    config.attrs = &early;
    config.numAttrs = order == Order::kEarly && can_launch_early() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "launching a kernel");
  }

 private:
  // From compute capability 9.0 on.
  static bool can_launch_early() {
    return attribute_of_current_device(cudaDevAttrComputeCapabilityMajor) >= 9;
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
