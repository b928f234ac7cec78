// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The process in which an object was created. A fork copies the object, but the copy must not act
// as the rank: peers would take its messages for those of the original process.
class HomeProcess {
 public:
  HomeProcess() noexcept;

  [[nodiscard]] std::int32_t id() const noexcept { return id_; }
  [[nodiscard]] bool is_this_one() const noexcept;

  // The error text for a fork; `rank` names the home process: "rank 1 of 4".
  [[nodiscard]] std::string text_for_fork(std::string_view rank) const;

 private:
  std::int32_t id_;
  std::uint32_t forks_;
};

// The PID namespace in which this process's id is valid. Never 0; the same number for all processes
// that cannot find theirs.
[[nodiscard]] std::uint64_t own_pid_namespace() noexcept;

// Whether a peer's process has ended, reaped or not. False if that cannot be determined: the peer
// is in another PID namespace, where its id has another meaning, or its id has been reused. In
// these cases the time limit ends a wait.
[[nodiscard]] bool has_died(std::int32_t process, std::uint64_t pid_namespace) noexcept;

// Equal for processes of one host whose ids have the same meaning, and for no others. Unlike
// host_identity(), never equal on two machines.
[[nodiscard]] std::int64_t identity_of_process_ids();

// A number that identifies this host: equal for all its processes, and for no others. It is a hash
// of the environment variable NORMSCOPE_NODE if that is set, otherwise of the kernel's boot id.
[[nodiscard]] std::int64_t host_identity();

}  // namespace normscope
