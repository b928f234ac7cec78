// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace normscope::binding {

// Whether the code at hand runs inside a backward, where a forward repeats an earlier one, as in
// activation checkpointing.
[[nodiscard]] bool runs_inside_a_backward();

// Whether the batch of this forward is already in the running statistics, because it repeats an
// earlier forward.
[[nodiscard]] bool batch_was_counted();

// Sets whether forwards of this thread inside a backward update running statistics, because those
// that they repeat have not. Returns the previous setting.
bool set_updates_in_backward(bool wanted);

}  // namespace normscope::binding
