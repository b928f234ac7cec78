// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/options.h"

#include <typeinfo>

// Empty unless USE_C10D_NCCL is defined.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "normscope/comm/nccl/nccl_communicator.h"

namespace normscope::binding {

using Options = c10d::Backend::Options;

c10::intrusive_ptr<Options> copy_of(const Options& options) {
  if (typeid(options) == typeid(Options)) return c10::make_intrusive<Options>(options);
#ifdef USE_C10D_NCCL
  // All of this is in headers; libtorch_cuda need not be linked.
  using NcclOptions = c10d::ProcessGroupNCCL::Options;
  if (const auto* of_nccl = dynamic_cast<const NcclOptions*>(&options)) {
    auto copy = c10::make_intrusive<NcclOptions>(*of_nccl);
    copy->config.maxCTAs = kMostNcclChannels;
    return copy;
  }
#endif
  return nullptr;
}

}  // namespace normscope::binding
