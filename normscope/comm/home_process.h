// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <unistd.h>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The number of forks between this process and the one that first called this function. Used
// instead of getpid(): a system call takes as long as a short exchange.
[[nodiscard]] std::uint32_t forks_so_far() noexcept;

// The process in which an object was created. A fork copies the object, but the copy must not act
// as the rank: peers would take its messages for those of the original process.
class HomeProcess {
 public:
  HomeProcess() noexcept : id_(getpid()), forks_(forks_so_far()) {}

  [[nodiscard]] std::int32_t id() const noexcept { return id_; }
  [[nodiscard]] bool is_this_one() const noexcept { return forks_so_far() == forks_; }

  // The error text for a fork; `rank` names the home process: "rank 1 of 4".
  [[nodiscard]] std::string text_for_fork(std::string_view rank) const {
    return "this process (" + std::to_string(getpid()) + ") was forked from " + std::string(rank) +
           " (process " + std::to_string(id_) +
           ") and cannot exchange in its place. A forked process, such as a data loader worker, "
           "can run layers in evaluation mode or with scope local. To exchange, start new "
           "processes instead of forking, as ranks of a group of their own";
  }

 private:
  std::int32_t id_;
  std::uint32_t forks_;
};

}  // namespace normscope
