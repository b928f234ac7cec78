// SPDX-License-Identifier: Apache-2.0
#include "segmentation/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <numbers>
#include <stdexcept>
#include <vector>

#include <normscope/torch/nn/convert.h>
#include <normscope/torch/nn/data_parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

namespace {

// Background fills most of a scene; with this weight it does not drown the other classes.
constexpr double kBackgroundWeight = 0.3;

constexpr double kLargestLearningRate = 2e-2;
constexpr double kWarmUp = 0.3;  // of the steps
constexpr double kWeightDecay = 1e-2;

// How many held-out scenes go through the network at a time.
constexpr std::int64_t kEvaluationBatch = 32;

// The network that every rank starts from. Ranks that are threads share torch's generator, and take
// turns.
SegmentationNetwork make_network(std::int64_t class_count, std::uint64_t seed) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return SegmentationNetwork(class_count);
}

normscope::nn::ProgressiveScope make_scopes(SegmentationNetwork& network, const std::string& scope,
                                            std::int64_t steps, const normscope::RankGroup& group) {
  if (scope == "progressive") {
    normscope::nn::convert(*network, normscope::Scope::local(), group);
    return normscope::nn::ProgressiveScope::doubling(*network, steps, group.size());
  }
  normscope::nn::convert(*network, normscope::Scope::parse(scope), group);
  return {*network, {normscope::Scope::parse(scope)}, {0}};
}

// The learning rate of a step in a one-cycle schedule: along cosines from 1 / 25 of the largest
// rate up to it, and down to 1 / 10 000 of the first (torch.optim.lr_scheduler.OneCycleLR).
double learning_rate(std::int64_t step, std::int64_t steps) {
  constexpr double kFirst = kLargestLearningRate / 25;
  constexpr double kLast = kFirst / 1e4;
  const double top = kWarmUp * static_cast<double>(steps) - 1;
  const double end = static_cast<double>(steps) - 1;
  const auto now = static_cast<double>(step);
  const auto between = [](double from, double to, double share) {
    return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * share));
  };
  return now <= top ? between(kFirst, kLargestLearningRate, now / top)
                    : between(kLargestLearningRate, kLast, (now - top) / (end - top));
}

at::Tensor make_class_weights(std::int64_t class_count) {
  at::Tensor weights = torch::ones({class_count});
  weights[0] = kBackgroundWeight;
  return weights;
}

}  // namespace

Trainer::Trainer(const std::string& scenes, const std::string& scope, std::uint64_t seed,
                 std::optional<std::int64_t> steps, const normscope::RankGroup& group)
    : scenes_(scenes),
      group_(group),
      steps_(steps.value_or(scenes_.steps())),
      share_begin_(group.rank() * scenes_.global_batch() / group.size()),
      share_end_((group.rank() + 1) * scenes_.global_batch() / group.size()),
      class_weights_(make_class_weights(scenes_.class_count())),
      network_(make_network(scenes_.class_count(), seed)),
      scopes_(make_scopes(network_, scope, steps_, group)),
      optimizer_(network_->parameters(),
                 torch::optim::AdamWOptions(kLargestLearningRate).weight_decay(kWeightDecay)) {
  if (scenes_.global_batch() % group.size() != 0 || steps_ > scenes_.steps()) {
    throw std::runtime_error(
        scenes + ": expected a global batch that " + std::to_string(group.size()) +
        " ranks divide and " + std::to_string(steps_) + " steps, got one of " +
        std::to_string(scenes_.global_batch()) + " and " + std::to_string(scenes_.steps()));
  }
  normscope::nn::broadcast_parameters(*network_, group_);
}

double Trainer::step(std::int64_t step) {
  const auto [images, masks] = scenes_.training_batch(step, share_begin_, share_end_);
  network_->train();
  // A mean over pixels, not over their weights. Equal shares then have equal weight, and averaged
  // gradients are those of the global batch.
  const at::Tensor loss =
      torch::nn::functional::cross_entropy(network_->forward(images), masks,
                                           torch::nn::functional::CrossEntropyFuncOptions()
                                               .weight(class_weights_)
                                               .ignore_index(kVoid)
                                               .reduction(torch::kNone))
          .mean();
  optimizer_.zero_grad();
  loss.backward();
  normscope::nn::average_gradients(*network_, group_);
  optimizer_.param_groups().front().options().set_lr(learning_rate(step, steps_));
  optimizer_.step();
  scopes_.step();
  return loss.item<double>();
}

double Trainer::evaluate() {
  const at::NoGradGuard no_grad;
  network_->eval();
  const std::int64_t classes = scenes_.class_count();
  at::Tensor pairs = torch::zeros({classes * classes}, torch::kLong);  // true, predicted
  for (std::int64_t begin = 0; begin < scenes_.held_out_count(); begin += kEvaluationBatch) {
    const std::int64_t end = std::min(begin + kEvaluationBatch, scenes_.held_out_count());
    const auto [images, masks] = scenes_.held_out_batch(begin, end);
    const at::Tensor predictions = network_->forward(images).argmax(1);
    const at::Tensor known = masks != kVoid;
    pairs += torch::bincount((masks * classes + predictions).masked_select(known), {},
                             classes * classes);
  }
  const at::Tensor counts = pairs.view({classes, classes});
  const at::Tensor intersection = counts.diagonal().to(torch::kDouble);
  const at::Tensor both = counts.sum(0) + counts.sum(1) - intersection;
  const at::Tensor seen = both > 0;
  return (intersection.masked_select(seen) / both.masked_select(seen)).mean().item<double>();
}

std::string Trainer::hash_of_statistics() const {
  // FNV-1a, as in examples/segmentation/write_scenes.py.
  std::uint64_t hash = 14695981039346656037ULL;
  for (const auto& buffer : network_->named_buffers()) {
    if (buffer.key().ends_with("num_batches_tracked")) continue;
    const auto* bytes = static_cast<const unsigned char*>(buffer.value().const_data_ptr());
    for (std::size_t i = 0; i < buffer.value().nbytes(); ++i) {
      hash = (hash ^ bytes[i]) * 1099511628211ULL;
    }
  }
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}
