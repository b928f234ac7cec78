// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/futex.h"

#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace normscope {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "the kernel reads the atomic as a plain word");

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::milliseconds limit) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec timeout{.tv_sec = static_cast<std::time_t>(seconds.count()),
                         .tv_nsec = std::chrono::nanoseconds(limit - seconds).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace normscope
