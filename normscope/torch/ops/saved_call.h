// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include <torch/csrc/autograd/custom_function.h>

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// What a backward needs to know of its forward, besides tensors.
struct SavedCall {
  ScopedCall call;
  WantedGradients wanted = {};
  bool wants_dresidual = false;
  bool decomposes = false;  // ForwardOpArguments::decomposes()
  std::string_view activation = "none";
  double negative_slope = 0.0;

  [[nodiscard]] bool activates() const { return activation != "none"; }

  // Writes few entries of saved_data, because each one takes time in every forward.
  void save_in(::torch::autograd::AutogradContext& context) const;

  // The strings are views of those that the context keeps.
  [[nodiscard]] static SavedCall of(const ::torch::autograd::AutogradContext& context);
};

}  // namespace normscope::binding
