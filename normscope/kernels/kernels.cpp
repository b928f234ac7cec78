// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/kernels.h"

#include <algorithm>
#include <string>
#include <vector>

#include "normscope/core/environment.h"
#include "normscope/core/error.h"
#include "normscope/core/text.h"
#include "normscope/kernels/backends.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope {
namespace {

const Kernels* find(std::span<const Kernels* const> among, std::string_view name) {
  const auto found = std::find_if(among.begin(), among.end(),
                                  [&](const Kernels* kernels) { return kernels->name == name; });
  return found == among.end() ? nullptr : *found;
}

const Kernels& named(std::string_view argument, std::string_view name) {
  if (const Kernels* kernels = find(available_kernels(), name)) return *kernels;
  std::string message(argument);
  message += ": expected one of";
  for (const Kernels* kernels : available_kernels()) (message += ' ') += kernels->name;
  ((message += ", got \"") += printable(name)) += '"';
  if (find(built_kernels(), name) != nullptr) message += ", which this machine cannot run";
  throw ArgumentError(message);
}

const Kernels& chosen_or_best() {
  const std::string chosen = chosen_kernels();
  return chosen.empty() ? *available_kernels().back() : named("NORMSCOPE_KERNELS", chosen);
}

}  // namespace

std::span<const Kernels* const> built_kernels() {
  static const Kernels* const kBuilt[] = {
      &reference::kKernels,
      &cpu::kBaselineKernels,
#if defined(__x86_64__)
      &cpu::kAvx2Kernels,
      &cpu::kAvx512Kernels,
#endif
  };
  return kBuilt;
}

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> kAvailable = [] {
    std::vector<const Kernels*> available;
    std::ranges::copy_if(built_kernels(), std::back_inserter(available),
                         [](const Kernels* kernels) { return kernels->can_run(); });
    return available;
  }();
  return kAvailable;
}

const DeviceKernels* device_kernels() noexcept {
#if defined(NORMSCOPE_BUILD_CUDA)
  return &cuda::kKernels;
#else
  return nullptr;
#endif
}

const Kernels& default_kernels() {
  static const Kernels& chosen = chosen_or_best();
  return chosen;
}

void check_all_variables() {
  check_environment();
  static_cast<void>(chosen_or_best());
}

const Kernels& kernels_named(std::string_view name) { return named("kernels", name); }

}  // namespace normscope
