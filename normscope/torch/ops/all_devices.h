// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/library.h>

// Registers the same kernels for the devices of torch: x tells which to use. Not for sparse,
// quantized and nested tensors: the dispatcher's error for those names the op and the kind of
// tensor.
#define NORMSCOPE_FOR_ALL_DEVICES(register_ops)                      \
  TORCH_LIBRARY_IMPL(normscope, CPU, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, CUDA, m) { register_ops(m); }        \
  TORCH_LIBRARY_IMPL(normscope, XPU, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, HPU, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, MTIA, m) { register_ops(m); }        \
  TORCH_LIBRARY_IMPL(normscope, PrivateUse1, m) { register_ops(m); } \
  static_assert(true)
