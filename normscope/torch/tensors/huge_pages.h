// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace normscope::binding {

// Asks the system to back a new tensor's memory with huge pages, if it has any. The first write to
// a page causes a fault; for a large output, the faults take several times as long as writing the
// numbers (docs/performance.md, "Fresh outputs"). This is only advice: nothing depends on whether
// it is taken. Memory already in use is not affected, and none beyond the tensor's own is taken.
void prefer_huge_pages(const at::Tensor& output);

}  // namespace normscope::binding
