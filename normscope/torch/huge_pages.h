// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace normscope::binding {

// Asks the system to back a new tensor's memory with huge pages, where it has any: the first write
// to a page costs a fault, which for a large output takes several times as long as the numbers that
// are written (docs/performance.md, "Fresh outputs"). Advice: nothing depends on whether it is
// taken. Memory that is in use already stays as it is, and none is taken beyond the tensor's own.
void prefer_huge_pages(const at::Tensor& output);

}  // namespace normscope::binding
