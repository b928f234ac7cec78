// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "normscope/comm/communicator.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// A group of one rank: each sum is the values themselves.
[[nodiscard]] std::unique_ptr<Communicator> make_self_communicator();

}  // namespace normscope
