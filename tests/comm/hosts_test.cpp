// SPDX-License-Identifier: Apache-2.0
//
// What ranks of one host and of several use, and what they meet there beyond the contract of every
// communicator.
#include "normscope/comm/hosts.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

// Runs ranks as processes on hosts of these names.
void run_on(const std::vector<std::string>& hosts, const CommunicatorBody& body,
            std::chrono::milliseconds time_limit = 60s) {
  const auto ranks = static_cast<int>(hosts.size());
  const auto segment = SharedMemorySegment::create(ranks, {.time_limit = time_limit});
  spawn_processes(ranks, [&](int rank) {
    setenv("NORMSCOPE_NODE", hosts.at(static_cast<std::size_t>(rank)).c_str(), /*overwrite=*/1);
    const auto group = make_shared_memory_communicator(segment, rank);
    body(*group);
  });
}

// The same, over the hosts.
void run_over(const std::vector<std::string>& hosts, const CommunicatorBody& body,
              std::chrono::milliseconds time_limit = 60s) {
  const auto ranks = static_cast<int>(hosts.size());
  const auto segment = SharedMemorySegment::create(ranks, {.time_limit = time_limit});
  spawn_processes(ranks, [&](int rank) {
    setenv("NORMSCOPE_NODE", hosts.at(static_cast<std::size_t>(rank)).c_str(), /*overwrite=*/1);
    body(*over_hosts(make_shared_memory_communicator(segment, rank), time_limit));
  });
}

TEST(FindHosts, NamesTheRanksOfTheHostAndTheFirstOfEach) {
  run_on({"a", "b", "a", "c", "b"}, [](Communicator& group) {
    const Hosts hosts = find_hosts(group, 60s);

    const std::array<std::vector<int>, 5> members{{{0, 2}, {1, 4}, {0, 2}, {3}, {1, 4}}};
    EXPECT_EQ(hosts.members, members.at(static_cast<std::size_t>(group.rank())));
    EXPECT_THAT(hosts.leaders, ElementsAre(0, 1, 3));
    EXPECT_TRUE(hosts.memory.has_value());
    EXPECT_FALSE(hosts.is_one());
  });
}

TEST(FindHosts, OneRankThatDoesNotWantItDecidesForAll) {
  run_on({"a", "a", "b", "b"}, [](Communicator& group) {
    if (group.rank() == 1) setenv("NORMSCOPE_SHARED_MEMORY", "0", 1);

    EXPECT_FALSE(find_hosts(group, 60s).memory.has_value());

    EXPECT_THAT(gather(group, group.rank()), ElementsAre(0, 1, 2, 3));
  });
}

TEST(OverHosts, OneHostGoesByItsMemory) {
  run_as_threads(3, {.time_limit = 60s}, [](Communicator& group) {
    const Hosts hosts = find_hosts(group, 60s);

    ASSERT_TRUE(hosts.is_one());
    const auto shared = make_shared_memory_communicator(hosts.memory.value(), group.rank());
    EXPECT_THAT(gather(*shared, shared->rank()), ElementsAre(0, 1, 2));
  });
  run_over({"a", "a", "a"}, [](Communicator& communicator) {
    EXPECT_EQ(communicator.transport(), "shared memory");
    EXPECT_THAT(gather(communicator, communicator.rank()), ElementsAre(0, 1, 2));
  });
}

TEST(OverHosts, HostsOfOneRankUseTheGroupItself) {
  const auto segment = SharedMemorySegment::create(2, {.time_limit = 60s});
  spawn_processes(2, [&](int rank) {
    setenv("NORMSCOPE_NODE", std::to_string(rank).c_str(), /*overwrite=*/1);
    auto group = make_shared_memory_communicator(segment, rank);
    const Communicator* const given = group.get();

    EXPECT_EQ(over_hosts(std::move(group), 60s).get(), given);
  });
}

TEST(OverHosts, SeveralHostsGoOnTwoLevelsAndSoDoTheirParts) {
  run_over({"a", "a", "a", "b", "c", "c"}, [](Communicator& communicator) {
    EXPECT_EQ(communicator.transport(), "shared memory and shared memory");

    // A part cuts the first host and takes the second whole; the other is of one host.
    const int rank = communicator.rank();
    const auto part = communicator.split(rank == 1 || rank == 2 ? 1 : 0, rank);
    EXPECT_EQ(part->transport(),
              part->size() == 2 ? "shared memory" : "shared memory and shared memory");
    EXPECT_EQ(exchanged_sum_of_ranks(*part), sum_of_ranks(*part));
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

TEST(OverHosts, LongMessagesGoInPieces) {
  run_over({"a", "a", "b", "b", "b"}, [](Communicator& communicator) {
    std::vector<double> values(100'003, 1.0 + communicator.rank());

    communicator.all_reduce_sum(values);

    EXPECT_THAT(values, Each(15.0));
  });
}

TEST(OverHosts, LengthsThatDifferBetweenHostsOnlyAreNamed) {
  run_over({"a", "a", "b", "b"}, [](Communicator& communicator) {
    // The first pieces are as long as each other.
    std::vector<double> values(communicator.rank() < 2 ? 20'000 : 30'000);

    EXPECT_THAT(text_of<MismatchError>([&] { communicator.all_reduce_sum(values); }),
                HasSubstr("got 20000 from rank 0, 20000 from rank 1, 30000 from rank 2, 30000 from "
                          "rank 3"));
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

// Rank `dead` dies in the second exchange. What the others are told.
void kill_on_two_hosts(int dead, const ::testing::Matcher<std::string>& expected) {
  const std::vector<std::string> hosts{"a", "a", "b", "b"};
  const auto segment = SharedMemorySegment::create(4, {.time_limit = 24h});
  const auto failures = failures_of_processes(4, [&](int rank) {
    setenv("NORMSCOPE_NODE", hosts.at(static_cast<std::size_t>(rank)).c_str(), /*overwrite=*/1);
    const auto communicator =
        over_hosts(make_shared_memory_communicator(segment, rank), /*time_limit=*/24h);
    communicator->all_reduce_sum({});
    if (rank == dead) raise(SIGKILL);
    EXPECT_THAT(text_of<CommunicationError>([&] { communicator->all_reduce_sum({}); }), expected);
  });
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].rank, dead);
}

TEST(OverHosts, AFollowerThatIsKilledIsNamedToTheRanksOfAllHosts) {
  kill_on_two_hosts(3, HasSubstr("shared memory and shared memory: rank 3 of 4 has died"));
}

TEST(OverHosts, ALeaderThatIsKilledIsNamedToItsHostAndAmongTheLeaders) {
  kill_on_two_hosts(2, ::testing::AnyOf(HasSubstr("rank 2 of 4 has died"),
                                        AllOf(HasSubstr("among the first ranks 0, 2 of the hosts"),
                                              HasSubstr("rank 1 of 2 has died"))));
}

TEST(OverHosts, AHostThatDoesNotComeIsWaitedForOnlyAsLongAsItMay) {
  const auto gate = make_pipe_gate();
  run_over(
      {"a", "a", "b", "b"},
      [&](Communicator& communicator) {
        communicator.all_reduce_sum({});
        if (communicator.rank() >= 2) {
          gate->wait();
          return;
        }
        // The rank that waits for the other host tells the one that waits for it.
        EXPECT_THAT(text_of<CommunicationError>([&] { communicator.all_reduce_sum({}); }),
                    AllOf(StartsWith("shared memory and shared memory: rank 0 of 4 among the first "
                                     "ranks 0, 2 of the hosts: "),
                          HasSubstr(" s for rank 1")));
        if (communicator.rank() == 0) gate->open_for(2);
      },
      200ms);
}

}  // namespace
}  // namespace normscope::testing
