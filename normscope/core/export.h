// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stands at a header's namespace where programs that link the shared library may use what follows.
// Everything else is hidden in it.
#define NORMSCOPE_EXPORT __attribute__((visibility("default")))
