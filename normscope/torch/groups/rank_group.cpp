// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/groups/rank_group.h"

#include <atomic>
#include <utility>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "normscope/core/error.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/registry.h"

namespace normscope {
namespace {

std::string new_name() {
  static std::atomic<int> made = 0;
  return std::string(binding::kRankGroup) + std::to_string(made++);
}

template <class Pointer>
auto* given(const Pointer& pointer, const char* what) {
  if (!pointer) throw ArgumentError(std::string("RankGroup: expected ") + what + ", got none");
  return pointer.get();
}

}  // namespace

RankGroup::RankGroup(std::unique_ptr<Communicator> communicator)
    : kind_(Kind::kCommunicator),
      name_(new_name()),
      rank_(given(communicator, "a communicator")->rank()),
      size_(communicator->size()) {
  binding::register_communicator(name_, std::move(communicator));
}

RankGroup::RankGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : kind_(Kind::kProcessGroup),
      name_(new_name()),
      rank_(given(group, "a process group")->getRank()),
      size_(group->getSize()) {
  c10d::register_process_group(name_, group);
  binding::know_process_group(name_);
}

RankGroup::~RankGroup() {
  if (kind_ == Kind::kCommunicator) {
    binding::unregister_communicator(name_);
  } else {
    c10d::unregister_process_group(name_);
  }
}

std::string RankGroup::name_in_exchanges(const std::string& layer) const {
  const int model = ++models_[layer];
  return model == 1 ? layer : layer + " of model " + std::to_string(model);
}

void RankGroup::all_reduce(const CallLabel& label, std::span<double> message) const {
  const auto exchange = [&](const binding::ExchangeUse& use) {
    if (use.get() != nullptr) use.get()->all_reduce(label, message, {});
  };
  binding::with_exchange(label.direction, {"world", name_, label.layer}, std::nullopt, exchange);
}

}  // namespace normscope
