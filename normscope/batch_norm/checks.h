// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/error.h"

namespace normscope {

// Checks that forward and backward share. All throw ArgumentError: which argument, what was
// expected, what was given.
void check_input(const TensorView& x);
void check_like_input(std::string_view name, const TensorView& tensor, const TensorView& x);
void check_own_memory(std::string_view name, const TensorView& output, std::string_view input_name,
                      const TensorView& input);
void check_channel_dtype(std::string_view name, DType dtype, const TensorView& x);
// What is added before an activation, or forward's output then: `data` nullptr for none.
void check_activation(const ActivationFunction& activation, std::string_view name,
                      const TensorView& tensor, const TensorView& x);
void check_device(const CallContext& context);
// A variance of one value is no variance: throws OneValueError. On several ranks all of them find
// this together, on a device by NormBatches::count().
void check_count(double count);
void check_slices(std::int64_t slices, const TensorView& x, const CallContext& context);

// Throws what an earlier call found on its device.
void throw_reported(const CallContext& context);

// Runs `check`; where it throws, or an earlier call has an error to tell, tells the peers that this
// rank will not come, and throws on.
template <class Check>
void check_or_fail(const CallContext& context, const Check& check) {
  try {
    throw_reported(context);
    check_device(context);
    check();
  } catch (const Error& error) {
    if (context.exchange != nullptr) context.exchange->fail(error.what());
    throw;
  }
}

}  // namespace normscope
