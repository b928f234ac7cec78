// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/saved_call.h"

#include <string>

namespace normscope::binding {
namespace {

constexpr auto kEntry = "call";

}  // namespace

// Compiled autograd hashes the entry, and cannot hash an object of a class of its own.
void SavedCall::save_in(::torch::autograd::AutogradContext& context) const {
  context.saved_data[kEntry] = c10::ivalue::Tuple::create(
      std::string(call.scope), std::string(call.group_name), std::string(call.layer), wanted.dx,
      wanted.dweight, wanted.dbias, wants_dresidual, decomposes, std::string(activation),
      negative_slope, eps);
}

SavedCall SavedCall::of(const ::torch::autograd::AutogradContext& context) {
  const auto& values = context.saved_data.at(kEntry).toTupleRef().elements();
  return {.call = {values[0].toStringView(), values[1].toStringView(), values[2].toStringView()},
          .wanted = {values[3].toBool(), values[4].toBool(), values[5].toBool()},
          .wants_dresidual = values[6].toBool(),
          .decomposes = values[7].toBool(),
          .activation = values[8].toStringView(),
          .negative_slope = values[9].toDouble(),
          .eps = values[10].toDouble()};
}

}  // namespace normscope::binding
