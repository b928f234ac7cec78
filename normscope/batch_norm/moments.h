// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/attributes.h"
#include "normscope/core/message_view.h"
#include "normscope/kernels/statistics.h"

namespace normscope NORMSCOPE_EXPORT {

// Forward and backward in two steps each, for norm batches whose parts are combined outside an
// Exchange: over several calls, or over the threads of one process. The caller adds the parts'
// messages number by number; the results are then those of the whole norm batch, bit for bit.
// Nothing is sent: a context's exchange is not used.
//
// All throw ArgumentError.

// Writes the moments of x to out.
void batch_norm_moments(const TensorView& x, const MessageView& out, const CallContext& context);

struct FinalizeArguments {
  MessageView moments;              // of a norm batch
  DType x_dtype = DType::kFloat32;  // the dtype of its tensors
  double eps = 1e-5;                // >= 0
  RunningUpdate running = {};       // [C] float32 or x's dtype
  RunningAverage running_average = RunningAverage::kExponential;
  double* statistics = nullptr;  // out [3, C]: mean_hi, mean_lo, inv_std
};

// The rest of forward, from the moments: the statistics and the update of the running statistics.
// On the host, throws OneValueError if the norm batch has one value per channel.
void batch_norm_finalize(const FinalizeArguments& arguments, const CallContext& context);

struct GradientSumsArguments {
  TensorView x;                        // [N, C, *]
  TensorView dy;                       // [N, C, *], x's dtype and layout
  const double* statistics = nullptr;  // [3, C], from batch_norm_finalize()
  MessageView sums;                    // out
  MutableChannelView dweight = {};     // out [C] over x's samples; none: not wanted
  MutableChannelView dbias = {};       // out [C] over x's samples; none: not wanted
};

// Writes the gradient sums over x's samples to `sums`.
void batch_norm_part_gradient_sums(const GradientSumsArguments& arguments,
                                   const CallContext& context);

struct InputGradientArguments {
  TensorView x;                        // [N, C, *]
  TensorView dy;                       // [N, C, *], x's dtype and layout
  MutableTensorView dx;                // [N, C, *], x's dtype and layout, memory of its own
  ChannelView weight = {};             // [C]; none: ones
  const double* statistics = nullptr;  // [3, C], from batch_norm_finalize()
  MessageView sums;                    // of the norm batch
};

// The rest of backward, from the sums: dx.
void batch_norm_part_input_gradient(const InputGradientArguments& arguments,
                                    const CallContext& context);

}  // namespace normscope
