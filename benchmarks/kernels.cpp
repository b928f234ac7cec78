// SPDX-License-Identifier: Apache-2.0
//
// The kernels without torch, for kernels.py: the cost of a call that makes no tensors and no graph
// of autograd, with output memory that is already in use.
#include <cstdint>
#include <cstring>
#include <exception>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/execution.h"
#include "normscope/core/tensor_view.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define NORMSCOPE_BENCHMARK_API extern "C" [[gnu::visibility("default")]]

namespace {

using normscope::DType;

// OpenMP threads, each with consecutive tasks, as in at::parallel_for.
normscope::Execution execution_on(int threads) {
  return {.threads = threads,
          .parallel_for = [threads](std::int64_t tasks, const normscope::Task& task) {
#pragma omp parallel for num_threads(threads) schedule(static)
            for (std::int64_t i = 0; i < tasks; ++i) task(i);
          }};
}

normscope::CallContext context_with(const normscope::Execution& execution) {
  normscope::CallContext context;
  context.execution = &execution;
  return context;
}

// Copies whole vectors past the cache, and the remaining ends through it.
void copy_part(const char* from, char* to, std::int64_t size) {
  std::int64_t i = 0;
#if defined(__SSE2__)
  constexpr std::int64_t kVector = sizeof(__m128i);
  const auto before = static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(to) % kVector);
  if (size >= before) {
    std::memcpy(to, from, static_cast<std::size_t>(before));
    for (i = before; i + kVector <= size; i += kVector) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to + i, from + i, static_cast<std::size_t>(size - i));
}

}  // namespace

// One input, and memory for all results. `dtype` is the number of a DType.
struct Layer {
  const void* x;       // [N, C, P], or [N, P, C] if channels come last
  const void* dy;      // the same
  void* y;             // the same
  void* dx;            // the same
  double* statistics;  // [3, C]
  float* weight;       // [C]
  float* bias;         // [C]
  float* dweight;      // [C]
  float* dbias;        // [C]
  std::int64_t samples;
  std::int64_t channels;
  std::int64_t positions;
  std::int32_t dtype;
  std::int32_t channels_last;
  std::int32_t threads;

  template <class Pointer>
  [[nodiscard]] auto view(Pointer data) const {
    const auto type = static_cast<DType>(dtype);
    return channels_last != 0 ? normscope::channels_last(data, type, samples, channels, positions)
                              : normscope::channels_first(data, type, samples, channels, positions);
  }
};

// Both return 0, or 1 if the library throws.
NORMSCOPE_BENCHMARK_API int forward(const Layer* layer) {
  const normscope::Execution execution = execution_on(layer->threads);
  try {
    normscope::batch_norm_forward({.x = layer->view(layer->x),
                                   .y = layer->view(layer->y),
                                   .weight = {layer->weight},
                                   .bias = {layer->bias},
                                   .statistics = layer->statistics},
                                  context_with(execution));
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

NORMSCOPE_BENCHMARK_API int backward(const Layer* layer) {
  const normscope::Execution execution = execution_on(layer->threads);
  try {
    normscope::batch_norm_backward({.x = layer->view(layer->x),
                                    .dy = layer->view(layer->dy),
                                    .dx = layer->view(layer->dx),
                                    .weight = {layer->weight},
                                    .statistics = layer->statistics,
                                    .dweight = {layer->dweight},
                                    .dbias = {layer->dbias}},
                                   context_with(execution));
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// The fastest copy into memory that is not in the cache.
NORMSCOPE_BENCHMARK_API void streamed_copy(const void* from, void* to, std::int64_t size,
                                           std::int32_t threads) {
  const auto begin_of = [&](std::int64_t i) { return size / 64 * i / threads * 64; };
  execution_on(threads).parallel_for(threads, [&](std::int64_t i) {
    const std::int64_t end = i + 1 == threads ? size : begin_of(i + 1);
    copy_part(static_cast<const char*>(from) + begin_of(i), static_cast<char*>(to) + begin_of(i),
              end - begin_of(i));
  });
}
