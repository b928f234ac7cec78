// SPDX-License-Identifier: Apache-2.0
//
// Every process that mpirun starts is one rank. All ranks run all tests together.
#include "normscope/comm/mpi/mpi_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/hosts.h"
#include "normscope/core/error.h"
#include "tests/comm/communicator_contract.h"
#include "tests/support/idle_observer.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using namespace std::chrono_literals;

// More than ranks need to meet on a loaded machine.
constexpr std::chrono::milliseconds kTimeToMeet = 5s;

void run_under_mpi(int /*ranks*/, const ExchangeOptions& options, const CommunicatorBody& body) {
  // Creating the group takes time too, even in tests with a very short time limit.
  body(*make_mpi_communicator(MPI_COMM_WORLD, std::max(options.time_limit, kTimeToMeet)));
}

// With two ranks per host.
void run_under_mpi_in_pairs(int /*ranks*/, const ExchangeOptions& options,
                            const CommunicatorBody& body) {
  auto group = make_mpi_communicator(MPI_COMM_WORLD, std::max(options.time_limit, kTimeToMeet));
  setenv("NORMSCOPE_NODE", std::to_string(group->rank() / 2).c_str(), /*overwrite=*/1);
  body(*over_hosts(std::move(group), options.time_limit));
  unsetenv("NORMSCOPE_NODE");
}

// For processes that share nothing but MPI.
class MpiGate final : public Gate {
 public:
  void open_for(int ranks) override {
    for (int rank = 1; rank <= ranks; ++rank) {
      MPI_Send(nullptr, 0, MPI_CHAR, rank, 0, MPI_COMM_WORLD);
    }
  }
  void wait() override { MPI_Recv(nullptr, 0, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }
};

std::unique_ptr<Gate> make_mpi_gate() { return std::make_unique<MpiGate>(); }

World world_of_mpi() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return {.ranks = ranks, .run = run_under_mpi, .make_gate = make_mpi_gate};
}

// Empty if there are fewer ranks.
auto world_of_at_least(int ranks) {
  std::vector<World> worlds = {world_of_mpi()};
  if (worlds.front().ranks < ranks) worlds.clear();
  return ::testing::ValuesIn(worlds);
}

auto world_of_pairs() {
  std::vector<World> worlds = {world_of_mpi()};
  worlds.front().run = run_under_mpi_in_pairs;
  worlds.front().peers_of_rank_0 = {1};
  if (worlds.front().ranks < 3) worlds.clear();
  return ::testing::ValuesIn(worlds);
}

INSTANTIATE_TEST_SUITE_P(Mpi, CommunicatorContract, world_of_at_least(1), ranks_of);
INSTANTIATE_TEST_SUITE_P(Mpi, PeersContract, world_of_at_least(2), ranks_of);
INSTANTIATE_TEST_SUITE_P(MpiInPairs, CommunicatorContract, world_of_pairs(), ranks_of);
INSTANTIATE_TEST_SUITE_P(MpiInPairs, PeersContract, world_of_pairs(), ranks_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PeersContract);

TEST(MpiCommunicator, KeepsItsMessagesSeparateFromTheCallers) {
  const auto communicator = make_mpi_communicator(MPI_COMM_WORLD);
  MPI_Request callers = MPI_REQUEST_NULL;
  char byte = 0;
  MPI_Irecv(&byte, 1, MPI_CHAR, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &callers);

  EXPECT_THAT(gather(*communicator, communicator->rank()), SizeIs(communicator->size()));

  const int next = (communicator->rank() + 1) % communicator->size();
  MPI_Send("x", 1, MPI_CHAR, next, 7, MPI_COMM_WORLD);
  MPI_Wait(&callers, MPI_STATUS_IGNORE);
  EXPECT_EQ(byte, 'x');
}

TEST(MpiCommunicator, UsesSharedMemoryBetweenRanksOfOneHost) {
  const auto shared = over_hosts(make_mpi_communicator(MPI_COMM_WORLD), kAmple);

  EXPECT_EQ(shared->transport(), shared->size() > 1 ? "shared memory" : "mpi");
  EXPECT_EQ(exchanged_sum_of_ranks(*shared), sum_of_ranks(*shared));
}

TEST(MpiCommunicator, RefusesInvalidArguments) {
  EXPECT_THAT(text_of<ArgumentError>([] { (void)make_mpi_communicator(MPI_COMM_NULL); }),
              HasSubstr("ranks: expected an MPI communicator, got MPI_COMM_NULL"));
  EXPECT_THAT(text_of<ArgumentError>([] { (void)make_mpi_communicator(MPI_COMM_WORLD, 0ms); }),
              HasSubstr("time_limit: expected more than 0 ms, got 0 ms"));
}

TEST(MpiCommunicator, LeavesTheCallersErrorHandlerAsItWas) {
  (void)make_mpi_communicator(MPI_COMM_WORLD);

  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  EXPECT_EQ(handler, MPI_ERRORS_ARE_FATAL);
}

// Tests that need several ranks.
class MpiPeers : public ::testing::TestWithParam<World> {};
class MpiTriples : public ::testing::TestWithParam<World> {};

INSTANTIATE_TEST_SUITE_P(Mpi, MpiPeers, world_of_at_least(2), ranks_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiPeers);
INSTANTIATE_TEST_SUITE_P(Mpi, MpiTriples, world_of_at_least(3), ranks_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiTriples);

TEST_P(MpiPeers, AnInterCommunicatorIsRefused) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half = MPI_COMM_NULL, between = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? 0 : 1, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, rank == 0 ? 1 : 0, 0, &between);

  EXPECT_THAT(text_of<ArgumentError>([&] { (void)make_mpi_communicator(between); }),
              HasSubstr("ranks: expected one group of ranks, got an inter-communicator"));
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
}

TEST_P(MpiPeers, CreatingAGroupTimesOutIfARankIsMissing) {
  MpiGate gave_up;
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm once = MPI_COMM_NULL;  // the abandoned call keeps using it
  MPI_Comm_dup(MPI_COMM_WORLD, &once);
  if (rank != 0) {
    gave_up.wait();
    return;
  }

  EXPECT_THAT(text_of<TimeoutError>([&] { (void)make_mpi_communicator(once, 50ms); }),
              EndsWith(" s for the other ranks to create the group"));
  gave_up.open_for(size - 1);
}

TEST_P(MpiTriples, ATimeoutNamesOnlyTheMissingRanks) {
  MpiGate timed_out;
  const auto communicator = make_mpi_communicator(MPI_COMM_WORLD, kTimeToMeet);
  const int last = communicator->size() - 1;
  if (communicator->rank() == last) {
    timed_out.wait();
    return;
  }

  const std::string text = text_of<CommunicationError>([&] { communicator->all_reduce_sum({}); });

  EXPECT_THAT(text, EndsWith(" s for rank " + std::to_string(last)));
  // Release the last rank, which is the missing one.
  if (communicator->rank() == 0) MPI_Send(nullptr, 0, MPI_CHAR, last, 0, MPI_COMM_WORLD);
}

TEST_P(MpiPeers, AFailureInAThreadThatMustNotCallMpiReachesThePeers) {
  for (const bool calls_again : {true, false}) {
    // With a time limit longer than that of the test: only the failure can end the wait.
    auto communicator = make_mpi_communicator(MPI_COMM_WORLD, 24h);
    const auto error = [&] {
      return text_of<CommunicationError>([&] { communicator->all_reduce_sum({}); });
    };
    const std::string expected =
        "mpi: rank 1 of " + std::to_string(communicator->size()) + " failed: out of memory";
    if (communicator->rank() != 1) {
      EXPECT_EQ(error(), expected);
      continue;
    }

    std::thread([&] { communicator->fail("out of memory"); }).join();

    if (calls_again) {
      EXPECT_EQ(error(), expected);
    }
    communicator.reset();
  }
}

// Calls the function on another thread whenever an exchange is complete.
class AtTheEnd final : public IdleObserver {
 public:
  explicit AtTheEnd(std::function<void()> call) : call_(std::move(call)) {}

  void end_wait() noexcept override { std::thread(call_).join(); }

 private:
  std::function<void()> call_;
};

TEST_P(MpiPeers, AFailureAtTheEndOfAnExchangeReachesThePeersAtOnce) {
  const auto communicator = make_mpi_communicator(MPI_COMM_WORLD, kTimeToMeet);
  const auto sum = [&] { communicator->all_reduce_sum({}); };
  if (communicator->rank() == 1) {
    const AtTheEnd failing([&] { communicator->fail("out of memory"); });
    sum();
  } else {
    // A peer may still be in the first sum when the failure reaches it.
    EXPECT_THAT(text_of<CommunicationError>([&] { sum(), sum(); }),
                EndsWith("failed: out of memory"));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_P(MpiPeers, DifferentLayersAreReportedBeforeDifferentLengths) {
  Exchange exchange(make_mpi_communicator(MPI_COMM_WORLD));
  const int rank = exchange.communicator().rank();
  std::vector<double> message(static_cast<std::size_t>(rank == 0 ? 10 : 100) + kHeaderSize);

  const std::string text = text_of<MismatchError>([&] {
    exchange.all_reduce({.layer = rank == 0 ? "stem" : "head", .scope = "world"}, message, {});
  });

  EXPECT_THAT(text,
              AllOf(HasSubstr("rank 0: forward of stem"), HasSubstr("rank 1: forward of head")));
  EXPECT_THAT(text, Not(HasSubstr("mpi")));
  exchange.all_reduce({.layer = "stem", .scope = "world"}, std::span(message).first(kHeaderSize),
                      {});
}

}  // namespace
}  // namespace normscope::testing

int main(int argc, char** argv) {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  ::testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  MPI_Finalize();
  return status;
}
