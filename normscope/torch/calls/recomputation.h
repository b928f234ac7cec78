// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

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

// A recomputation, a forward inside a backward, has the scope of the forward that it repeats, even
// if layers have changed their scopes since. Here the changes are counted. A layer remembers the
// number of each of its own (python/normscope/layers/earlier_scopes.py).
//
// Autograd numbers the nodes of each thread in the order in which they are made. The node that runs
// when a forward is recomputed was made in that forward's thread, just before or after it. So each
// thread notes the number of its next node when it changes a scope, and in its first forward after
// a change.

// Notes that the scope of a layer changes now. Returns the number of the change; changes without a
// forward between them have one number.
std::int64_t note_change_of_scope();

// The number of the last change before the forward at hand or, in a recomputation, before the
// forward that it repeats. Throws c10::Error if this was too many changes ago.
[[nodiscard]] std::int64_t change_before_forward();

// Notes a forward.
void note_forward();

// The same for a forward in a compiled graph, which has one scope for each layer. Throws c10::Error
// if it repeats a forward from before the last change.
void note_forward_in_graph(std::string_view layer);

}  // namespace normscope::binding
