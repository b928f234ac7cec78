// SPDX-License-Identifier: Apache-2.0
//
// How ranks are called within a part of their group.
#include "normscope/batch_norm/scope_exchange.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;

class ScopeExchange : public ::testing::TestWithParam<World> {
 protected:
  static void run(const std::function<void(Exchange&)>& body) {
    GetParam().run(GetParam().ranks, {}, [&](Communicator& communicator) {
      Exchange exchange = exchange_over(communicator);
      body(exchange);
    });
  }
};

TEST_P(ScopeExchange, ErrorsCallTheRanksOfAPartAsTheGroupDoes) {
  run([](Exchange& group) {
    const int rank = group.communicator().rank();
    const std::unique_ptr<Exchange> part = make_part_of(group, {0, 0, 0, 3, 3});
    const std::string layer = "layer" + std::to_string(rank);
    std::vector<double> message(kHeaderSize);

    const std::string text = text_of<MismatchError>([&] {
      part->all_reduce({.layer = layer, .scope = "group:3", .channels = 2}, message, {});
    });

    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(rank) + ": forward of " + layer));
    EXPECT_EQ(text.find("rank 0: ") == std::string::npos, rank >= 3);
  });
}

INSTANTIATE_TEST_SUITE_P(Threads, ScopeExchange, worlds({5}, &run_as_threads), ranks_of);
INSTANTIATE_TEST_SUITE_P(Processes, ScopeExchange, worlds({5}, &run_as_processes), ranks_of);

}  // namespace
}  // namespace normscope::testing
