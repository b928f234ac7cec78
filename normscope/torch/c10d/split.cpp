// SPDX-License-Identifier: Apache-2.0
//
// C10dCommunicator::split(): process groups of some of the ranks of another.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <numeric>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "normscope/comm/self_communicator.h"
#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/c10d/debug_wrapper.h"
#include "normscope/torch/c10d/options.h"
#include "normscope/torch/errors.h"

namespace normscope::binding {
namespace {

// The backend itself, or the one that is wrapped. The wrapper of torch 2.11 says that it can split,
// and does not.
c10::intrusive_ptr<c10d::Backend> without_wrapper(
    const c10::intrusive_ptr<c10d::Backend>& backend) {
  const c10d::Backend& found = *backend;
  // By name: a torch without Gloo does not define the type.
  if (std::string_view(typeid(found).name()) != "N4c10d19ProcessGroupWrapperE") return backend;
  return static_cast<const c10d::ProcessGroupWrapper&>(found).getWrappedPg();
}

}  // namespace

std::unique_ptr<Communicator> C10dCommunicator::split(int color, int key) {
  const std::vector<int> members = members_of_part(*this, color, key);
  parts_ += 1;
  if (size_ == 1) return make_self_communicator();
  if (!own_) connect_devices();
  try {
    return make_part(members);
  } catch (const std::exception& error) {
    throw CommunicationError(describe("split: " + std::string(what_of(error))));
  }
}

std::unique_ptr<Communicator> C10dCommunicator::make_part(const std::vector<int>& members) const {
  const bool is_alone = members.size() == 1;
  Group part;
  std::shared_ptr<OwnGroup> own;
  if (own_) {
    if (is_alone) return make_self_communicator();
    own = own_->part(name_of_part(members), members);
    own->make();
    part = own->get();
  } else {
    const Group group = group_.lock();
    if (!group) throw CommunicationError("the process group was destroyed");
    if (is_alone) {
      stay_out_of_parts(*group);
      return make_self_communicator();
    }
    part = part_of(*group, members);
  }
  std::unique_ptr<C10dCommunicator> made(
      new C10dCommunicator(std::move(part), std::move(own), members, *this));
  made->connect_peers();
  if (watches_peers_) made->watch_peers();
  return made;
}

// NCCL can split a group only after its first sum on a device. If the group has another backend for
// the host, there was no such sum yet.
void C10dCommunicator::connect_devices() {
  if (!sums_on_device_ || host_device_ == carrier_) return;
  all_reduce(at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(carrier_)));
}

// Splitting may need all ranks of the group. Ranks that are alone take part with an empty list.
void C10dCommunicator::stay_out_of_parts(c10d::ProcessGroup& group) const {
  const auto of_host = without_wrapper(group.getBackend(host_device_));
  const auto of_device = without_wrapper(group.getBackend(carrier_));
  if (of_host->supportsSplitting()) (void)split_backend(*of_host, group.getStore(), {});
  if (of_device != of_host && of_device->supportsSplitting()) {
    (void)split_backend(*of_device, group.getStore(), {});
  }
}

// torch's own splitGroup() would split a backend that serves several devices once per device. The
// resulting parts would mistake each other's keys in the store.
C10dCommunicator::Group C10dCommunicator::part_of(c10d::ProcessGroup& group,
                                                  const std::vector<int>& members) const {
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(name_of_part(members), group.getStore());
  auto part = c10::make_intrusive<c10d::ProcessGroup>(store, place_of(rank_, members),
                                                      static_cast<int>(members.size()));
  const auto backend = without_wrapper(group.getBackend(host_device_));
  const auto backend_of_part = split_backend(*backend, store, members);
  part->setBackend(host_device_, c10d::ProcessGroup::BackendType::CUSTOM, backend_of_part);
  if (carrier_ == host_device_) return part;

  const auto device_backend = without_wrapper(group.getBackend(carrier_));
  const bool is_one = device_backend == backend;
  const auto device_store = c10::make_intrusive<c10d::PrefixStore>("device", store);
  part->setBackend(
      carrier_,
      is_one ? c10d::ProcessGroup::BackendType::CUSTOM : c10d::ProcessGroup::BackendType::NCCL,
      is_one ? backend_of_part : split_backend(*device_backend, device_store, members));
  return part;
}

c10::intrusive_ptr<c10d::Backend> C10dCommunicator::split_backend(
    c10d::Backend& backend, const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& members) const {
  const c10::intrusive_ptr<c10d::Backend::Options> options = backend.getBackendOptions();
  if (!options) {
    throw CommunicationError("a backend without options cannot be split: " +
                             backend.getBackendName());
  }
  const auto copy = copy_of(*options);
  if (!copy && backend.getBackendName() == "nccl") {
    throw CommunicationError(
        "the options of torch's NCCL backend cannot be copied for a part of the group, because "
        "torch's ProcessGroupNCCL.hpp did not compile when normscope was built (cmake said why); "
        "build again with NCCL's header, as in the package nvidia-nccl-cu13");
  }
  // Backends look up a part's ranks here. They are missing for a default group that is not the
  // first of the process, and some backends replace them.
  std::vector<std::uint64_t>& ranks = options->global_ranks_in_group;
  const auto restore = c10::make_scope_exit([&ranks, before = ranks] { ranks = before; });
  if (ranks.empty()) {
    ranks.resize(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0U);
  }
  return backend.split(store, members, copy ? copy : options);
}

// The name of a part in the group's store.
std::string C10dCommunicator::name_of_part(const std::vector<int>& members) const {
  return "normscope/" + std::to_string(parts_) + "/" + std::to_string(members.front());
}

}  // namespace normscope::binding
