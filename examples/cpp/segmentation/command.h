// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <normscope/torch/groups/rank_group.h>

// The command line of both programs.
struct Command {
  std::string scenes;
  std::string scope = "world";
  std::optional<std::int64_t> steps;  // none: as many as the file has scenes for
  std::uint64_t seed = 0;
  int ranks = 4;  // of threads alone; mpirun decides for MPI
};

// Whether a program starts its ranks itself.
enum class Ranks { kStarted, kGiven };

// Reads the command line. For --help it prints `description` and the options, and ends the program.
// Throws std::invalid_argument if something is wrong.
[[nodiscard]] Command parse_command(int argc, char** argv, std::string_view description,
                                    Ranks ranks);

// One rank's entire training. Rank 0 reports progress and results.
void train(const Command& command, const normscope::RankGroup& group);
