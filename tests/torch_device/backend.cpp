// SPDX-License-Identifier: Apache-2.0
//
// A backend of torch.distributed for the device of tests, over one for the host.
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "tests/torch_device/device.h"

namespace normscope::test_device {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class OverHost final : public c10d::Backend {
 public:
  explicit OverHost(c10::intrusive_ptr<Backend> host)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "over_host"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return host_->getBackendOptions(); }
  bool supportsSplitting() const override { return host_->supportsSplitting(); }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    const auto part = host_->split(store, ranks, options);
    return part ? c10::make_intrusive<OverHost>(part) : nullptr;
  }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  std::uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { host_->setTimeout(timeout); }
  void abort() override { host_->abort(); }
  void shutdown() override { host_->shutdown(); }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors views = views_of(tensors);
    return host_->broadcast(views, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors views = views_of(tensors);
    return host_->allreduce(views, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> to;
    for (Tensors& one : outputs) to.push_back(views_of(one));
    Tensors from = views_of(inputs);
    return host_->allgather(to, from, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override {
    at::Tensor to = on_host(output).view({-1});  // any shape will do, as for NCCL
    at::Tensor from = on_host(input).view({-1});
    return host_->_allgather_base(to, from, options);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return host_->barrier(options); }

 private:
  static Tensors views_of(const Tensors& tensors) {
    Tensors views;
    for (const at::Tensor& tensor : tensors) views.push_back(on_host(tensor));
    return views;
  }

  c10::intrusive_ptr<Backend> host_;
};

// Lets a group communicate on the device too.
void add_backend(const std::string& name) {
  const auto group = c10d::resolve_process_group(name);
  group->setBackend(kType, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<OverHost>(group->getBackend(c10::DeviceType::CPU)));
}

TORCH_LIBRARY_FRAGMENT(test_device, m) { m.def("add_backend(str group) -> ()", add_backend); }

}  // namespace
}  // namespace normscope::test_device
