// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// What torch wraps each backend in if TORCH_DISTRIBUTED_DEBUG is DETAIL. This repeats a part of
// torch's ProcessGroupWrapper.hpp, which includes headers of Gloo that torch does not install.
namespace c10d {

class TORCH_API ProcessGroupWrapper : public Backend {
 public:
  explicit ProcessGroupWrapper(const c10::intrusive_ptr<Backend>& backend,
                               c10::intrusive_ptr<Backend> of_checks);

  // Because of this declaration, the compiler leaves the class's virtual functions to torch.
  c10::intrusive_ptr<Work> broadcast(std::vector<at::Tensor>& data,
                                     const BroadcastOptions& opts) override;

  // Weak: a torch without Gloo has no wrapper.
  // NOLINTNEXTLINE(readability-identifier-naming)
  [[gnu::weak]] c10::intrusive_ptr<Backend> getWrappedPg() const;

 private:
  c10::intrusive_ptr<Backend> backend_;
  c10::intrusive_ptr<Backend> of_checks_;
};

}  // namespace c10d
