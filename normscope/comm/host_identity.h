// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// A number that the processes of one host have in common, and no others: of 52 bits, so that a
// double holds it. It is made of the kernel's boot id, or of the environment variable
// NORMSCOPE_NODE, whose text then names the host.
[[nodiscard]] std::int64_t host_identity();

}  // namespace normscope
