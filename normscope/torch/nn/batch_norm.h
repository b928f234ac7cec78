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
#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// The options of torch's layer, and which ranks share statistics.
struct BatchNormOptions {
  // Implicit, as in torch: BatchNorm2d(64).
  // NOLINTNEXTLINE(google-explicit-constructor)
  BatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}

  // C of inputs [N, C, *].
  TORCH_ARG(std::int64_t, num_features);
  // Added to the variance.
  TORCH_ARG(double, eps) = 1e-5;
  // The weight of new statistics in the running ones; nullopt: a cumulative average.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  // Whether there are a weight and a bias.
  TORCH_ARG(bool, affine) = true;
  // Whether there are running statistics. If it becomes false later, training leaves them as they
  // are, and evaluation uses the statistics of the batch.
  TORCH_ARG(bool, track_running_stats) = true;
  // Which ranks share statistics. It may change between any two steps.
  TORCH_ARG(Scope, scope) = Scope::world();
  // How the slices of slices:K update the running statistics.
  TORCH_ARG(SliceStats, slice_stats) = SliceStats::kPooled;
  // The activation after the normalization, applied in the same sweep; none by default.
  TORCH_ARG(ActivationFunction, activation);
  // RankGroup::name() of the ranks that the scope refers to; "": this rank alone.
  TORCH_ARG(std::string, group);
  // The layer's qualified name, for errors.
  TORCH_ARG(std::string, layer_name);
};

// A layer whose normalization can be watched in training: modules of libtorch have no hooks.
struct Observed {
  // Called with x and the output z of the normalization, before the residual and the activation,
  // unless it is empty. The layer continues with what it returns.
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& z)> observer;
};

// Batch normalization with a statistics scope: torch::nn's layer of the same name, with its members
// and checkpoints. In training, the ranks of the scope share statistics. Each forward and each
// backward is then a collective, which all of these ranks must call in the same order. Evaluation
// is torch's own arithmetic. A call that throws updates nothing.
//
// Throws c10::Error, as in Python: ValueError for arguments that do not fit, DistError if the ranks
// make different calls, DistBackendError if they cannot exchange.
template <std::size_t D, class Derived, class Theirs>
// NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): the modules inherit the constructors
class BatchNormImplBase : public ::torch::nn::NormImplBase<D, Derived, BatchNormOptions>,
                          public Observed {
 public:
  using TorchImpl = Theirs;
  using ::torch::nn::NormImplBase<D, Derived, BatchNormOptions>::NormImplBase;

  // Normalizes x [N, C, *], adds `residual` if it is defined, and applies the options' activation.
  // Without an activation, torch adds the residual.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {});

  // Takes over the parameters of torch's layer, and the memory of its buffers.
  void adopt(const Theirs& layer);

  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& x) override;

  FORWARD_HAS_DEFAULT_ARGS({1, ::torch::nn::AnyValue(at::Tensor())})

 private:
  at::Tensor evaluate(const at::Tensor& x);
  // By one op, and then `ending` unless it is empty.
  at::Tensor train_step(const at::Tensor& x, const ActivationFunction& activation,
                        const at::Tensor& residual,
                        const std::function<at::Tensor(const at::Tensor& z)>& ending);
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
