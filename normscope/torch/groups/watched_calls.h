// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace normscope::binding {

// Watches calls that may wait, as torch programs expect it, unless the program has set an observer.
// The profiler shows each exchange, and the wait within it, with layer, scope and bytes. A signal
// that reaches Python, such as Ctrl-C, ends a wait of its main thread within 100 ms. A wait as long
// as warning_limit(), which this call reads, is logged once, in the same way as c10's warnings
// (TORCH_CPP_LOG_LEVEL).
void watch_calls();

}  // namespace normscope::binding
