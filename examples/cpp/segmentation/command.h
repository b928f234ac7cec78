// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <normscope/torch/rank_group.h>

// What the command line of both programs says.
struct Command {
  std::string scenes;
  std::string scope = "world";
  std::int64_t steps = 700;
  std::uint64_t seed = 0;
  int ranks = 4;  // of threads alone; mpirun decides for MPI
};

// Whether a program starts its ranks itself.
enum class Ranks { kStarted, kGiven };

// Reads the command line. For --help it prints `description` and the options, and ends the program;
// throws std::invalid_argument where something is wrong.
[[nodiscard]] Command parse_command(int argc, char** argv, std::string_view description,
                                    Ranks ranks);

// One rank's whole training. Rank 0 tells how far it is, and what came out.
void train(const Command& command, const normscope::RankGroup& group);
