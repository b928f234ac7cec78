// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// Which ranks share statistics. A plain value: it parses, prints and compares, and refers to no
// process group.
//
//   slices:K        K slices of this rank's batch, each on its own
//   local           this rank
//   group:K         K consecutive ranks
//   node            the ranks of one host
//   world           all ranks
//   ranks:0,1/2,3   the named sets of ranks
//   norm_batch:M    as many ranks or slices as bring the norm batch to M samples
class Scope {
 public:
  enum class Kind { kSlices, kLocal, kGroup, kNode, kWorld, kRanks, kNormBatch };

  [[nodiscard]] static Scope slices(std::int64_t count);  // count >= 1
  [[nodiscard]] static Scope local();
  [[nodiscard]] static Scope group(std::int64_t ranks);  // ranks >= 1
  [[nodiscard]] static Scope node();
  [[nodiscard]] static Scope world();
  [[nodiscard]] static Scope ranks(std::vector<std::vector<std::int64_t>> sets);
  [[nodiscard]] static Scope norm_batch(std::int64_t samples);  // samples >= 1

  // The inverse of str(). Throws ArgumentError, whose text lists the valid spellings.
  [[nodiscard]] static Scope parse(std::string_view text);

  [[nodiscard]] std::string str() const;
  [[nodiscard]] Kind kind() const noexcept { return kind_; }

  // Whether a rank shares statistics with no other rank, however many ranks there are.
  [[nodiscard]] bool is_of_one_rank() const noexcept {
    return kind_ == Kind::kLocal || kind_ == Kind::kSlices;
  }

  // The K or M of slices:K, group:K and norm_batch:M; 0 for other scopes.
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }

  // The sets of ranks:...; empty for other scopes.
  [[nodiscard]] const std::vector<std::vector<std::int64_t>>& sets() const noexcept {
    return sets_;
  }

  bool operator==(const Scope&) const = default;

 private:
  Scope(Kind kind, std::int64_t count, std::vector<std::vector<std::int64_t>> sets);

  Kind kind_;
  std::int64_t count_;
  std::vector<std::vector<std::int64_t>> sets_;
};

}  // namespace normscope
