// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "normscope/comm/calls.h"
#include "normscope/core/attributes.h"
#include "normscope/core/peer_memory.h"
#include "normscope/core/stream.h"

namespace normscope NORMSCOPE_EXPORT {

// A group of ranks that can add numbers together. Knows no mathematics beyond the sum.
//
// Every rank of a group makes the same calls in the same order. Only one thread at a time may use a
// communicator, except that any thread may call fail() at any time. After a CommunicationError (or
// a TimeoutError, which is one), every later call of the group throws a CommunicationError with the
// first reason. No wait exceeds the time limit.
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;

  // The transport of the messages: "self", "threads", "shared memory", "gloo", ...
  [[nodiscard]] virtual std::string_view transport() const noexcept = 0;

  // Replaces `values` by their sum over all ranks; every rank gets the same bits. `stream` says
  // which memory holds them. A sum in device memory is queued on the stream, and nothing waits for
  // it; communicators that add on the CPU throw an ArgumentError.
  //
  // If `compares_lengths()`, different lengths are a MismatchError on every rank, which names each
  // rank's length, and the group stays usable. Otherwise the lengths must agree.
  virtual void all_reduce_sum(std::span<double> values, Stream stream = {}) = 0;

  [[nodiscard]] virtual bool compares_lengths() const noexcept = 0;

  // Memory in which kernels of the ranks exchange the sums of so many channels, at least 1, instead
  // of all_reduce_sum(); nullptr if they do not, which is the same on every rank. One kernel that
  // exchanges is to be queued on the stream before the next call; it waits for the one of the call
  // before. Throws the errors of all_reduce_sum().
  [[nodiscard]] virtual const PeerMemory* peer_memory(std::int64_t /*channels*/,
                                                      Stream /*stream*/) {
    return nullptr;
  }

  // Ranks that give the same `color` become a group of their own, ordered by `key`, then by rank.
  // Collective over all ranks.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  // Where the ranks show what they are doing; nullptr if they cannot without messages.
  [[nodiscard]] virtual CallBoard* calls() noexcept { return nullptr; }

  // Marks the group as failed: peers that wait for this rank, now or later, throw at once a
  // CommunicationError with this rank and `reason`. Not collective.
  virtual void fail(std::string_view reason) noexcept = 0;
};

// For communicators that add on the CPU: throws an ArgumentError if the values are elsewhere.
void check_host_memory(const Communicator& communicator, Stream stream);

// The numbers of all ranks, one row after the other: row r is the `own` of rank r. All ranks must
// give equally many. Collective; throws the errors of the sum.
[[nodiscard]] std::vector<double> gather(Communicator& group, const std::vector<double>& own);

// Throws the errors of check_environment(), which this rank alone may have, and notifies the peers.
void check_environment_of(Communicator& group);

// What a rank adds to a sum that gathers: zeros, except for its own row.
[[nodiscard]] std::vector<double> row_to_gather(int rank, int ranks,
                                                const std::vector<double>& own);

// For implementations of split(): this rank's part, as ranks of the whole group in the order of the
// part. The first of them leads. Collective over the whole group.
[[nodiscard]] std::vector<int> members_of_part(Communicator& whole, int color, int key);

// The place of `rank`, which must be among them.
[[nodiscard]] int place_of(int rank, const std::vector<int>& members);

}  // namespace normscope
