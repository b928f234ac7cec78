// SPDX-License-Identifier: Apache-2.0
//
// Stands for Python, which makes a program's groups for normscope's messages alone. For one file of
// an executable.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

namespace normscope::testing {

// The groups that are still to be made, by name.
inline std::mutex of_own_groups;
inline std::map<std::string, c10::intrusive_ptr<c10d::ProcessGroup>, std::less<>> own_groups;

// The group that will be made next under this name. Any thread may call this.
inline void set_own_group(const std::string& name,
                          const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const std::lock_guard lock(of_own_groups);
  own_groups[name] = group;
}

TORCH_LIBRARY(normscope, library) {
  library.def(
      "make_process_group(str name, str parent, int[] ranks, float seconds, bool devices) -> str",
      [](std::string_view name, std::string_view /*parent*/, at::IntArrayRef /*ranks*/,
         double /*seconds*/, bool /*devices*/) -> std::string {
        const std::lock_guard lock(of_own_groups);
        const auto group = own_groups.extract(own_groups.find(name));
        c10d::register_process_group(group.key(), group.mapped());
        return "";
      });
  library.def("close_process_group(str name) -> ()",
              [](std::string_view name) { c10d::unregister_process_group(std::string(name)); });
}

}  // namespace normscope::testing
