// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/group_status.h"

#include <cstddef>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "normscope/comm/describe.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/comm/slot_memory.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

// The groups whose memory a process holds open, and a line for each file that has the name of such
// memory but is something else.
struct Found {
  std::vector<SlotMemory> groups;
  std::string skipped;
};

// A process closes files meanwhile.
bool is_open(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::symlink_status(path, error));
}

// Each segment once, even if the process has several descriptors of it.
Found groups_of(std::int64_t process) {
  const std::filesystem::path folder = "/proc/" + std::to_string(process) + "/fd";
  std::error_code error;
  std::filesystem::directory_iterator files(folder, error);
  if (error) {
    throw CommunicationError("process " + std::to_string(process) + ": " + error.message());
  }
  Found found;
  std::set<std::int64_t> nonces;
  for (; files != std::filesystem::directory_iterator(); files.increment(error)) {
    const std::string target = std::filesystem::read_symlink(files->path(), error).string();
    if (error || !target.starts_with("/memfd:normscope")) continue;
    try {
      const auto segment = SharedMemorySegment::look_into(files->path().string());
      SlotMemory group(segment.memory(), segment.bytes());
      if (nonces.insert(segment.address().nonce).second) found.groups.push_back(std::move(group));
    } catch (const CommunicationError& reason) {
      if (!is_open(files->path())) continue;
      found.skipped += "process " + std::to_string(process) + ": " + files->path().string() +
                       " is skipped: " + reason.what() + "\n";
    }
  }
  return found;
}

std::string text_of_dead(const GroupStatus& status) {
  return list_of_ranks(status.dead) + " of " + std::to_string(status.processes.size()) +
         (status.dead.size() == 1 ? " has died" : " have died");
}

std::optional<std::string> text_of(const GroupStatus& status, std::int64_t process) {
  std::vector<RankCall> calls;
  std::vector<int> ranks;
  std::string who = "process " + std::to_string(process);
  bool has_called = false;
  for (std::size_t rank = 0; rank < status.calls.size(); ++rank) {
    const RankCall& call = status.calls[rank];
    has_called = has_called || call.state != CallState::kNone;
    if (status.processes[rank] == process) {
      who += " is " + name_of_rank(static_cast<int>(rank), static_cast<int>(status.calls.size()));
    }
    if (status.processes[rank] == 0 && call.state == CallState::kNone) continue;  // not seen here
    calls.push_back(call);
    ranks.push_back(static_cast<int>(rank));
  }
  // A part of a group: the board of the whole group shows its calls.
  if (!has_called) return std::nullopt;
  std::string text = who + ": " + who_is_where(calls, ranks);
  if (!status.failure.empty()) {
    text += "; the group has failed: " + printable(status.failure);
  } else if (!status.dead.empty()) {
    text += "; " + text_of_dead(status);
  }
  return text + "\n";
}

std::string fault_of_peers(const GroupStatus& status, std::int64_t process) {
  if (status.failure.empty()) return status.dead.empty() ? "" : text_of_dead(status);
  for (std::size_t rank = 0; rank < status.processes.size(); ++rank) {
    const std::string name =
        name_of_rank(static_cast<int>(rank), static_cast<int>(status.processes.size()));
    if (status.processes[rank] == process && status.failure.starts_with(name + " failed"))
      return "";
  }
  return status.failure;
}

}  // namespace

std::string status_of_process(std::int64_t process) {
  const Found found = groups_of(process);
  std::string text;
  for (const SlotMemory& group : found.groups) {
    if (const auto of_group = text_of(group.look_at(), process)) text += *of_group;
  }
  return text + found.skipped;
}

std::string fault_of_peers(std::int64_t process) {
  for (const SlotMemory& group : groups_of(process).groups) {
    std::string fault = fault_of_peers(group.look_at(), process);
    if (!fault.empty()) return fault;
  }
  return {};
}

}  // namespace normscope
