// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/communicator.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// The ranks that layers speak of, under a name. A layer keeps the name alone, so that it can be
// cloned and saved, and looks the group up when it runs. The name is good in this process as long
// as this object lives; of ranks that are threads each has an object of its own.
class RankGroup {
 public:
  // A group by whatever carries its messages.
  explicit RankGroup(std::unique_ptr<Communicator> communicator);

  // A process group of torch, which the program uses for nothing else from now on. Between ranks of
  // one host shared memory takes over.
  explicit RankGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;
  ~RankGroup();

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  // Exchange::all_reduce() among all ranks of the group; nothing where there is one. Throws what
  // that throws.
  void all_reduce(const CallLabel& label, std::span<double> message) const;

 private:
  enum class Kind { kCommunicator, kProcessGroup };

  Kind kind_;
  std::string name_;
  int rank_;
  int size_;
};

}  // namespace normscope
