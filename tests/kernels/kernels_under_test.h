// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/kernels.h"
#include "tests/kernels/channel_run.h"

namespace normscope::testing {

// What the suites of this folder run over. Each executable that links them defines its own.
[[nodiscard]] std::vector<const Kernels*> kernels_under_test();

// Those that promise equal bits; the reference promises accuracy only.
[[nodiscard]] std::vector<const Kernels*> kernels_with_equal_bits();

// The kernels of a device, in executables for one. They have ended when they return, as on the
// host.
[[nodiscard]] const DeviceKernels& device_kernels_under_test();

// Lengths around vectors, lanes and tiles; numbers of channels around vectors and blocks of them.
[[nodiscard]] std::vector<Shape> shapes_under_test();

}  // namespace normscope::testing
