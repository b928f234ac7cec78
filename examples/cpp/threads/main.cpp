// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <normscope/comm/thread_communicator.h>
#include <normscope/torch/groups/rank_group.h>

#include "segmentation/command.h"

namespace {

constexpr const char* kDescription =
    "Trains the segmentation network of the demo on ranks that are threads of this process, each\n"
    "with a replica of its own. Prints a hash of the running statistics after the first step, "
    "which\n"
    "python_run.py prints too, and the quality at the end.\n";

// Keeps what was thrown first: what others throw is often only a consequence.
class FirstError {
 public:
  void keep(const std::exception& error) {
    const std::lock_guard lock(mutex_);
    if (text_.empty()) text_ = error.what();
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::mutex mutex_;
  std::string text_;
};

int run(const Command& command) {
  FirstError first_error;
  {
    std::vector<std::jthread> ranks;
    for (auto& communicator : normscope::make_thread_communicators(command.ranks)) {
      ranks.emplace_back([&, communicator = std::move(communicator)]() mutable {
        try {
          train(command, normscope::RankGroup(std::move(communicator)));
        } catch (const std::exception& error) {
          first_error.keep(error);
        }
      });
    }
  }
  if (first_error.text().empty()) return 0;
  std::fprintf(stderr, "threads: %s\n", first_error.text().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse_command(argc, argv, kDescription, Ranks::kStarted));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "threads: %s\n", error.what());
    return 2;
  }
}
