// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/communicator.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// A group of ranks, which layers refer to by name. A layer keeps only the name, so it can be cloned
// and saved, and looks up the group when it runs. The name is valid in this process during this
// object's lifetime. If ranks are threads, each has its own object.
class RankGroup {
 public:
  // A group over any communicator. Throws ArgumentError if it is nullptr.
  explicit RankGroup(std::unique_ptr<Communicator> communicator);

  // A process group of torch, which the program must not use for anything else from now on. Ranks
  // on one host exchange through shared memory instead. Throws ArgumentError if it is nullptr.
  explicit RankGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;
  ~RankGroup();

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  // Exchange::all_reduce() among all ranks of the group, with its errors; does nothing in a group
  // of one rank.
  void all_reduce(const CallLabel& label, std::span<double> message) const;

  // The name in exchanges of one more layer, which its model calls `layer`. Of the second layer of
  // this name in the group it ends in "of model 2". All ranks must ask in the same order.
  [[nodiscard]] std::string name_in_exchanges(const std::string& layer) const;

 private:
  enum class Kind { kCommunicator, kProcessGroup };

  Kind kind_;
  std::string name_;
  int rank_;
  int size_;
  mutable std::map<std::string, int> models_;  // how many have a layer of each name
};

}  // namespace normscope
