// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace normscope::binding {

// A copy of what a backend was made with, for a part of its group: split() writes into what it is
// given, and the part keeps that. nullptr where they are of a type that is not known here, which
// its part then has to share with the group. Gloo's are, whose headers torch does not install, and
// to whose split they are no more than a list of ranks.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend::Options> copy_of(
    const c10d::Backend::Options& options);

}  // namespace normscope::binding
