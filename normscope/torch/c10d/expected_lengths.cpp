// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/expected_lengths.h"

namespace normscope::binding {
namespace {

// Enough to tell most places in a network apart. Where equal blocks of layers end, the expectation
// is wrong once.
constexpr std::size_t kLengthsBefore = 8;

// Programs whose messages never repeat must not fill the memory.
constexpr std::size_t kMostPlaces = 1 << 14;

}  // namespace

std::optional<std::size_t> ExpectedLengths::next() const {
  const auto found = following_.find(last_);
  if (found == following_.end()) return std::nullopt;
  return found->second;
}

void ExpectedLengths::add(std::size_t length) {
  if (following_.size() == kMostPlaces) following_.clear();
  following_[last_] = length;
  last_.push_back(length);
  if (last_.size() > kLengthsBefore) last_.erase(last_.begin());
}

void ExpectedLengths::clear() {
  last_.clear();
  following_.clear();
}

}  // namespace normscope::binding
