// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/saved_call.h"

#include <string>
#include <utility>

#include <ATen/core/List.h>

namespace normscope::binding {
namespace {

constexpr auto kEntry = "call";

}  // namespace

// Compiled autograd takes lists, but no object of a class of its own.
void SavedCall::save_in(::torch::autograd::AutogradContext& context) const {
  c10::impl::GenericList values(c10::AnyType::get());
  values.reserve(11);
  for (const std::string_view text : {call.scope, call.group_name, call.layer, activation}) {
    values.push_back(std::string(text));
  }
  for (const bool flag : {wanted.dx, wanted.dweight, wanted.dbias, wants_dresidual, decomposes}) {
    values.push_back(flag);
  }
  values.push_back(negative_slope);
  values.push_back(eps);
  context.saved_data[kEntry] = std::move(values);
}

SavedCall SavedCall::of(const ::torch::autograd::AutogradContext& context) {
  const at::ArrayRef<c10::IValue> values = context.saved_data.at(kEntry).toListRef();
  return {.call = {values[0].toStringView(), values[1].toStringView(), values[2].toStringView()},
          .wanted = {values[4].toBool(), values[5].toBool(), values[6].toBool()},
          .wants_dresidual = values[7].toBool(),
          .decomposes = values[8].toBool(),
          .activation = values[3].toStringView(),
          .negative_slope = values[9].toDouble(),
          .eps = values[10].toDouble()};
}

}  // namespace normscope::binding
