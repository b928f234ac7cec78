// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding::backend {

// The kernels of the ops batch_norm_forward and batch_norm_backward.
[[nodiscard]] ForwardTensors forward(const ForwardOpArguments& op);
[[nodiscard]] BackwardTensors backward(const BackwardOpArguments& op);

// Whether torch's dispatcher would call these kernels for tensors with the given keys. Autograd
// then calls them itself, because a pass of the dispatcher takes longer than a small layer. False
// for tensors of other classes, under modes and transforms of torch, and on devices that the
// dispatcher has to look up.
[[nodiscard]] inline bool are_reached_by(c10::DispatchKeySet keys) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet without =
      local.excluded_ | c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  const c10::DispatchKey first = ((keys | local.included_) - without).highestPriorityTypeId();
  return first == c10::DispatchKey::CPU || first == c10::DispatchKey::CUDA;
}

}  // namespace normscope::binding::backend
