// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>

#include <torch/arg.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/pimpl.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/activation.h"
#include "normscope/core/export.h"
#include "normscope/core/scope.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// Options of torch's layer, and who shares statistics.
struct BatchNormOptions {
  // Implicit, as torch's: BatchNorm2d(64).
  // NOLINTNEXTLINE(google-explicit-constructor)
  BatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}

  // C of inputs [N, C, *].
  TORCH_ARG(std::int64_t, num_features);
  // What is added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  // Weight of the new statistics in the running ones; none: all have the same.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  // Whether there are weight and bias.
  TORCH_ARG(bool, affine) = true;
  // Whether there are running statistics.
  TORCH_ARG(bool, track_running_stats) = true;
  // Who shares statistics. It can be changed at any time between two steps.
  TORCH_ARG(Scope, scope) = Scope::world();
  // How the slices of slices:K update the running statistics.
  TORCH_ARG(SliceStats, slice_stats) = SliceStats::kPooled;
  // What follows the normalization, in the same sweep; none: nothing.
  TORCH_ARG(ActivationFunction, activation);
  // RankGroup::name() of the ranks that the scope speaks of; "": this rank alone.
  TORCH_ARG(std::string, group);
  // The layer's qualified name, by which errors call it.
  TORCH_ARG(std::string, layer_name);
};

// A layer that shows what it was given in training: modules of libtorch have no hooks.
struct InputObserved {
  // Called with x after a forward that succeeded; none: nobody looks.
  std::function<void(const at::Tensor& x)> input_observer;
};

// Batch normalization whose statistics have a scope: torch::nn's layer of the same name, with its
// members and checkpoints. In training the ranks of the scope share statistics; each forward and
// each backward is a collective, which all of them make in the same order. Evaluation is torch's
// own arithmetic. A call that throws updates nothing.
//
// Throws c10::Error, as in Python: ValueError for arguments that do not fit, DistError where the
// ranks meet in different calls, DistBackendError where they cannot exchange.
template <std::size_t D, class Derived, class Theirs>
// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): the modules inherit the constructors
class BatchNormImplBase : public ::torch::nn::NormImplBase<D, Derived, BatchNormOptions>,
                          public InputObserved {
 public:
  using TorchImpl = Theirs;
  using ::torch::nn::NormImplBase<D, Derived, BatchNormOptions>::NormImplBase;

  // Normalizes x [N, C, *]; adds `residual`, if it is defined; applies the options' activation.
  // Without an activation a residual is added by torch.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});

  // Takes the very parameters of torch's layer, and the memory of its buffers.
  void adopt(const Theirs& layer);

  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& x) override;

  FORWARD_HAS_DEFAULT_ARGS({1, ::torch::nn::AnyValue(at::Tensor())})

 private:
  at::Tensor evaluate(const at::Tensor& x);
  at::Tensor train_step(const at::Tensor& x, const ActivationFunction& activation,
                        const at::Tensor& residual);
};

class BatchNorm1dImpl : public BatchNormImplBase<1, BatchNorm1dImpl, ::torch::nn::BatchNorm1dImpl> {
 public:
  using BatchNormImplBase::BatchNormImplBase;
  static constexpr const char* kName = "normscope::nn::BatchNorm1d";
  static constexpr std::int64_t kDims[] = {2, 3};
};

class BatchNorm2dImpl : public BatchNormImplBase<2, BatchNorm2dImpl, ::torch::nn::BatchNorm2dImpl> {
 public:
  using BatchNormImplBase::BatchNormImplBase;
  static constexpr const char* kName = "normscope::nn::BatchNorm2d";
  static constexpr std::int64_t kDims[] = {4};
};

class BatchNorm3dImpl : public BatchNormImplBase<3, BatchNorm3dImpl, ::torch::nn::BatchNorm3dImpl> {
 public:
  using BatchNormImplBase::BatchNormImplBase;
  static constexpr const char* kName = "normscope::nn::BatchNorm3d";
  static constexpr std::int64_t kDims[] = {5};
};

TORCH_MODULE(BatchNorm1d);
TORCH_MODULE(BatchNorm2d);
TORCH_MODULE(BatchNorm3d);

extern template class BatchNormImplBase<1, BatchNorm1dImpl, ::torch::nn::BatchNorm1dImpl>;
extern template class BatchNormImplBase<2, BatchNorm2dImpl, ::torch::nn::BatchNorm2dImpl>;
extern template class BatchNormImplBase<3, BatchNorm3dImpl, ::torch::nn::BatchNorm3dImpl>;

}  // namespace nn
}  // namespace normscope
