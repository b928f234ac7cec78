// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// The mean and the biased variance of elements per channel, and their number. float32, or float64
// for float64 inputs.
struct Statistics {
  at::Tensor mean;   // [C]
  at::Tensor var;    // [C]
  at::Tensor count;  // [] or [1]
};

// `tensor` itself if it has the memory format that x suggests, else a copy in it: as torch's
// synchronized layer does with x itself, and as empty_output(x) is made.
[[nodiscard]] at::Tensor in_format_of(const at::Tensor& x, const at::Tensor& tensor);

// Of this rank's x, which is not empty.
[[nodiscard]] Statistics statistics_of(const at::Tensor& x);

// Sums [2 C] in float64: n * mean, n * (var + mean^2).
[[nodiscard]] at::Tensor sums_of(const Statistics& statistics);

// Of such sums followed by n, [2 C + 1]. The cancellation in the variance costs (mean / std)^2
// roundings of float64, less than those of float32 in x.
[[nodiscard]] Statistics statistics_of_sums(const at::Tensor& sums,
                                            const at::TensorOptions& options);

// Of several parts of a norm batch. Rows of `parts`: [parts, C]; counts [parts, 1].
[[nodiscard]] Statistics merged(const at::Tensor& means, const at::Tensor& vars,
                                const at::Tensor& counts);

// The statistics that other ops take, [1, 3, C] in float64, of a mean and an inverse standard
// deviation [C].
[[nodiscard]] at::Tensor stored_statistics(const at::Tensor& mean, const at::Tensor& inv_std);

// y * weight + bias, where there are such.
[[nodiscard]] at::Tensor affine(at::Tensor y, const OptionalTensor& weight,
                                const OptionalTensor& bias);

// The sums [C] of dy and dy * (x - mean); `centered` is x - mean, in the type of dy.
struct GradientSums {
  at::Tensor dy;
  at::Tensor dy_xmu;
};
[[nodiscard]] GradientSums gradient_sums(const at::Tensor& dy, const at::Tensor& centered);

// What dx needs per channel [C]: pointwise.h.
struct InputGradientValues {
  // Of the norm batch: its gradient sums, and its number of elements per channel [] or [1].
  InputGradientValues(const GradientSums& totals, const at::Tensor& count,
                      const at::Tensor& inv_std, const OptionalTensor& weight);

  at::Tensor scale;
  at::Tensor mean_dy;
  at::Tensor slope;
};
[[nodiscard]] at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& centered,
                                        const InputGradientValues& values);

// Whether this call is a recomputation, which must change nothing.
[[nodiscard]] bool repeats_a_forward();

// Whether a call has buffers, and whether it has something to update: not in a recomputation.
[[nodiscard]] bool has_buffers(const RunningTensors& running, const OptionalTensor& accumulated);
[[nodiscard]] bool updates_buffers(const RunningTensors& running,
                                   const OptionalTensor& accumulated);

[[nodiscard]] Statistics pooled(const std::vector<Statistics>& parts);

// torch's kernels take parameters and running statistics in the type of x's arithmetic. (Some also
// take x's type, but not on all devices.)
[[nodiscard]] OptionalTensor in_arithmetic(const OptionalTensor& parameter, const at::Tensor& x);

// Whether torch's batch norm updates the running statistics as this call shall.
[[nodiscard]] bool updates_as_torch(const ForwardOpArguments& op);

// Copies of the buffers of a call that may raise after its update. The update is made on the
// copies, and written back once the call has succeeded. No mode of torch sees these operations:
// some count those of a recomputation.
class BufferCopies {
 public:
  // Whether there are buffers, which hold numbers: graphs and fake tensors write nothing by
  // themselves.
  [[nodiscard]] static bool can_be_made(const ForwardOpArguments& op);

  explicit BufferCopies(const ForwardOpArguments& op);

  // `op` with the copies in place of the buffers.
  [[nodiscard]] ForwardOpArguments in(const ForwardOpArguments& op) const;

  // Writes the copies back, unless this is a recomputation.
  void write_back() const;

 private:
  std::array<OptionalTensor, 4> buffers_;  // the running statistics, and `accumulated`
  std::array<OptionalTensor, 4> copies_;
};

// Counts an update of the running statistics.
void count_update(const RunningTensors& running);

// Updates the running statistics, and adds the moments to `accumulated`. A norm batch with fewer
// than two elements per channel changes nothing: `may_be_too_small` says that only the device knows
// whether it is one.
void update_now(const RunningTensors& running, std::optional<double> momentum,
                const OptionalTensor& accumulated, const Statistics& statistics,
                bool may_be_too_small);

// The same, but not in a recomputation. A graph learns when it runs whether it is one.
void update_buffers(const RunningTensors& running, std::optional<double> momentum,
                    const OptionalTensor& accumulated, const Statistics& statistics,
                    bool may_be_too_small);

// Adds n * mean and n * (var + mean^2) to moments, in the format of a message (core/limbs.h). On
// these paths the coarsest limb has the whole sum, and the others are zero.
void add_moments(const at::Tensor& moments, const Statistics& statistics);
[[nodiscard]] at::Tensor sums_in(const at::Tensor& moments);  // [2 C + 1], the sums and the count

}  // namespace normscope::binding
