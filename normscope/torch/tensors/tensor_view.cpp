// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/tensor_view.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>

#include "normscope/core/error.h"

namespace normscope::binding {
namespace {

DType known_dtype_of(const at::Tensor& tensor) {
  const std::optional<DType> dtype = dtype_of(tensor);
  TORCH_INTERNAL_ASSERT(dtype, "the dtype was not checked");
  return *dtype;
}

// The stride of the positions [*] of a tensor [N, C, *] as one dimension; nullopt if they do not
// fold. Those of a tensor without elements always do.
std::optional<std::int64_t> position_stride(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 1;
  std::optional<std::int64_t> innermost;
  std::int64_t folded = 1;  // positions in the dimensions seen so far
  for (std::int64_t d = tensor.dim() - 1; d >= 2; --d) {
    if (tensor.size(d) == 1) continue;
    if (!innermost) innermost = tensor.stride(d);
    if (tensor.stride(d) != *innermost * folded) return std::nullopt;
    folded *= tensor.size(d);
  }
  return innermost.value_or(1);
}

// nullopt if the positions do not fold.
template <class Pointer>
std::optional<BasicTensorView<Pointer>> fold(const at::Tensor& tensor, Pointer data) {
  const std::optional<std::int64_t> stride = position_stride(tensor);
  if (!stride) return std::nullopt;
  std::int64_t positions = 1;
  for (std::int64_t d = 2; d < tensor.dim(); ++d) positions *= tensor.size(d);
  return BasicTensorView<Pointer>{
      data,      known_dtype_of(tensor), tensor.size(0),   tensor.size(1),
      positions, tensor.stride(0),       tensor.stride(1), *stride};
}

// The layout of empty_output(x).
Layout layout_of_output(const at::Tensor& x, const TensorView& folded) {
  if (folded.positions == 1) return Layout::kChannelsLast;
  const bool is_contiguous = x.suggest_memory_format() == at::MemoryFormat::Contiguous;
  return is_contiguous || folded.channels == 1 ? Layout::kChannelsFirst : Layout::kChannelsLast;
}

// The size on x86-64 and most other machines. If it is another, the advice covers less or more than
// whole pages, and the system uses what it can.
constexpr std::size_t kHugePage = std::size_t{1} << 21;

// Asks the system to back a new tensor's memory with huge pages, if it has any. The first write to
// a page causes a fault; for a large output, the faults take several times as long as writing the
// numbers (docs/performance.md, "Fresh outputs"). This is only advice: nothing depends on whether
// it is taken. Memory already in use is not affected, and none beyond the tensor's own is taken.
void prefer_huge_pages(const at::Tensor& output) {
#if defined(__linux__)
  if (!output.is_cpu() || output.nbytes() < kHugePage) return;
  char* const begin = static_cast<char*>(output.mutable_data_ptr());
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  const std::size_t whole = (output.nbytes() - std::min(before, output.nbytes())) / kHugePage;
  if (whole > 0) madvise(begin + before, whole * kHugePage, MADV_HUGEPAGE);
#endif
}

}  // namespace

std::optional<DType> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: return std::nullopt;
  }
}

std::string_view dtype_name_of(const at::Tensor& tensor) {
  return c10::getDtypeNames(tensor.scalar_type()).first;
}

at::Tensor empty_output(const at::Tensor& x) {
  // Without elements, strides suggest no format. torch then preserves them.
  const bool is_empty = !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && x.numel() == 0;
  if (is_empty) return at::empty_like(x, at::MemoryFormat::Preserve);
  // empty_like() would pass through the dispatcher once more, and call this.
  at::Tensor output = at::empty_symint(x.sym_sizes(), x.options(), x.suggest_memory_format());
  prefer_huge_pages(output);
  return output;
}

at::Tensor in_layout_of_output(const at::Tensor& x) {
  const auto have = fold(x, x.const_data_ptr());
  const bool has_it = have && have->has_kernel_layout() &&
                      (have->empty() || have->layout() == layout_of_output(x, *have));
  return has_it ? x : empty_output(x).copy_(x);
}

at::Tensor in_layout_of(const at::Tensor& x, const at::Tensor& tensor) {
  const auto have = fold(tensor, tensor.const_data_ptr());
  if (have && have->has_kernel_layout() && have->layout() == view(x).layout()) return tensor;
  // Not empty_like(), for which the strides of sliding windows and expanded tensors are ambiguous.
  return empty_output(x).copy_(tensor);
}

TensorView view(const at::Tensor& tensor) { return *fold(tensor, tensor.const_data_ptr()); }

MutableTensorView mutable_view(const at::Tensor& tensor) {
  return *fold(tensor, tensor.mutable_data_ptr());
}

ChannelView channel_view(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return {};
  return {tensor->const_data_ptr(), known_dtype_of(*tensor)};
}

MutableChannelView mutable_channel_view(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return {};
  return {tensor->mutable_data_ptr(), known_dtype_of(*tensor)};
}

}  // namespace normscope::binding
