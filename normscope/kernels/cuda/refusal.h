// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace normscope::cuda {

// Why the kernels cannot run on a device, where the runtime fails to find them. Versions are those
// of cudaDriverGetVersion and cudaRuntimeGetVersion; the driver's is 0 if there is none.
struct Refusal {
  bool has_no_code = false;  // the error is that there is no code for the device's architecture
  // Its text. GCC warns of initializers that leave out a member without a default.
  std::string_view error = {};  // NOLINT(readability-redundant-member-init)
  int driver = 0;
  int runtime = 0;

  [[nodiscard]] std::string text() const {
    if (has_no_code) {
      return "it has none for this device's architecture (NORMSCOPE_CUDA_ARCHITECTURES)";
    }
    if (driver == 0) return "there is no driver";
    if (driver < runtime) {
      return "the driver is for CUDA " + version(driver) + ", which is older than " +
             version(runtime) + ", with which normscope was built";
    }
    return std::string(error);
  }

 private:
  // From 1000 * major + 10 * minor.
  static std::string version(int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  }
};

}  // namespace normscope::cuda
