// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/scope.h"

#include <charconv>
#include <optional>
#include <unordered_set>
#include <utility>

#include "normscope/core/error.h"

namespace normscope {
namespace {

constexpr std::string_view kSpellings =
    "slices:K, local, group:K, node, world, ranks:0,1/2,3 or norm_batch:M";

[[noreturn]] void refuse(std::string_view text, std::string_view why) {
  throw ArgumentError("scope: expected " + std::string(kSpellings) + ", got \"" +
                      std::string(text) + "\"" + std::string(why));
}

std::optional<std::int64_t> parse_integer(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The text before and after the first `separator`; nullopt if there is none.
std::pair<std::string_view, std::optional<std::string_view>> cut(std::string_view text,
                                                                 char separator) {
  const std::size_t at = text.find(separator);
  if (at == std::string_view::npos) return {text, std::nullopt};
  return {text.substr(0, at), text.substr(at + 1)};
}

std::int64_t at_least_one(std::string_view name, std::int64_t value) {
  if (value < 1) {
    throw ArgumentError("scope: " + std::string(name) +
                        ": expected an integer of at least 1, got " + std::to_string(value));
  }
  return value;
}

std::vector<std::int64_t> parse_set(std::string_view whole, std::string_view text) {
  std::vector<std::int64_t> set;
  for (std::optional<std::string_view> rest = text; rest;) {
    const auto [item, behind] = cut(*rest, ',');
    const std::optional<std::int64_t> rank = parse_integer(item);
    if (!rank) refuse(whole, ": \"" + std::string(item) + "\" is not a rank");
    set.push_back(*rank);
    rest = behind;
  }
  return set;
}

}  // namespace

Scope::Scope(Kind kind, std::int64_t count, std::vector<std::vector<std::int64_t>> sets)
    : kind_(kind), count_(count), sets_(std::move(sets)) {}

Scope Scope::slices(std::int64_t count) {
  return {Kind::kSlices, at_least_one("slices", count), {}};
}
Scope Scope::local() { return {Kind::kLocal, 0, {}}; }
Scope Scope::group(std::int64_t ranks) { return {Kind::kGroup, at_least_one("group", ranks), {}}; }
Scope Scope::node() { return {Kind::kNode, 0, {}}; }
Scope Scope::world() { return {Kind::kWorld, 0, {}}; }
Scope Scope::norm_batch(std::int64_t samples) {
  return {Kind::kNormBatch, at_least_one("norm_batch", samples), {}};
}

Scope Scope::ranks(std::vector<std::vector<std::int64_t>> sets) {
  if (sets.empty())
    throw ArgumentError("scope: ranks: expected at least one set of ranks, got none");
  std::unordered_set<std::int64_t> seen;
  for (const std::vector<std::int64_t>& set : sets) {
    if (set.empty()) throw ArgumentError("scope: ranks: expected no empty set, got one");
    for (const std::int64_t rank : set) {
      if (rank < 0) {
        throw ArgumentError("scope: ranks: expected ranks of at least 0, got " +
                            std::to_string(rank));
      }
      if (!seen.insert(rank).second) {
        throw ArgumentError("scope: ranks: expected each rank once, got rank " +
                            std::to_string(rank) + " twice");
      }
    }
  }
  return {Kind::kRanks, 0, std::move(sets)};
}

Scope Scope::parse(std::string_view text) {
  const auto [name, value] = cut(text, ':');
  if (!value) {
    if (name == "local") return local();
    if (name == "node") return node();
    if (name == "world") return world();
    refuse(text, "");
  }
  if (name == "ranks") {
    std::vector<std::vector<std::int64_t>> sets;
    for (std::optional<std::string_view> rest = value; rest;) {
      const auto [item, behind] = cut(*rest, '/');
      sets.push_back(parse_set(text, item));
      rest = behind;
    }
    return ranks(std::move(sets));
  }
  const bool takes_count = name == "slices" || name == "group" || name == "norm_batch";
  if (!takes_count) refuse(text, "");
  const std::optional<std::int64_t> count = parse_integer(*value);
  if (!count) refuse(text, ": \"" + std::string(*value) + "\" is not an integer");
  if (name == "slices") return slices(*count);
  if (name == "group") return group(*count);
  return norm_batch(*count);
}

std::string Scope::str() const {
  switch (kind_) {
    case Kind::kSlices: return "slices:" + std::to_string(count_);
    case Kind::kLocal: return "local";
    case Kind::kGroup: return "group:" + std::to_string(count_);
    case Kind::kNode: return "node";
    case Kind::kWorld: return "world";
    case Kind::kNormBatch: return "norm_batch:" + std::to_string(count_);
    case Kind::kRanks: break;
  }
  std::string text = "ranks:";
  for (std::size_t i = 0; i < sets_.size(); ++i) {
    if (i > 0) text += '/';
    for (std::size_t j = 0; j < sets_[i].size(); ++j) {
      if (j > 0) text += ',';
      text += std::to_string(sets_[i][j]);
    }
  }
  return text;
}

}  // namespace normscope
