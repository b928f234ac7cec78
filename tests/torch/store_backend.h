// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace normscope::testing {

// A Work that has ended when it is made.
class Done : public c10d::Work {
 public:
  Done() { finish(); }
};

// Adds over a store, in which every rank leaves its numbers for the others.
class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "store"; }

  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  // For torch's debug mode.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& /*options*/) override {
    const at::Tensor& tensor = tensors.front();
    const std::string meeting = std::to_string(meetings_++) + "/";
    const auto* bytes = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
    store_->set(meeting + std::to_string(getRank()),
                std::vector<std::uint8_t>(bytes, bytes + tensor.nbytes()));
    const at::Tensor summand = at::empty_like(tensor);
    at::Tensor sum = at::zeros_like(tensor);
    for (int rank = 0; rank < getSize(); ++rank) {
      const std::vector<std::uint8_t> theirs = store_->get(meeting + std::to_string(rank));
      std::memcpy(summand.mutable_data_ptr(), theirs.data(), theirs.size());
      sum += summand;
    }
    tensor.copy_(sum);
    return c10::make_intrusive<Done>();
  }

 protected:
  [[nodiscard]] const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<Options> options_ = c10::make_intrusive<Options>("store");
  int meetings_ = 0;
};

// A group of the ranks of `backend`, which serves the host.
inline c10::intrusive_ptr<c10d::ProcessGroup> group_over(
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const c10::intrusive_ptr<c10d::Store>& store) {
  auto group =
      c10::make_intrusive<c10d::ProcessGroup>(store, backend->getRank(), backend->getSize());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return group;
}

}  // namespace normscope::testing
