// SPDX-License-Identifier: Apache-2.0
//
// What a rank detects while it waits for peers that do not arrive.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/group_status.h"
#include "normscope/comm/processes.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
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

TEST(Waiting, ATimeoutShowsTheCallsOfAllRanks) {
  run_as_processes(3, {.time_limit = 300ms}, [](Communicator& communicator) {
    ASSERT_NE(communicator.calls(), nullptr);
    communicator.calls()->begin({.what = "forward", .layer = "stem"});
    communicator.all_reduce_sum({});
    communicator.calls()->end(CallState::kFinished);
    if (communicator.rank() == 1) {
      std::this_thread::sleep_for(600ms);
      return;
    }
    communicator.calls()->begin({.what = "forward", .layer = "head"});

    EXPECT_THAT(text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); }),
                AllOf(HasSubstr(" for rank 1: rank 1 last finished forward of stem, 0."),
                      HasSubstr("; ranks 0, 2 wait in forward of head")));
  });
}

class Interruption : public CallObserver {
 public:
  void begin_call(const CallName&, std::string_view, std::size_t) override {}
  void end_call() noexcept override {}
  void begin_wait() override { waits += 1; }
  void end_wait() noexcept override { waits -= 1; }
  void during_wait(Clock::duration waited, const std::function<std::string()>&) override {
    if (waited > 100ms) throw std::runtime_error("enough");
  }

  int waits = 0;
};

TEST(Waiting, AnExceptionOfTheObserverEndsTheWaitAndThePeersAreTold) {
  run_as_processes(2, {.time_limit = 24h}, [](Communicator& communicator) {
    communicator.all_reduce_sum({});
    if (communicator.rank() == 1) {
      std::this_thread::sleep_for(1s);
      EXPECT_THAT(text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); }),
                  HasSubstr("rank 0 of 2 was interrupted while it waited"));
      return;
    }
    Interruption interruption;
    observe_calls(&interruption);
    const auto begin = Clock::now();

    EXPECT_THROW(communicator.all_reduce_sum({}), std::runtime_error);

    EXPECT_LT(Clock::now() - begin, 500ms);
    EXPECT_EQ(interruption.waits, 0);
    observe_calls(nullptr);
  });
}

TEST(StatusOfProcess, ShowsAllRanksEvenIfTheProcessHangs) {
  const SharedMemorySegment segment = SharedMemorySegment::create(3, {.time_limit = 24h});
  PipeGate all_are_there;
  PipeGate looked;
  const std::vector<RankFailure> failures = failures_of_processes(3, [&](int rank) {
    const auto communicator = make_shared_memory_communicator(segment, rank);
    communicator->calls()->begin({.what = "forward", .layer = "stem"});
    const std::vector<double> processes = gather(*communicator, getpid());
    communicator->calls()->end(CallState::kFinished);
    if (rank == 2) {
      for (int peer = 0; peer < 2; ++peer) all_are_there.wait();
      const std::string one = std::to_string(static_cast<int>(processes[1]));

      EXPECT_THAT(status_of_process(static_cast<std::int64_t>(processes[1])),
                  MatchesRegex("process " + one +
                               " is rank 1 of 3: ranks 0, 1, 2 last finished forward of stem, "
                               "[0-9.]+ s ago\n"));
      looked.open_for(2);
    } else {
      all_are_there.open_for(1);
      looked.wait();
    }
  });
  EXPECT_TRUE(failures.empty()) << failures.front().reason;
}

TEST(StatusOfProcess, AMissingProcessIsAnError) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);

  EXPECT_THAT(text_of<CommunicationError>([&] { (void)status_of_process(child); }),
              HasSubstr("process " + std::to_string(child)));
}

// A dead child is tested before and after it is reaped.
TEST(PeerProcess, DistinguishesDeadFromLiving) {
  const std::uint64_t here = own_pid_namespace();
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t ended = {};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);

  EXPECT_TRUE(has_died(child, here));
  EXPECT_FALSE(has_died(getpid(), here));
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(has_died(child, here));
}

TEST(PeerProcess, IsNeverReportedDeadInAnotherNamespace) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);

  EXPECT_FALSE(has_died(child, own_pid_namespace() + 1));
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
