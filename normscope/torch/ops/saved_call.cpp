// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/saved_call.h"

#include <cstddef>
#include <string>
#include <utility>

namespace normscope::binding {
namespace {

// Neither scopes nor the names of groups and activations contain separators; the layer is last.
constexpr char kSeparator = '\0';

// Cuts the text before the first separator off.
std::string_view take(std::string_view& text) {
  const std::size_t end = text.find(kSeparator);
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(end + 1);
  return taken;
}

}  // namespace

// As one text, because a list of all values takes more time, and because compiled autograd takes no
// objects of other classes.
void SavedCall::save_in(::torch::autograd::AutogradContext& context) const {
  std::string text;
  text.reserve(8 + call.scope.size() + call.group_name.size() + activation.size() +
               call.layer.size());
  for (const bool flag : {wanted.dx, wanted.dweight, wanted.dbias, wants_dresidual, decomposes}) {
    text += flag ? '1' : '0';
  }
  for (const std::string_view each : {call.scope, call.group_name, activation}) {
    text.append(each).append(1, kSeparator);
  }
  text.append(call.layer);
  context.saved_data["call"] = std::move(text);
  if (activates()) context.saved_data["negative_slope"] = negative_slope;
}

SavedCall SavedCall::of(const ::torch::autograd::AutogradContext& context) {
  const auto& data = context.saved_data;
  std::string_view text = data.at("call").toStringView();
  SavedCall saved;
  for (bool* const flag : {&saved.wanted.dx, &saved.wanted.dweight, &saved.wanted.dbias,
                           &saved.wants_dresidual, &saved.decomposes}) {
    *flag = text.front() == '1';
    text.remove_prefix(1);
  }
  saved.call.scope = take(text);
  saved.call.group_name = take(text);
  saved.activation = take(text);
  saved.call.layer = text;
  if (saved.activates()) saved.negative_slope = data.at("negative_slope").toDouble();
  return saved;
}

}  // namespace normscope::binding
