// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/debug_wrapper.h"

#include <string_view>
#include <typeinfo>

namespace normscope::binding {

c10::intrusive_ptr<c10d::Backend> without_wrapper(
    const c10::intrusive_ptr<c10d::Backend>& backend) {
  const c10d::Backend& found = *backend;
  // By name: a torch without Gloo does not define the type.
  if (std::string_view(typeid(found).name()) != "N4c10d19ProcessGroupWrapperE") return backend;
  return static_cast<const c10d::ProcessGroupWrapper&>(found).getWrappedPg();
}

}  // namespace normscope::binding
