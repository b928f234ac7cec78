// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <unistd.h>

#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// How many forks lie between this process and the one that first asked: a system call for the
// process's id would be as long as a short exchange.
[[nodiscard]] std::uint32_t forks_so_far() noexcept;

// The process that an object was made in. A fork copies the object, but the copy does not speak for
// the rank: its words would be taken for those of the process that it was forked from.
class HomeProcess {
 public:
  HomeProcess() noexcept : id_(getpid()), forks_(forks_so_far()) {}

  [[nodiscard]] std::int32_t id() const noexcept { return id_; }
  [[nodiscard]] bool is_this_one() const noexcept { return forks_so_far() == forks_; }

  // What an error of another process says; `rank` is what the home process is: "rank 1 of 4".
  [[nodiscard]] std::string text_for_fork(std::string_view rank) const {
    return "this process (" + std::to_string(getpid()) + ") was forked from " + std::string(rank) +
           " (process " + std::to_string(id_) +
           ") and cannot exchange in its place. Processes like it, such as the workers of a data "
           "loader, can run layers in evaluation or with scope local; or start them anew instead "
           "of forking, as ranks of a group of their own";
  }

 private:
  std::int32_t id_;
  std::uint32_t forks_;
};

}  // namespace normscope
