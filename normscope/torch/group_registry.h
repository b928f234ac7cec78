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

// Layers know a group of ranks by its name. Here names lead to the exchanges of groups: those of
// torch's process groups, and of communicators that were registered under a name.
namespace normscope::binding {

// Lets a name that no process group has stand for the ranks of a communicator.
void register_communicator(const std::string& name, std::unique_ptr<Communicator> communicator);
void unregister_communicator(const std::string& name);

// Process groups are known from their first use on. torch tells nobody when it destroys one, and
// does not know the parts that were made of it, whose threads and connections last until it is
// forgotten. A later first use forgets those that were destroyed before it; these two do so now. In
// Python the first is called when a group's object goes, the second ahead of the interpreter's end,
// when a backend may still call into it; in other programs the end of the library's static objects,
// which are younger than what torch and CUDA made for the first use, comes to the same.
void forget_destroyed_groups();
void forget_groups();

// To be called before this process forks, or as soon as it has the process group: in a process that
// is forked from it the group is refused, also if it was never used here. Groups that are in use
// are known.
void know_process_group(const std::string& name);

// The group of this name, for tensors of this placement; without one, for what no tensor takes part
// in. nullptr where there is no name, or this rank is alone and nothing forces an exchange. Throws
// c10::Error where the name is none, and in a fork of the rank.
[[nodiscard]] std::shared_ptr<GroupExchanges> group_named(
    std::string_view name, const std::optional<Placement>& placement = std::nullopt);

// The same, if it has been used; nullptr otherwise. Never throws what group_named() does.
[[nodiscard]] std::shared_ptr<GroupExchanges> used_group_named(
    std::string_view name, const std::optional<Placement>& placement);

// Those that this process has used.
[[nodiscard]] std::vector<std::shared_ptr<GroupExchanges>> used_groups();

// GroupExchanges::fail_first_meeting(), unless this rank is alone or a fork.
void fail_first_meeting(const std::string& name, std::string_view reason);

}  // namespace normscope::binding
