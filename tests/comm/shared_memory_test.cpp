// SPDX-License-Identifier: Apache-2.0
//
// How processes find the memory of their group, and that killed processes leave nothing behind.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "normscope/comm/hosts.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/idle_observer.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using namespace std::chrono_literals;

struct stat status_of(const SharedMemorySegment& segment) {
  struct stat status = {};
  const auto descriptor = static_cast<int>(segment.address().descriptor);
  EXPECT_EQ(fstat(descriptor, &status), 0);
  return status;
}

// The processes of this host that map the memory with this inode.
std::vector<std::string> processes_that_map(ino_t inode) {
  const std::string mark = " " + std::to_string(inode) + " ";
  std::vector<std::string> processes;
  std::error_code ignored;  // processes come and go
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    std::ifstream maps(entry.path() / "maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find(mark) == std::string::npos || line.find("normscope") == std::string::npos) {
        continue;
      }
      processes.push_back(entry.path().filename());
    }
  }
  return processes;
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST(SharedMemorySegmentTest, HasNoNameInAnyFileSystem) {
  const SharedMemorySegment segment = SharedMemorySegment::create(2);

  EXPECT_EQ(status_of(segment).st_nlink, 0U);
}

TEST(SharedMemorySegmentTest, EndsWithItsLastUser) {
  const std::size_t descriptors = open_descriptors();
  std::optional<SharedMemorySegment> segment = SharedMemorySegment::create(2);
  const ino_t inode = status_of(*segment).st_ino;
  auto communicator = make_shared_memory_communicator(*segment, 0);

  segment.reset();
  EXPECT_THAT(processes_that_map(inode), Contains(std::to_string(getpid())));
  communicator.reset();

  EXPECT_THAT(processes_that_map(inode), ElementsAre());
  EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(SharedMemorySegmentTest, ProcessesCanJoinByAddressAlone) {
  // Rank 0 creates the segment after the fork: rank 1 cannot inherit it.
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);

  spawn_processes(2, [&](int rank) {
    std::optional<SharedMemorySegment> segment;
    if (rank == 0) {
      segment = SharedMemorySegment::create(2);
      const SharedMemoryAddress address = segment->address();
      ASSERT_EQ(write(pipe_ends[1], &address, sizeof(address)), ssize_t{sizeof(address)});
    } else {
      SharedMemoryAddress address;
      ASSERT_EQ(read(pipe_ends[0], &address, sizeof(address)), ssize_t{sizeof(address)});
      segment = SharedMemorySegment::open(address);
    }
    const auto communicator = make_shared_memory_communicator(*segment, rank);
    EXPECT_THAT(gather(*communicator, rank + 1), ElementsAre(1, 2));
  });

  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(SharedMemorySegmentTest, AnOutdatedAddressIsRefused) {
  const SharedMemoryAddress address = SharedMemorySegment::create(2).address();

  EXPECT_THAT(text_of<CommunicationError>([&] { (void)SharedMemorySegment::open(address); }),
              HasSubstr("cannot open /proc/" + std::to_string(getpid()) + "/fd/"));
}

TEST(SharedMemorySegmentTest, AnyOtherFileInItsPlaceIsRefused) {
  const SharedMemorySegment other = SharedMemorySegment::create(2);
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(ftruncate(fileno(file), 1 << 20), 0);

  for (const std::int64_t descriptor :
       {other.address().descriptor, std::int64_t{pipe_ends[0]}, std::int64_t{fileno(file)}}) {
    const SharedMemoryAddress address{
        .process = getpid(), .descriptor = descriptor, .nonce = other.address().nonce ^ 2};
    EXPECT_THAT(text_of<CommunicationError>([&] { (void)SharedMemorySegment::open(address); }),
                HasSubstr("is not the memory of a group: "));
  }

  std::fclose(file);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

// From now on, this process cannot open any file.
void forbid_new_descriptors() {
  const rlimit none{.rlim_cur = 0, .rlim_max = 0};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
}

// Splits four ranks into 0, 1 and 2, 3. `crippled`, which is 2 or 3, cannot open any file. Both
// ranks of its part must get an error: `peer` gets `peer_error`.
void expect_failed_split(int crippled, int peer, const std::string& peer_error) {
  run_as_processes(4, {.time_limit = 24h}, [&](Communicator& communicator) {
    if (communicator.rank() == crippled) forbid_new_descriptors();
    const auto split = [&] { return communicator.split(communicator.rank() / 2, 0); };

    if (communicator.rank() < 2) {
      EXPECT_EQ(split()->size(), 2);
    } else if (communicator.rank() == peer) {
      EXPECT_THAT(text_of<CommunicationError>(split), HasSubstr(peer_error));
    } else {
      EXPECT_THAT(text_of<CommunicationError>(split), HasSubstr("Too many open files"));
    }
    EXPECT_THAT(gather(communicator, 1.0), ElementsAre(1, 1, 1, 1));
  });
}

TEST(SharedMemorySplitTest, AFailedCreationIsAnErrorOnAllRanksOfThePart) {
  expect_failed_split(2, 3, "rank 2 of 4 could not create the memory of the new group");
}

TEST(SharedMemorySplitTest, AFailedOpenIsAnErrorOnAllRanksOfThePart) {
  expect_failed_split(3, 2, "rank 3 of 4 could not open the memory of the new group");
}

class KilledRankTest : public ::testing::Test {
 protected:
  // Runs three ranks. Rank 1 must be killed, and no memory or descriptor may leak.
  static void run(std::chrono::milliseconds time_limit,
                  const std::function<void(const SharedMemorySegment&, int rank)>& body) {
    const std::size_t descriptors = open_descriptors();
    std::optional<SharedMemorySegment> segment =
        SharedMemorySegment::create(3, {.time_limit = time_limit, .slot_length = 64});
    const ino_t inode = status_of(*segment).st_ino;

    const std::vector<RankFailure> failures =
        failures_of_processes(3, [&](int rank) { body(*segment, rank); });

    ASSERT_THAT(failures, SizeIs(1)) << failures.front().reason;
    EXPECT_EQ(failures[0].rank, 1);
    EXPECT_EQ(failures[0].reason, "killed by signal 9");
    segment.reset();
    EXPECT_THAT(processes_that_map(inode), ElementsAre());
    EXPECT_EQ(open_descriptors(), descriptors);
  }

  // Exchanges until an error occurs. Returns its text.
  static std::string end_of_exchanges(Communicator& communicator) {
    std::vector<double> values(1000, 1.0);  // 16 pieces
    return text_of<CommunicationError>([&] {
      for (;;) communicator.all_reduce_sum(values);
    });
  }
};

TEST_F(KilledRankTest, BeforeItJoinsIsNamedAtTheTimeLimit) {
  run(300ms, [](const SharedMemorySegment& segment, int rank) {
    if (rank == 1) raise(SIGKILL);
    const auto communicator = make_shared_memory_communicator(segment, rank);

    // On a loaded machine, the other rank may be late too.
    EXPECT_THAT(end_of_exchanges(*communicator),
                ContainsRegex("waited .* s for (rank 1|ranks 0, 1|ranks 1, 2)$"));
  });
}

TEST_F(KilledRankTest, AtAnyTimeDuringExchangesIsNamedAtOnce) {
  for (const auto delay : {0us, 50us, 100us, 300us, 1000us, 3000us, 10'000us}) {
    run(24h, [&](const SharedMemorySegment& segment, int rank) {
      const auto communicator = make_shared_memory_communicator(segment, rank);
      communicator->all_reduce_sum({});
      std::thread killer;
      if (rank == 1) {
        killer = std::thread([&] {
          std::this_thread::sleep_for(delay);
          raise(SIGKILL);
        });
      }

      EXPECT_THAT(end_of_exchanges(*communicator), HasSubstr("rank 1 of 3 has died"));
    });
  }
}

// Ends the process after some waits.
class Dying final : public IdleObserver {
 public:
  explicit Dying(int waits) : waits_(waits) {}

  void end_wait() noexcept override {
    if (--waits_ == 0) raise(SIGKILL);
  }

 private:
  int waits_;
};

class KilledDuringSetUp : public KilledRankTest {
 protected:
  // `set_up` makes another communicator, in as many waits, and uses it.
  static void run_to_each_wait(int waits,
                               const std::function<void(std::unique_ptr<Communicator>)>& set_up) {
    for (int last = 1; last <= waits; ++last) {
      run(24h, [&](const SharedMemorySegment& segment, int rank) {
        auto communicator = make_shared_memory_communicator(segment, rank);
        std::optional<Dying> dying;
        if (rank == 1) dying.emplace(last);

        EXPECT_THAT(text_of<CommunicationError>([&] { set_up(std::move(communicator)); }),
                    HasSubstr("rank 1 of 3 has died"));
      });
    }
  }
};

TEST_F(KilledDuringSetUp, OfASplitIsNamedAtOnce) {
  run_to_each_wait(4, [](const std::unique_ptr<Communicator>& whole) {
    whole->split(0, whole->rank())->all_reduce_sum({});
  });
}

TEST_F(KilledDuringSetUp, OfTheMemoryOfAHostIsNamedAtOnce) {
  run_to_each_wait(4, [](std::unique_ptr<Communicator> whole) {
    over_hosts(std::move(whole), 24h)->all_reduce_sum({});
  });
}

}  // namespace
}  // namespace normscope::testing
