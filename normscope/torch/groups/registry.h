// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/torch/groups/group_exchanges.h"
#include "normscope/torch/tensors/device.h"

// Layers know a group of ranks by its name. This registry maps names to the exchanges of groups: of
// torch's process groups, and of communicators that were registered under a name.
namespace normscope::binding {

// Registers a communicator under a name that no process group has.
void register_communicator(const std::string& name, std::unique_ptr<Communicator> communicator);
void unregister_communicator(const std::string& name);

// The registry keeps each process group's exchanges, with their threads and connections, from the
// first use until the group is forgotten. torch does not tell when it destroys a group. Destroyed
// groups are therefore forgotten at the first use of another group, or by this function. Python
// calls it with `only_destroyed` when a group's object is deleted, and for all groups before the
// interpreter ends, because a backend may call into the interpreter. Other programs do not need it:
// the static objects of this library end before those of torch and CUDA.
void forget_groups(bool only_destroyed);

// Remembers that this process is a rank of the group. Forks of it then refuse the group, even if it
// was never used here. Call it before a fork. Groups in use are known without it.
void know_process_group(const std::string& name);

// The group of this name, for tensors of this placement; without a placement, for calls in which no
// tensor takes part. nullptr if the name is empty, or if this rank is alone and nothing forces an
// exchange. Throws c10::Error if there is no group of this name, and in a fork of the rank.
[[nodiscard]] std::shared_ptr<GroupExchanges> group_named(
    std::string_view name, const std::optional<Placement>& placement = std::nullopt);

// Whether this rank shares statistics with others, or exchanges because something forces it.
[[nodiscard]] bool has_peers(std::string_view name);

// Whether the group of this name has a backend for tensors on this type of device.
[[nodiscard]] bool serves(std::string_view name, c10::DeviceType device);

// group_named() if the group has been used, otherwise nullptr. Does not throw the errors of
// group_named().
[[nodiscard]] std::shared_ptr<GroupExchanges> used_group_named(
    std::string_view name, const std::optional<Placement>& placement);

// The groups that this process has used.
[[nodiscard]] std::vector<std::shared_ptr<GroupExchanges>> used_groups();

// Ends the rendezvous of a process group, because this rank will not come to it. Does nothing if
// this rank is alone or a fork.
void fail_rendezvous(const std::string& name, std::string_view reason);

}  // namespace normscope::binding
