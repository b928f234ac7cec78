// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/home_process.h"

#include <atomic>

#include <pthread.h>

namespace normscope {
namespace {

std::atomic<std::uint32_t> forks = 0;

}  // namespace

std::uint32_t forks_so_far() noexcept {
  static const int kRegistered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  static_cast<void>(kRegistered);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace normscope
