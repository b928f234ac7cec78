// SPDX-License-Identifier: Apache-2.0
#pragma once

// Marks a namespace in a header whose declarations programs may use when they link the shared
// library. All other symbols of the library are hidden.
#define NORMSCOPE_EXPORT __attribute__((visibility("default")))
