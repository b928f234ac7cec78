// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// A scope that grows, or changes in any other way, while a module trains: from step milestones[i]
// on, its layers have scopes[i]. Make it before the first step, and call step() after each step of
// the optimizer, on every rank. The module must live as long as this object.
//
// It follows the idea of progressive batch normalization (Qin et al. 2019), whose schedule is not
// public.
class ProgressiveScope {
 public:
  // Throws ArgumentError unless there is one milestone for each scope, the first is 0 and they
  // increase. Also throws if the module has no layer of normscope.
  ProgressiveScope(::torch::nn::Module& module, std::vector<Scope> scopes,
                   std::vector<std::int64_t> milestones);

  // local, group:2, group:4, ..., world, each for an equal part of the steps. Also throws
  // ArgumentError if there are fewer steps than scopes.
  [[nodiscard]] static ProgressiveScope doubling(::torch::nn::Module& module,
                                                 std::int64_t total_steps, int ranks);

  [[nodiscard]] const Scope& scope() const;
  void step();

  // The number of steps made so far, for a checkpoint.
  [[nodiscard]] std::int64_t last_step() const noexcept { return last_step_; }

  // Resumes from a checkpoint. Throws ArgumentError if `last_step` is negative.
  void set_last_step(std::int64_t last_step);

 private:
  ::torch::nn::Module* module_;
  std::vector<Scope> scopes_;
  std::vector<std::int64_t> milestones_;
  std::int64_t last_step_ = 0;
};

}  // namespace nn
}  // namespace normscope
