// SPDX-License-Identifier: Apache-2.0
//
// Which communicators ranks use on one host and on several, and how these behave beyond the
// contract of every communicator.
#include "normscope/comm/hosts.h"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
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
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

using Group = std::unique_ptr<Communicator>;

// Runs each rank as a process, on the host with the given name.
void run_on(const std::vector<std::string>& hosts, const std::function<void(Group group)>& body) {
  const auto ranks = static_cast<int>(hosts.size());
  const auto segment = SharedMemorySegment::create(ranks, {.time_limit = 60s});
  spawn_processes(ranks, [&](int rank) {
    setenv("NORMSCOPE_NODE", hosts.at(static_cast<std::size_t>(rank)).c_str(), /*overwrite=*/1);
    body(make_shared_memory_communicator(segment, rank));
  });
}

// The same, with the communicator of over_hosts().
void run_over(const std::vector<std::string>& hosts, const CommunicatorBody& body) {
  run_on(hosts, [&](Group group) { body(*over_hosts(std::move(group), 60s)); });
}

TEST(FindHosts, ReturnsTheRanksOfTheHostAndTheLeaders) {
  run_on({"a", "b", "a", "c", "b"}, [](const Group& group) {
    const Hosts hosts = find_hosts(*group, 60s);

    const std::array<std::vector<int>, 5> members{{{0, 2}, {1, 4}, {0, 2}, {3}, {1, 4}}};
    EXPECT_EQ(hosts.members, members.at(static_cast<std::size_t>(group->rank())));
    EXPECT_THAT(hosts.leaders, ElementsAre(0, 1, 3));
    EXPECT_TRUE(hosts.memory.has_value());
    EXPECT_FALSE(hosts.is_one());
  });
}

TEST(FindHosts, OneRankCanDisableSharedMemoryForAll) {
  run_on({"a", "a", "b", "b"}, [](const Group& group) {
    if (group->rank() == 1) setenv("NORMSCOPE_SHARED_MEMORY", "0", 1);

    EXPECT_FALSE(find_hosts(*group, 60s).memory.has_value());

    EXPECT_THAT(gather(*group, group->rank()), ElementsAre(0, 1, 2, 3));
  });
}

TEST(OverHosts, OneHostUsesItsMemory) {
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
  run_on({"a", "b"}, [](Group group) {
    const Communicator* const given = group.get();

    EXPECT_EQ(over_hosts(std::move(group), 60s).get(), given);
  });
}

TEST(OverHosts, WithoutAGroupIsRefused) {
  const auto missing = HasSubstr("group: expected a communicator, got a null pointer");

  EXPECT_THAT(text_of<ArgumentError>([] { (void)over_hosts(nullptr, 60s); }), missing);
  EXPECT_THAT(text_of<ArgumentError>([] { (void)over_hosts(nullptr, Hosts{}); }), missing);
}

TEST(OverHosts, SeveralHostsUseTwoLevelsAndSoDoTheirParts) {
  run_over({"a", "a", "a", "b", "c", "c"}, [](Communicator& communicator) {
    EXPECT_EQ(communicator.transport(), "shared memory and shared memory");

    // One part spans all three hosts; the other has two ranks of the first host.
    const int rank = communicator.rank();
    const auto part = communicator.split(rank == 1 || rank == 2 ? 1 : 0, rank);
    EXPECT_EQ(part->transport(),
              part->size() == 2 ? "shared memory" : "shared memory and shared memory");
    EXPECT_EQ(exchanged_sum_of_ranks(*part), sum_of_ranks(*part));
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

TEST(OverHosts, LengthsThatDifferOnlyBetweenHostsAreReported) {
  run_over({"a", "a", "b", "b"}, [](Communicator& communicator) {
    // The first pieces have the same length.
    std::vector<double> values(communicator.rank() < 2 ? 20'000 : 30'000);

    EXPECT_THAT(text_of<MismatchError>([&] { communicator.all_reduce_sum(values); }),
                HasSubstr("got 20000 from rank 0, 20000 from rank 1, 30000 from rank 2, 30000 from "
                          "rank 3"));
    EXPECT_EQ(exchanged_sum_of_ranks(communicator), sum_of_ranks(communicator));
  });
}

// Rank `dead` is killed before the second exchange. The others must get the `expected` error.
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

TEST(OverHosts, AKilledFollowerIsNamedOnAllHosts) {
  kill_on_two_hosts(3, HasSubstr("shared memory and shared memory: rank 3 of 4 has died"));
}

TEST(OverHosts, AKilledLeaderIsNamedOnItsHostAndToTheOtherLeaders) {
  kill_on_two_hosts(2, ::testing::AnyOf(HasSubstr("rank 2 of 4 has died"),
                                        AllOf(HasSubstr("among the first ranks 0, 2 of the hosts"),
                                              HasSubstr("rank 1 of 2 has died"))));
}

}  // namespace
}  // namespace normscope::testing
