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
  const auto found = following_.find(hash_of_last());
  if (found == following_.end()) return std::nullopt;
  return found->second;
}

void ExpectedLengths::add(std::size_t length) {
  if (following_.size() == kMostPlaces) following_.clear();
  following_[hash_of_last()] = length;
  last_.push_back(length);
  if (last_.size() > kLengthsBefore) last_.pop_front();
}

void ExpectedLengths::clear() {
  last_.clear();
  following_.clear();
}

// FNV-1a of whole numbers. If two places collide, the expectation is wrong, equally on all ranks.
std::uint64_t ExpectedLengths::hash_of_last() const {
  std::uint64_t hash = 14695981039346656037U;
  for (const std::size_t length : last_) hash = (hash ^ length) * 1099511628211U;
  return hash;
}

}  // namespace normscope::binding
