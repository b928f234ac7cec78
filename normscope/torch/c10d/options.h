// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace normscope::binding {

// Copies a backend's options for a part of its group: split() changes the options that it gets, and
// the part keeps them. Returns nullptr if their type is not known here. Gloo's is not, because
// torch does not install its headers, but Gloo's split only uses the list of ranks: a part can
// share the group's options.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend::Options> copy_of(
    const c10d::Backend::Options& options);

}  // namespace normscope::binding
