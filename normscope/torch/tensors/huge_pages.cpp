// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/huge_pages.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace normscope::binding {
namespace {

// The size on x86-64 and most other machines. If it is another, the advice covers less or more than
// whole pages, and the system uses what it can.
constexpr std::size_t kHugePage = std::size_t{1} << 21;

}  // namespace

void prefer_huge_pages(const at::Tensor& output) {
#if defined(__linux__)
  if (!output.is_cpu() || output.nbytes() < kHugePage) return;
  char* const begin = static_cast<char*>(output.mutable_data_ptr());
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  const std::size_t whole = (output.nbytes() - std::min(before, output.nbytes())) / kHugePage;
  if (whole > 0) madvise(begin + before, whole * kHugePage, MADV_HUGEPAGE);
#endif
}

}  // namespace normscope::binding
