// SPDX-License-Identifier: Apache-2.0
//
// The ops for norm batches whose parts are in other calls or threads.
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
#include "normscope/torch/portable/parts.h"
#include "normscope/torch/tensors/kernels_in_use.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::parts {
namespace {

// For a tensor of moments that check_moments() accepts.
std::int64_t channels_of(const at::Tensor& moments) {
  return (moments.size(0) - kHeaderSize) / (kSums * kLimbs);
}

MessageView message_view(const at::Tensor& moments) {
  return {moments.mutable_data_ptr<double>(), channels_of(moments)};
}

at::Tensor empty_moments(const at::Tensor& x) {
  return at::empty_symint({moments_size(x.sym_size(1))}, float64_options(x));
}

at::Tensor empty_statistics(const at::Tensor& like, const c10::SymInt& channels) {
  return at::empty_symint({1, 3, channels}, float64_options(like));
}

at::Tensor moments(const at::Tensor& x) {
  check_part(x);
  if (uses_torch_kernels(x)) return portable_moments(x);
  CallSite site(x);
  site.prepare(x, /*slices=*/1);
  const at::Tensor in_layout = in_layout_of_output(x);
  at::Tensor result = empty_moments(x);
  as_torch([&] { batch_norm_moments(view(in_layout), message_view(result), site.alone()); });
  return result;
}

at::Tensor moments_of_meta(const at::Tensor& x) {
  check_part(x);
  return empty_moments(x);
}

// An empty tensor [0, C] with x's dtype on the moments' device, to check the buffers against.
at::Tensor channels_like(const FinalizeOpArguments& op) {
  TORCH_CHECK(op.moments.dim() == 1 && op.moments.sym_size(0) >= kHeaderSize &&
                  (op.moments.sym_size(0) - kHeaderSize) % (kSums * kLimbs) == 0,
              "moments: expected the shape [", kSums * kLimbs, " * channels + ", kHeaderSize,
              "], got ", op.moments.sym_sizes());
  const c10::SymInt channels = (op.moments.sym_size(0) - kHeaderSize) / (kSums * kLimbs);
  const at::Tensor x = at::empty_symint({0, channels}, op.moments.options().dtype(op.dtype));
  check_part(x);
  check_moments(x, "moments", op.moments);
  check_running(x, op.running);
  return x;
}

at::Tensor finalize(const FinalizeOpArguments& op) {
  const at::Tensor x = channels_like(op);
  if (uses_torch_kernels(x)) return portable_finalize(op);
  CallSite site(op.moments);
  site.prepare(x, /*slices=*/1);
  const at::Tensor own = op.moments.clone();
  at::Tensor statistics = empty_statistics(op.moments, x.size(1));
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

at::Tensor finalize_meta(const FinalizeOpArguments& op) {
  return empty_statistics(op.moments, channels_like(op).sym_size(1));
}

GradientTensors gradient_sums(const at::Tensor& dy, const at::Tensor& x,
                              const at::Tensor& statistics) {
  check_part(dy, x, statistics);
  if (uses_torch_kernels(x)) return portable_part_gradient_sums(dy, x, statistics);
  CallSite site(x);
  site.prepare(x, /*slices=*/1);
  const Gradients gradients(x, {.dx = false, .dweight = true, .dbias = true});
  const at::Tensor x_in_layout = in_layout_of_output(x);
  const at::Tensor dy_in_layout = in_layout_of(x_in_layout, dy);
  at::Tensor sums = empty_moments(x);
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

GradientTensors gradient_sums_meta(const at::Tensor& dy, const at::Tensor& x,
                                   const at::Tensor& statistics) {
  check_part(dy, x, statistics);
  const Gradients gradients(x, {.dx = false, .dweight = true, .dbias = true});
  return {empty_moments(x), gradients.dweight, gradients.dbias};
}

void check_input_gradient(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                          const at::Tensor& statistics, const at::Tensor& sums) {
  check_part(dy, x, statistics);
  check_weight(x, weight);
  check_moments(x, "sums", sums);
}

at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                          const at::Tensor& statistics, const at::Tensor& sums) {
  check_input_gradient(dy, x, weight, statistics, sums);
  if (uses_torch_kernels(x)) {
    return portable_part_input_gradient(dy, x, weight, statistics, sums);
  }
  CallSite site(x);
  site.prepare(x, /*slices=*/1);
  at::Tensor dx = empty_output(x);
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

at::Tensor input_gradient_meta(const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const at::Tensor& statistics,
                               const at::Tensor& sums) {
  check_input_gradient(dy, x, weight, statistics, sums);
  return empty_output(x);
}

void register_ops(::torch::Library& m) {
  m.impl("batch_norm_moments", &moments);
  m.impl("batch_norm_finalize", &Taken<FinalizeOp, &finalize>::call);
  m.impl("batch_norm_part_gradient_sums", &gradient_sums);
  m.impl("batch_norm_part_input_gradient", &input_gradient);
}

}  // namespace

NORMSCOPE_FOR_ALL_DEVICES(register_ops);

TORCH_LIBRARY_IMPL(normscope, Meta, m) {
  m.impl("batch_norm_moments", &moments_of_meta);
  m.impl("batch_norm_finalize", &Taken<FinalizeOp, &finalize_meta>::call);
  m.impl("batch_norm_part_gradient_sums", &gradient_sums_meta);
  m.impl("batch_norm_part_input_gradient", &input_gradient_meta);
}

}  // namespace normscope::binding::parts
