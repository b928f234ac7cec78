// SPDX-License-Identifier: Apache-2.0
//
// MPI before its initialization, after its end, and in the wrong thread. A process can initialize
// MPI only once: each test runs in a process of its own, which is the only rank of its world.
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/comm/mpi/mpi_communicator.h"
#include "normscope/core/error.h"
#include "tests/comm/worlds.h"
#include "tests/support/ranks.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;

void in_a_process(const std::function<void()>& body) {
  spawn_processes(1, [&](int /*rank*/) { body(); });
}

void initialize_with(int level) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  ASSERT_EQ(provided, level);
}

std::string refusal() {
  return text_of<ArgumentError>([] { (void)make_mpi_communicator(MPI_COMM_WORLD); });
}

TEST(MpiLifetime, MpiIsRefusedBeforeItsInitialization) {
  in_a_process([] {
    EXPECT_THAT(refusal(), HasSubstr("expected MPI to be initialized, by MPI_Init_thread"));
  });
}

TEST(MpiLifetime, MpiIsRefusedAfterItsEnd) {
  in_a_process([] {
    initialize_with(MPI_THREAD_FUNNELED);
    MPI_Finalize();

    EXPECT_THAT(refusal(), HasSubstr("it has been finalized"));
  });
}

TEST(MpiLifetime, ACommunicatorThatOutlivesMpiThrowsAndIsDestroyedSafely) {
  in_a_process([] {
    initialize_with(MPI_THREAD_FUNNELED);
    const auto communicator = make_mpi_communicator(MPI_COMM_WORLD);
    MPI_Finalize();

    const auto text = text_of<CommunicationError>([&] { communicator->all_reduce_sum({}); });
    communicator->fail("nobody hears it");

    EXPECT_EQ(text, "mpi: MPI has been finalized");
  });
}

TEST(MpiLifetime, TheErrorForThreadSingleSaysHowToInitialize) {
  in_a_process([] {
    initialize_with(MPI_THREAD_SINGLE);

    EXPECT_THAT(refusal(), HasSubstr("call MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED"));
    MPI_Finalize();
  });
}

TEST(MpiLifetime, AThreadOtherThanTheMainOneIsRefusedAndTheGroupStaysUsable) {
  in_a_process([] {
    initialize_with(MPI_THREAD_FUNNELED);
    auto communicator = make_mpi_communicator(MPI_COMM_WORLD);

    std::thread([&] {
      EXPECT_THAT(refusal(), HasSubstr("got one from another thread"));
      EXPECT_THAT(text_of<ArgumentError>([&] { communicator->all_reduce_sum({}); }),
                  HasSubstr("initialize with MPI_THREAD_SERIALIZED to allow it"));
    }).join();

    communicator->all_reduce_sum({});
    communicator.reset();
    MPI_Finalize();
  });
}

TEST(MpiLifetime, ThreadsTakeTurnsIfMpiIsSerialized) {
  in_a_process([] {
    initialize_with(MPI_THREAD_SERIALIZED);
    auto communicator = make_mpi_communicator(MPI_COMM_WORLD);

    std::thread([&] {
      communicator->all_reduce_sum({});
      communicator.reset();
    }).join();

    MPI_Finalize();
  });
}

}  // namespace
}  // namespace normscope::testing
