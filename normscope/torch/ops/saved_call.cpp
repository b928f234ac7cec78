// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/saved_call.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace normscope::binding {
namespace {

// Neither scopes nor the names of groups and activations contain separators; the layer is last.
constexpr char kSeparator = '\0';

constexpr std::int64_t kWantsDx = 1;
constexpr std::int64_t kWantsDWeight = 2;
constexpr std::int64_t kWantsDBias = 4;
constexpr std::int64_t kWantsDResidual = 8;
constexpr std::int64_t kDecomposes = 16;

// Cuts the text before the first separator off.
std::string_view take(std::string_view& text) {
  const std::size_t end = text.find(kSeparator);
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(end + 1);
  return taken;
}

}  // namespace

// As one text and one number, because a list of all values takes more time, and because compiled
// autograd takes no objects of other classes.
void SavedCall::save_in(::torch::autograd::AutogradContext& context) const {
  std::string text;
  text.reserve(call.scope.size() + call.group_name.size() + activation.size() + call.layer.size() +
               3);
  for (const std::string_view each : {call.scope, call.group_name, activation}) {
    text.append(each).append(1, kSeparator);
  }
  text.append(call.layer);
  context.saved_data["call"] = std::move(text);
  context.saved_data["flags"] = (wanted.dx ? kWantsDx : 0) | (wanted.dweight ? kWantsDWeight : 0) |
                                (wanted.dbias ? kWantsDBias : 0) |
                                (wants_dresidual ? kWantsDResidual : 0) |
                                (decomposes ? kDecomposes : 0);
  if (activates()) context.saved_data["negative_slope"] = negative_slope;
}

SavedCall SavedCall::of(const ::torch::autograd::AutogradContext& context) {
  const auto& data = context.saved_data;
  std::string_view text = data.at("call").toStringView();
  const std::int64_t flags = data.at("flags").toInt();
  SavedCall saved;
  saved.call.scope = take(text);
  saved.call.group_name = take(text);
  saved.activation = take(text);
  saved.call.layer = text;
  saved.wanted = {(flags & kWantsDx) != 0, (flags & kWantsDWeight) != 0,
                  (flags & kWantsDBias) != 0};
  saved.wants_dresidual = (flags & kWantsDResidual) != 0;
  saved.decomposes = (flags & kDecomposes) != 0;
  if (saved.activates()) saved.negative_slope = data.at("negative_slope").toDouble();
  return saved;
}

}  // namespace normscope::binding
