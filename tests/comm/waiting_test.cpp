// SPDX-License-Identifier: Apache-2.0
//
// What a rank detects while it waits for peers that do not arrive.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "normscope/comm/processes.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(Waiting, ADeadRankIsNamedAtOnceWhileAnotherIsLate) {
  const SharedMemorySegment segment = SharedMemorySegment::create(3, {.time_limit = 24h});
  const std::vector<RankFailure> failures = failures_of_processes(3, [&](int rank) {
    const auto communicator = make_shared_memory_communicator(segment, rank);
    communicator->all_reduce_sum({});
    if (rank == 2) raise(SIGKILL);
    if (rank == 0) std::this_thread::sleep_for(3s);
    const auto begin = Clock::now();

    EXPECT_THAT(text_of<CommunicationError>([&] { communicator->all_reduce_sum({}); }),
                HasSubstr("rank 2 of 3 has died"));

    EXPECT_LT(Clock::now() - begin, 1s);
  });
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].reason, "killed by signal 9");
}

// A dead child is tested before and after it is reaped.
TEST(PeerProcess, IsDistinguishedAsDeadOrLivingInTheSameNamespaceOnly) {
  const std::uint64_t here = own_pid_namespace();
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t ended = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);

  EXPECT_TRUE(has_died(child, here));
  EXPECT_FALSE(has_died(getpid(), here));
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(has_died(child, here));
  EXPECT_FALSE(has_died(child, here + 1));
}

TEST(PeerProcess, IsDetectedDeadWithoutDescriptors) {
  const std::vector<RankFailure> failures = failures_of_processes(1, [](int) {
    const pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    const std::uint64_t here = own_pid_namespace();
    const rlimit none{.rlim_cur = 0, .rlim_max = 0};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);

    EXPECT_TRUE(has_died(child, here));
    EXPECT_FALSE(has_died(getpid(), here));
  });
  EXPECT_TRUE(failures.empty());
}

// Continues in a child that is the first process of a new PID namespace. The parent waits for it.
void go_on_in_a_pid_namespace() {
  ASSERT_EQ(unshare(CLONE_NEWPID), 0);
  const pid_t child = fork();
  if (child == 0) return;
  int status = 0;
  waitpid(child, &status, 0);
  _exit(status == 0 ? 0 : 1);
}

// It still sees the /proc of the others, and can therefore open their memory.
TEST(Waiting, ARankInAPidNamespaceOfItsOwnIsNotTakenForDead) {
  if (!failures_of_processes(1, [](int) { go_on_in_a_pid_namespace(); }).empty()) {
    GTEST_SKIP() << "creating a PID namespace needs a privilege";
  }
  const SharedMemorySegment segment = SharedMemorySegment::create(2, {.time_limit = 24h});
  const auto exchange_and_be_late = [&](int rank) {
    if (rank == 1) go_on_in_a_pid_namespace();
    const auto communicator = make_shared_memory_communicator(segment, rank);
    for (const int late : {0, 1}) {
      if (rank == late) std::this_thread::sleep_for(500ms);
      communicator->all_reduce_sum({});
    }
  };

  const std::vector<RankFailure> failures = failures_of_processes(2, exchange_and_be_late);

  EXPECT_TRUE(failures.empty()) << failures.front().reason;
}

}  // namespace
}  // namespace normscope::testing
