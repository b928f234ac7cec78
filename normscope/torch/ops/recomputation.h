// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace normscope::binding {

// Whether the batch of this forward is already in the running statistics: inside a backward it
// repeats an earlier forward, as activation checkpointing does.
[[nodiscard]] bool batch_was_counted();

// Sets whether forwards of this thread inside a backward update running statistics, because those
// that they repeat have not. Returns the previous setting.
bool set_updates_in_backward(bool wanted);

}  // namespace normscope::binding
