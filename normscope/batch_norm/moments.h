// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/export.h"
#include "normscope/core/message_view.h"
#include "normscope/kernels/statistics.h"

namespace normscope NORMSCOPE_EXPORT {

// Forward and backward in two steps each, for norm batches whose parts meet outside an Exchange: in
// calls that come one after the other, or in the threads of one process. The parts' sums are added
// number by number, and the results are those of the whole norm batch, to the bit. Nothing is sent:
// a context's exchange is not used.
//
// All throw ArgumentError.

// out = the moments of x.
void batch_norm_moments(const TensorView& x, const MessageView& out, const CallContext& context);

struct FinalizeArguments {
  MessageView moments;              // of a norm batch
  DType x_dtype = DType::kFloat32;  // of its tensors
  double eps = 1e-5;                // >= 0
  RunningUpdate running = {};       // [C] float32 or x's dtype
  RunningAverage running_average = RunningAverage::kExponential;
  double* statistics = nullptr;  // out [3, C]: mean_hi, mean_lo, inv_std
};

// What forward makes of the moments: statistics, and the running statistics' update. On the host,
// throws OneValueError if the norm batch has one value per channel.
void batch_norm_finalize(const FinalizeArguments& arguments, const CallContext& context);

struct GradientSumsArguments {
  TensorView x;                        // [N, C, *]
  TensorView dy;                       // [N, C, *], x's dtype and layout
  const double* statistics = nullptr;  // [3, C], from batch_norm_finalize()
  MessageView sums;                    // out
  MutableChannelView dweight = {};     // out [C] of x's samples; none: not wanted
  MutableChannelView dbias = {};       // out [C] of x's samples; none: not wanted
};

// sums = those of the gradients of x's samples.
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

// What backward makes of the sums: dx.
void batch_norm_part_input_gradient(const InputGradientArguments& arguments,
                                    const CallContext& context);

}  // namespace normscope
