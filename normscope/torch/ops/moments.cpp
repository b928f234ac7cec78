// SPDX-License-Identifier: Apache-2.0
//
// The ops for norm batches whose parts are in other calls or threads. On Meta, which has no
// storage, they return their results without filling them in.
#include "normscope/batch_norm/moments.h"

#include <cstdint>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/ops/all_devices.h"
#include "normscope/torch/ops/buffers.h"
#include "normscope/torch/ops/call_site.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/tensors/kernels_in_use.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::parts {
namespace {

c10::SymInt channels_of(const at::Tensor& moments) {
  return (moments.sym_size(0) - kHeaderSize) / (kSums * kLimbs);
}

// For a tensor of moments that check_moments() accepts.
MessageView message_view(const at::Tensor& moments) {
  return {moments.mutable_data_ptr<double>(), channels_of(moments).expect_int()};
}

at::Tensor empty_moments(const at::Tensor& x) {
  return at::empty_symint({moments_size(x.sym_size(1))}, x.options().dtype(at::kDouble));
}

at::Tensor moments(const at::Tensor& x) {
  check_part(x);
  if (uses_torch_kernels(x)) return portable_moments(x);
  at::Tensor result = empty_moments(x);
  if (x.is_meta()) return result;
  CallSite site(x);
  site.prepare(x, /*slices=*/1);
  const at::Tensor in_layout = in_layout_of_output(x);
  as_torch([&] { batch_norm_moments(view(in_layout), message_view(result), site.alone()); });
  return result;
}

// An empty tensor [0, C] with x's dtype on the moments' device, to check the buffers against.
at::Tensor channels_like(const FinalizeOpArguments& op) {
  TORCH_CHECK(op.moments.dim() == 1 && op.moments.sym_size(0) >= kHeaderSize &&
                  (op.moments.sym_size(0) - kHeaderSize) % (kSums * kLimbs) == 0,
              "moments: expected the shape [", kSums * kLimbs, " * channels + ", kHeaderSize,
              "], got ", op.moments.sym_sizes());
  const at::Tensor x =
      at::empty_symint({0, channels_of(op.moments)}, op.moments.options().dtype(op.dtype));
  check_part(x);
  check_moments(x, "moments", op.moments);
  check_running(x, op.running);
  return x;
}

at::Tensor finalize(const FinalizeOpArguments& op) {
  const at::Tensor x = channels_like(op);
  if (uses_torch_kernels(x)) return portable_finalize(op);
  at::Tensor statistics =
      at::empty_symint({1, 3, x.sym_size(1)}, op.moments.options().dtype(at::kDouble));
  if (x.is_meta()) return statistics;
  CallSite site(op.moments);
  site.prepare(x, /*slices=*/1);
  const at::Tensor own = op.moments.clone();
  FinalizeArguments arguments{.moments = message_view(own),
                              .x_dtype = *dtype_of(x),
                              .eps = op.eps,
                              .statistics = statistics.mutable_data_ptr<double>()};
  const WritableBuffers buffers(op.running);
  update_running(buffers.tensors(), op.momentum, arguments);
  as_torch([&] { batch_norm_finalize(arguments, site.alone()); });
  buffers.write_back();
  for (const OptionalTensor* buffer : op.running.all()) bump_version(*buffer);
  return statistics;
}

GradientTensors gradient_sums(const at::Tensor& dy, const at::Tensor& x,
                              const at::Tensor& statistics) {
  check_part(dy, x, statistics);
  if (uses_torch_kernels(x)) return portable_part_gradient_sums(dy, x, statistics);
  const Gradients gradients(x, {.dx = false, .dweight = true, .dbias = true});
  at::Tensor sums = empty_moments(x);
  if (x.is_meta()) return {sums, gradients.dweight, gradients.dbias};
  CallSite site(x);
  site.prepare(x, /*slices=*/1);
  const at::Tensor x_in_layout = in_layout_of_output(x);
  const at::Tensor dy_in_layout = in_layout_of(x_in_layout, dy);
  as_torch([&] {
    batch_norm_part_gradient_sums({.x = view(x_in_layout),
                                   .dy = view(dy_in_layout),
                                   .statistics = statistics.const_data_ptr<double>(),
                                   .sums = message_view(sums),
                                   .dweight = mutable_channel_view(gradients.dweight),
                                   .dbias = mutable_channel_view(gradients.dbias)},
                                  site.alone());
  });
  return {sums, gradients.dweight, gradients.dbias};
}

at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                          const at::Tensor& statistics, const at::Tensor& sums) {
  check_part(dy, x, statistics);
  check_weight(x, weight);
  check_moments(x, "sums", sums);
  if (uses_torch_kernels(x)) {
    return portable_part_input_gradient(dy, x, weight, statistics, sums);
  }
  at::Tensor dx = empty_output(x);
  if (x.is_meta()) return dx;
  CallSite site(x);
  site.prepare(x, /*slices=*/1);
  const at::Tensor x_in_layout = in_layout_of(dx, x);
  const at::Tensor dy_in_layout = in_layout_of(dx, dy);
  const at::Tensor own = sums.clone();
  const OptionalTensor contiguous_weight = contiguous(weight);
  as_torch([&] {
    batch_norm_part_input_gradient({.x = view(x_in_layout),
                                    .dy = view(dy_in_layout),
                                    .dx = mutable_view(dx),
                                    .weight = channel_view(contiguous_weight),
                                    .statistics = statistics.const_data_ptr<double>(),
                                    .sums = message_view(own)},
                                   site.alone());
  });
  return dx;
}

void register_ops(::torch::Library& m) {
  m.impl("batch_norm_moments", &moments);
  m.impl("batch_norm_finalize", &Taken<FinalizeOp, &finalize>::call);
  m.impl("batch_norm_part_gradient_sums", &gradient_sums);
  m.impl("batch_norm_part_input_gradient", &input_gradient);
}

}  // namespace

NORMSCOPE_FOR_ALL_DEVICES(register_ops);

TORCH_LIBRARY_IMPL(normscope, Meta, m) { register_ops(m); }

}  // namespace normscope::binding::parts
