// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "normscope/comm/communicator.h"
#include "normscope/comm/hosts.h"

namespace normscope {

// The ranks of `whole`, on several `hosts` with shared memory. The ranks of each host add in its
// memory, and the leaders of the hosts add over a part of `whole`. Collective. Throws
// CommunicationError.
[[nodiscard]] std::unique_ptr<Communicator> make_two_level_communicator(
    std::unique_ptr<Communicator> whole, const Hosts& hosts);

}  // namespace normscope
