// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/peer_process.h"

#include <cerrno>

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace normscope {

std::uint64_t own_pid_namespace() noexcept {
  constexpr std::uint64_t kUnknown = 1;
  struct stat status = {};
  return stat("/proc/self/ns/pid", &status) == 0 && status.st_ino != 0 ? status.st_ino : kUnknown;
}

bool has_died(std::int32_t process, std::uint64_t pid_namespace) noexcept {
  if (pid_namespace != own_pid_namespace()) return false;
  // A pidfd becomes readable when its process ends.
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (descriptor >= 0) {
    pollfd ended{.fd = descriptor, .events = POLLIN, .revents = 0};
    const bool died = poll(&ended, 1, 0) == 1;
    close(descriptor);
    return died;
  }
  // pidfd_open can fail in a sandbox, on an old kernel, or if no descriptor is left.
  return kill(process, 0) != 0 && errno == ESRCH;
}

}  // namespace normscope
