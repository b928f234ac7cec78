// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/processes.h"

#include <atomic>
#include <cerrno>
#include <fstream>
#include <initializer_list>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "normscope/core/environment.h"
#include "normscope/core/hash.h"

namespace normscope {
namespace {

std::atomic<std::uint32_t> forks = 0;

// The number of forks between this process and the one that first called this function. Used
// instead of getpid(): a system call takes as long as a short exchange.
std::uint32_t forks_so_far() noexcept {
  static const int kRegistered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  static_cast<void>(kRegistered);
  return forks.load(std::memory_order_relaxed);
}

std::string name_of_machine() {
  std::string boot_id;
  if (std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id)) return boot_id;
  char name[256] = {};  // longer than POSIX allows a host's name to be
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string name_of_host() {
  const std::string chosen = chosen_node();
  return chosen.empty() ? name_of_machine() : chosen;
}

std::int64_t identity_of(std::initializer_list<std::string> names) {
  constexpr int kBits = 52;  // exact as a float64
  Hash hash;
  for (const std::string& name : names) hash.add(name);
  return static_cast<std::int64_t>(hash.low_bits(kBits));
}

}  // namespace

HomeProcess::HomeProcess() noexcept : id_(getpid()), forks_(forks_so_far()) {}

bool HomeProcess::is_this_one() const noexcept { return forks_so_far() == forks_; }

std::string HomeProcess::text_for_fork(std::string_view rank) const {
  return "this process (" + std::to_string(getpid()) + ") was forked from " + std::string(rank) +
         " (process " + std::to_string(id_) +
         ") and cannot exchange in its place. A forked process, such as a data loader worker, can "
         "run layers in evaluation mode or with scope local. To exchange, start new processes "
         "instead of forking, as ranks of a group of their own";
}

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

std::int64_t identity_of_process_ids() {
  return identity_of({name_of_host(), name_of_machine(), std::to_string(own_pid_namespace())});
}

std::int64_t host_identity() { return identity_of({name_of_host()}); }

}  // namespace normscope
