// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/call_site.h"

#include <ATen/Parallel.h>

namespace normscope::binding {
namespace {

// Runs tasks on torch's threads, as many as torch.set_num_threads() allows here.
void run_on_torch_threads(std::int64_t tasks, const Task& task) {
  at::parallel_for(0, tasks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) task(i);
  });
}

}  // namespace

CallSite::CallSite(const at::Tensor& x) : placement_(placement_of(x)) {
  if (placement_.memory == Memory::kDevice) guard_.reset_device(x.device());
}

void CallSite::prepare(const at::Tensor& x, std::int64_t slices) {
  if (placement_.memory == Memory::kHost) {
    execution_.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    execution_.parallel_for = run_on_torch_threads;
    return;
  }
  device_.kernels = &device_kernels_for(x);
  device_.stream = current_stream(x);
  memory_.emplace(x, slices, device_);
}

CallContext CallSite::alone() const noexcept {
  CallContext context;
  if (placement_.memory == Memory::kHost) {
    context.execution = &execution_;
  } else {
    context.device = &device_;
  }
  return context;
}

CallContext CallSite::with(const ExchangeUse& exchange, const ScopedCall& call) {
  if (placement_.memory == Memory::kDevice) device_.report = exchange.report();
  CallContext context = alone();
  context.exchange = exchange.get();
  context.scope = call.scope;
  context.layer = call.layer;
  return context;
}

}  // namespace normscope::binding
