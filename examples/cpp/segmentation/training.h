// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <normscope/torch/groups/rank_group.h>
#include <normscope/torch/nn/progressive_scope.h>
#include <torch/optim/adamw.h>

#include "segmentation/network.h"
#include "segmentation/scenes.h"

// One rank's part in training the segmentation network: its share of each global batch. Together
// the shares train as one process would. The same as examples/segmentation/trainer.py.
class Trainer {
 public:
  // `scope` is spelled as a normscope::Scope, or "progressive". All ranks get the parameters that
  // rank 0 draws from `seed`. Without `steps` there are as many as the file has scenes for. Throws
  // std::runtime_error if it has too few, or if the ranks do not divide its global batch.
  Trainer(const std::string& scenes, const std::string& scope, std::uint64_t seed,
          std::optional<std::int64_t> steps, const normscope::RankGroup& group);

  // Takes optimizer step number `step`. Returns the loss of this share; the mean over all shares is
  // the global batch's.
  double step(std::int64_t step);

  // Mean intersection over union on the held-out scenes, with the current running statistics.
  [[nodiscard]] double evaluate();

  // A hash of the bits of all running statistics, in hexadecimal digits.
  [[nodiscard]] std::string hash_of_statistics() const;

  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] std::int64_t global_batch() const { return scenes_.global_batch(); }

  // The scope that the next step trains with.
  [[nodiscard]] std::string scope() const { return scopes_.scope().str(); }

 private:
  SceneFile scenes_;
  const normscope::RankGroup& group_;
  std::int64_t steps_;
  std::int64_t share_begin_, share_end_;  // of each global batch
  at::Tensor class_weights_;              // [classes]
  SegmentationNetwork network_;
  normscope::nn::ProgressiveScope scopes_;
  torch::optim::AdamW optimizer_;
};
