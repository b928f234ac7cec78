// SPDX-License-Identifier: Apache-2.0
#include "segmentation/command.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <numeric>
#include <span>
#include <stdexcept>
#include <thread>

#include <ATen/Parallel.h>
#include <unistd.h>

#include "segmentation/training.h"

namespace {

constexpr std::string_view kOptions =
    "  --scenes FILE  what write_scenes.py has written (required)\n"
    "  --scope SCOPE  who shares statistics: local, group:K, node, world, ranks:0,1/2,3, "
    "slices:K,\n"
    "                 norm_batch:M, or progressive: local, group:2, group:4, ..., world, each for\n"
    "                 an equal part of the steps (default: world)\n"
    "  --steps N      optimizer steps, at most as many as the file has scenes for (default: all)\n"
    "  --seed N       of the first weights (default: 0)\n"
    "  --help         this text\n";

constexpr std::string_view kRanksOption =
    "  --ranks N      threads, which must divide the global batch of the file (default: 4)\n";

// How many steps the shown loss averages; one rank's part of one batch is mostly noise.
constexpr std::size_t kRecentSteps = 50;

template <class Number>
Number number_of(std::string_view option, std::string_view text, Number least) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || number < least) {
    throw std::invalid_argument(std::string(option) + ": expected a whole number of at least " +
                                std::to_string(least) + ", got \"" + std::string(text) + "\"");
  }
  return number;
}

[[noreturn]] void print_help(const char* program, std::string_view description, Ranks ranks) {
  std::printf("usage: %s --scenes FILE [options]\n\n%.*s\n%.*s%.*s", program,
              static_cast<int>(description.size()), description.data(),
              static_cast<int>(kOptions.size()), kOptions.data(),
              ranks == Ranks::kStarted ? static_cast<int>(kRanksOption.size()) : 0,
              kRanksOption.data());
  std::exit(0);
}

// Shows the progress of training: one line that changes on a terminal, otherwise ten lines.
class Progress {
 public:
  Progress(std::int64_t steps, std::int64_t global_batch)
      : steps_(steps), global_batch_(global_batch) {}

  void show(std::int64_t done, const std::string& scope, double loss) {
    losses_.push_back(loss);
    if (losses_.size() > kRecentSteps) losses_.pop_front();
    const bool changes = isatty(STDERR_FILENO) != 0;
    if (!changes && done % std::max<std::int64_t>(steps_ / 10, 1) != 0 && done != steps_) return;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    const double recent =
        std::accumulate(losses_.begin(), losses_.end(), 0.0) / static_cast<double>(losses_.size());
    std::fprintf(stderr, "%s%s: step %lld of %lld, loss %.3f, %.0f images/s%s",
                 changes ? "\r\x1b[K" : "", scope.c_str(), static_cast<long long>(done),
                 static_cast<long long>(steps_), recent,
                 static_cast<double>(done * global_batch_) / elapsed.count(),
                 changes && done != steps_ ? "" : "\n");
  }

 private:
  std::int64_t steps_;
  std::int64_t global_batch_;
  std::deque<double> losses_;  // this rank's, of the last steps
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

Command parse_command(int argc, char** argv, std::string_view description, Ranks ranks) {
  Command command;
  const std::span arguments(argv, static_cast<std::size_t>(argc));
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    std::string_view option = arguments[i];
    if (option == "--help") print_help(arguments[0], description, ranks);
    // --steps=5, or --steps 5.
    std::string_view value;
    if (const std::size_t equals = option.find('='); equals != std::string_view::npos) {
      value = option.substr(equals + 1);
      option = option.substr(0, equals);
    } else if (++i < arguments.size()) {
      value = arguments[i];
    }
    if (option == "--scenes") {
      command.scenes = value;
    } else if (option == "--scope") {
      command.scope = value;
    } else if (option == "--steps") {
      command.steps = number_of<std::int64_t>(option, value, 1);
    } else if (option == "--seed") {
      command.seed = number_of<std::uint64_t>(option, value, 0);
    } else if (option == "--ranks" && ranks == Ranks::kStarted) {
      command.ranks = number_of<int>(option, value, 1);
    } else {
      throw std::invalid_argument(std::string(option) + ": no such option; --help lists them");
    }
  }
  if (command.scenes.empty()) throw std::invalid_argument("--scenes: expected a file, got none");
  return command;
}

void train(const Command& command, const normscope::RankGroup& group) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(std::max(1, cores / group.size()));
  Trainer trainer(command.scenes, command.scope, command.seed, command.steps, group);
  Progress progress(trainer.steps(), trainer.global_batch());
  std::string hash_of_first;
  for (std::int64_t step = 0; step < trainer.steps(); ++step) {
    const std::string scope = trainer.scope();
    const double loss = trainer.step(step);
    if (step == 0) hash_of_first = trainer.hash_of_statistics();
    if (group.rank() == 0) progress.show(step + 1, scope, loss);
  }
  if (group.rank() != 0) return;
  std::printf("running statistics after the first step: %s\n", hash_of_first.c_str());
  std::printf("mean IoU on held-out scenes: %.3f\n", trainer.evaluate());
}
