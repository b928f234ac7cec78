// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "normscope/core/tensor_view.h"
#include "normscope/kernels/kernels.h"

namespace normscope::binding {

// torch's dtype as ours; nullopt if there is no kernel for it.
[[nodiscard]] std::optional<DType> dtype_of(const at::Tensor& tensor);

// "float32".
[[nodiscard]] std::string_view dtype_name_of(const at::Tensor& tensor);

// An uninitialized tensor [N, C, *] of x's dtype, in the memory format in which torch's own
// batch_norm would return it: contiguous or channels-last. Also works on tensors without storage.
[[nodiscard]] at::Tensor empty_output(const at::Tensor& x);

// x itself if its strides fold to the layout of empty_output(x), else a copy in that layout. So
// sums of x have the same bits in all calls, whether or not they make an output.
[[nodiscard]] at::Tensor in_layout_of_output(const at::Tensor& x);

// The same for a tensor like x and the layout of `x`, which one of the functions above returned.
[[nodiscard]] at::Tensor in_layout_of(const at::Tensor& x, const at::Tensor& tensor);

// Views of tensors [N, C, *] that one of the functions above returned.
[[nodiscard]] TensorView view(const at::Tensor& tensor);
[[nodiscard]] MutableTensorView mutable_view(const at::Tensor& tensor);

// Views of contiguous tensors [C]; data is nullptr if there is no tensor.
[[nodiscard]] ChannelView channel_view(const std::optional<at::Tensor>& tensor);
[[nodiscard]] MutableChannelView mutable_channel_view(const std::optional<at::Tensor>& tensor);

}  // namespace normscope::binding
