// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/torch/device.h"
#include "normscope/torch/group_exchanges.h"

// Layers know a group of ranks by its name. This registry maps names to the exchanges of groups: of
// torch's process groups, and of communicators that were registered under a name.
namespace normscope::binding {

// Registers a communicator under a name that no process group has.
void register_communicator(const std::string& name, std::unique_ptr<Communicator> communicator);
void unregister_communicator(const std::string& name);

// Process groups are known from their first use on. torch does not tell when it destroys one, and
// does not know the parts that were made of it. The threads and connections of the parts last until
// the group is forgotten. The first use of another group forgets those that were destroyed before.
// These two functions do so now, the second for all groups. Python calls the first when a group's
// object is deleted, and the second before the interpreter ends, because a backend may still call
// into it then. Other programs need neither: the static objects of this library end before those
// that torch and CUDA made for the first use.
void forget_destroyed_groups();
void forget_groups();

// Must be called before this process forks, or as soon as it has the process group. A process that
// is forked from it then refuses the group, even if the group was never used here. Groups that are
// in use are known.
void know_process_group(const std::string& name);

// The group of this name, for tensors of this placement; without a placement, for calls in which no
// tensor takes part. nullptr if the name is empty, or if this rank is alone and nothing forces an
// exchange. Throws c10::Error if there is no group of this name, and in a fork of the rank.
[[nodiscard]] std::shared_ptr<GroupExchanges> group_named(
    std::string_view name, const std::optional<Placement>& placement = std::nullopt);

// The same if the group has been used, otherwise nullptr. Throws nothing that group_named() throws.
[[nodiscard]] std::shared_ptr<GroupExchanges> used_group_named(
    std::string_view name, const std::optional<Placement>& placement);

// The groups that this process has used.
[[nodiscard]] std::vector<std::shared_ptr<GroupExchanges>> used_groups();

// GroupExchanges::fail_first_meeting(), unless this rank is alone or a fork.
void fail_first_meeting(const std::string& name, std::string_view reason);

}  // namespace normscope::binding
