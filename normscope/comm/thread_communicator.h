// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/comm/exchange_options.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// A group whose ranks are threads of this process; element r is for rank r. A rank leaves the group
// when its communicator is destroyed: peers that still wait for it throw a CommunicationError.
[[nodiscard]] std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int size, const ExchangeOptions& options = {});

}  // namespace normscope
