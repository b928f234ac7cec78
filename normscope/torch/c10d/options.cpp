// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/options.h"

#include <typeinfo>

// Empty unless USE_C10D_NCCL is defined.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace normscope::binding {

using Options = c10d::Backend::Options;

#ifdef USE_C10D_NCCL
namespace {
// Each channel takes memory and processors of the device. Messages are too short for more than a
// few.
constexpr int kChannels = 4;
}  // namespace
#endif

c10::intrusive_ptr<Options> copy_of(const Options& options) {
  if (typeid(options) == typeid(Options)) return c10::make_intrusive<Options>(options);
#ifdef USE_C10D_NCCL
  // All of this is in headers; libtorch_cuda need not be linked.
  using NcclOptions = c10d::ProcessGroupNCCL::Options;
  if (const auto* of_nccl = dynamic_cast<const NcclOptions*>(&options)) {
    auto copy = c10::make_intrusive<NcclOptions>(*of_nccl);
    copy->config.maxCTAs = kChannels;
    return copy;
  }
#endif
  return nullptr;
}

}  // namespace normscope::binding
