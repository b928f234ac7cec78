// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The environment variables of docs/environment.md. An empty one is like one that is not set. Each
// function throws ArgumentError, which names the variable, if it cannot understand the value.
//
// They are read when they are needed, and not once: programs set them for the groups that they make
// next, for example in a process of a pool or a fork, and costs.measure() compares transports.
// check_environment() therefore runs at import, before anything waits, and again for each new
// group. What is read later cannot fail then.

// NORMSCOPE_KERNELS: a name of kernels.h; empty for the best that the machine can run.
[[nodiscard]] std::string chosen_kernels();

// NORMSCOPE_DEVICE_KERNELS=torch: whether torch's kernels normalize all tensors.
[[nodiscard]] bool forces_torch_kernels();

// NORMSCOPE_SHARED_MEMORY=0: whether ranks of one host use shared memory.
[[nodiscard]] bool uses_shared_memory();

// NORMSCOPE_PEER_MEMORY=1: whether kernels on devices of one host exchange sums in each other's
// memory.
[[nodiscard]] bool uses_peer_memory();

// NORMSCOPE_NODE: the name of this host; any text. Empty for the machine's own identity.
[[nodiscard]] std::string chosen_node();

// NORMSCOPE_TIMEOUT: how long a rank waits for its peers, instead of the process group's limit;
// nullopt if it is not set.
[[nodiscard]] std::optional<std::chrono::milliseconds> chosen_time_limit();

// NORMSCOPE_WARN_AFTER: how long a rank waits before the wait is logged; 30 s if it is not set,
// nullopt if it is 0.
[[nodiscard]] std::optional<std::chrono::milliseconds> warning_limit();

// NORMSCOPE_DETECT_NON_FINITE=1: whether layers check their inputs.
[[nodiscard]] bool detects_non_finite();

// NORMSCOPE_EXACT_GRAPHS=1: whether layers in compiled graphs have the bits of eager mode.
[[nodiscard]] bool has_exact_graphs();

// NORMSCOPE_CHECK=1: whether headers are compared before every message.
[[nodiscard]] bool checks_every_call();

// NORMSCOPE_FORCE_SYNC=1: whether a group of one rank exchanges as larger groups do.
[[nodiscard]] bool forces_exchange();

// Throws ArgumentError if a value cannot be understood; check_all_variables() of kernels.h also
// knows those of NORMSCOPE_KERNELS.
void check_environment();

}  // namespace normscope
