// SPDX-License-Identifier: Apache-2.0
//
// Process groups of torch that were made without Python: a TCPStore, and the program's own backend.
#include <cstdlib>
#include <functional>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/types.h>

#include "normscope/core/error.h"
#include "normscope/torch/groups/rank_group.h"
#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/ranks.h"
#include "tests/torch/store_backend.h"

namespace normscope::testing {
namespace {

// Ranks that are threads and meet in a store at a free port of this host.
void run_over_a_store(int ranks, const std::function<void(const RankGroup& group)>& body) {
  c10d::TCPStoreOptions options{.port = 0, .isServer = true, .waitWorkers = false};
  const auto server = c10::make_intrusive<c10d::TCPStore>("localhost", options);
  options.port = server->getPort();
  options.isServer = false;
  spawn_threads(ranks, [&](int rank) {
    const auto store = c10::make_intrusive<c10d::TCPStore>("localhost", options);
    body(RankGroup(group_over(c10::make_intrusive<StoreBackend>(store, rank, ranks), store)));
  });
}

// Leaves ranks of one host to the backend; otherwise they would use shared memory.
class WithoutSharedMemory {
 public:
  WithoutSharedMemory() { setenv("NORMSCOPE_SHARED_MEMORY", "0", 1); }
  WithoutSharedMemory(const WithoutSharedMemory&) = delete;
  WithoutSharedMemory& operator=(const WithoutSharedMemory&) = delete;
  ~WithoutSharedMemory() { unsetenv("NORMSCOPE_SHARED_MEMORY"); }
};

void expect_shared_statistics(const RankGroup& group) {
  nn::BatchNorm1d layer(nn::BatchNormOptions(3).group(group.name()));
  const at::Tensor x = torch::full({2, 3}, group.rank() * 2.0);
  x[1] += 1;

  layer->forward(x);

  // 0, 1, 2, ... over all ranks.
  const double mean = (2.0 * group.size() - 1) / 2;
  EXPECT_TRUE(torch::allclose(layer->running_mean, torch::full({3}, 0.1 * mean)));
}

TEST(ProcessGroupOfTorch, LayersShareStatisticsOverABackendOfTheProgramsOwn) {
  const WithoutSharedMemory without_shared_memory;

  run_over_a_store(3, expect_shared_statistics);
}

TEST(ProcessGroupOfTorch, SharedMemoryTakesOverOnOneHost) {
  run_over_a_store(3, expect_shared_statistics);
}

TEST(ProcessGroupOfTorch, ANullGroupIsRefused) {
  EXPECT_THROW(RankGroup(c10::intrusive_ptr<c10d::ProcessGroup>()), ArgumentError);
}

}  // namespace
}  // namespace normscope::testing
