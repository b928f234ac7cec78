// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// A number that identifies this host: equal for all its processes, and for no others. It has 52
// bits, which a double represents exactly. It is a hash of the environment variable NORMSCOPE_NODE
// if that is set, otherwise of the kernel's boot id.
[[nodiscard]] std::int64_t host_identity();

}  // namespace normscope
