// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/slot_communicator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "normscope/comm/message_length.h"
#include "normscope/core/error.h"

namespace normscope {

void SlotCommunicator::all_reduce_sum(std::span<double> values, Stream stream) {
  check_host_memory(*this, stream);
  group_.throw_if_forked();
  group_.throw_if_failed();
  const auto longest = static_cast<std::size_t>(group_.options().slot_length);
  std::size_t begin = 0;
  do {
    const auto piece = values.subspan(begin, std::min(values.size() - begin, longest));
    group_.begin_epoch(values.size());
    std::ranges::copy(piece, group_.slot(rank()));
    group_.announce();
    group_.wait_for(group_.all());
    if (group_.lengths_differ()) throw_lengths_differ();
    group_.add_slots(piece);
    begin += piece.size();
  } while (begin < values.size());
}

void SlotCommunicator::throw_lengths_differ() const {
  std::vector<double> lengths;
  for (int rank = 0; rank < size(); ++rank) {
    lengths.push_back(static_cast<double>(group_.length(rank)));
  }
  throw MismatchError(group_.describe(text_of_different_lengths(lengths)));
}

}  // namespace normscope
