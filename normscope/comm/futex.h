// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace normscope {

// Sleeps while `word` is `expected`, for at most `limit`; may return early. Works between processes
// that share the memory of `word`.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::milliseconds limit) noexcept;

// Wakes all threads that sleep on `word`.
void futex_wake_all(const std::atomic<std::uint32_t>& word) noexcept;

}  // namespace normscope
