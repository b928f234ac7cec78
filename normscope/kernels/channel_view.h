// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/attributes.h"
#include "normscope/core/dtype.h"

namespace normscope NORMSCOPE_EXPORT {

// A non-owning view of per-channel numbers [C]: weight, bias, running statistics, or their
// gradients.
template <class Pointer>
struct BasicChannelView {
  Pointer data = nullptr;  // nullptr: absent
  DType dtype = DType::kFloat32;
};
using ChannelView = BasicChannelView<const void*>;
using MutableChannelView = BasicChannelView<void*>;

}  // namespace normscope
