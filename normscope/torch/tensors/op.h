// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace normscope::binding {

// What all ops have in common.
using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNoTensor;

[[nodiscard]] inline OptionalTensor defined_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// A layer's call: the ranks that share its statistics, and its name in errors.
struct ScopedCall {
  std::string_view scope;
  std::string_view group_name;  // of a process group; "": none
  std::string_view layer;       // a qualified name; "": none
};

// Whether this mode of torch handles the ops that are called now.
[[nodiscard]] inline bool is_in_mode(c10::impl::TorchDispatchModeKey mode) {
  return c10::impl::TorchDispatchModeTLS::get_mode(mode).has_value();
}

// The op of this name, as ops/operators.cpp declares it, or python/normscope/_binding/groups.py.
template <class Op>
[[nodiscard]] c10::TypedOperatorHandle<Op> op_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Op>();
}

}  // namespace normscope::binding
