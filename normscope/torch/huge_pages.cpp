// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace normscope::binding {
namespace {

// Of x86-64 and of most others. Where it is another, the advice covers less or more than whole
// pages, and the system takes what it can.
constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21;

}  // namespace

void prefer_huge_pages(const at::Tensor& output) {
#if defined(__linux__)
  if (!output.is_cpu() || output.nbytes() < kHugePage) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(output.const_data_ptr());
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + output.nbytes()) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace normscope::binding
