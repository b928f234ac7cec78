// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/calls.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr std::size_t kWords = 12;
constexpr std::size_t kTextBytes = kWords * sizeof(std::uint64_t);

// The same clock for all processes of a host.
std::int64_t now() noexcept {
  return std::chrono::duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

using CallText = FixedText<kTextBytes>;

// Since a moment that another process has noted; it may have noted anything.
nanoseconds time_since(std::int64_t moment) {
  std::int64_t age = 0;
  const bool overflows = __builtin_sub_overflow(now(), moment, &age);
  return nanoseconds(overflows || age < 0 ? 0 : age);
}

CallState valid(CallState state) { return state <= CallState::kAlone ? state : CallState::kNone; }

std::string phrase_of(const RankCall& call, bool is_plural) {
  switch (call.state) {
    case CallState::kWaits: return (is_plural ? "wait in " : "waits in ") + call.name;
    case CallState::kFinished: return "last finished " + call.name;
    case CallState::kFailed: return "failed in " + call.name;
    case CallState::kAlone: return "last ran " + call.name + " without peers";
    case CallState::kNone: break;
  }
  return is_plural ? "have not made any call yet" : "has not made any call yet";
}

bool is_past(const RankCall& call) {
  return call.state != CallState::kNone && call.state != CallState::kWaits;
}

constexpr std::string_view kNoName = "a layer without a name";

constinit std::atomic<CallObserver*> observer_in_use = nullptr;

}  // namespace

void observe_calls(CallObserver* observer) noexcept { observer_in_use = observer; }

CallObserver* call_observer() noexcept { return observer_in_use.load(std::memory_order_acquire); }

std::string text_of_layer(std::string_view layer) {
  constexpr std::size_t kLongest = 500;
  if (layer.empty()) return std::string(kNoName);
  std::string name = printable(layer);
  if (name.size() <= kLongest) return name;
  return "..." + std::string(shortened(name, kLongest, Keep::kEnd));
}

std::string who_is_where(const std::vector<RankCall>& calls, const std::vector<int>& ranks) {
  const auto has_called = [](const RankCall& call) { return call.state != CallState::kNone; };
  if (std::ranges::none_of(calls, has_called)) return "";
  std::vector<std::size_t> left(calls.size());
  std::iota(left.begin(), left.end(), 0U);
  // The waiting ranks come last: first those that they wait for.
  std::ranges::stable_partition(
      left, [&](std::size_t rank) { return calls[rank].state != CallState::kWaits; });
  std::string text;
  while (!left.empty()) {
    const RankCall& call = calls[left.front()];
    std::vector<int> alike;
    std::erase_if(left, [&](std::size_t rank) {
      const bool is_alike = calls[rank].state == call.state && calls[rank].name == call.name;
      if (is_alike) alike.push_back(ranks[rank]);
      return is_alike;
    });
    if (!text.empty()) text += "; ";
    text += list_of_ranks(alike) + ' ' + phrase_of(call, alike.size() > 1);
    if (is_past(call)) text += ", " + in_seconds(call.age) + " ago";
  }
  return text;
}

std::string who_is_where_if_known(std::vector<RankCall> calls, const std::vector<int>& ranks) {
  const auto is_unknown = [](const RankCall& call) { return call.state == CallState::kNone; };
  std::vector<int> known;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (!is_unknown(calls[i])) known.push_back(ranks[i]);
  }
  std::erase_if(calls, is_unknown);
  return known.size() > 1 ? who_is_where(calls, known) : "";
}

// A sequence lock with one writer: `sequence` is odd during a write. Fields are stored with release
// and loaded with acquire: a reader that sees a new field then also sees the odd number or a later
// one. (Fences would do, but the thread sanitizer does not support them.)
struct alignas(kCacheLine) CallBoard::Line {
  std::atomic<std::uint64_t> sequence = 0;
  std::atomic<std::int64_t> since = 0;
  std::atomic<std::uint64_t> number = 0;
  std::atomic<CallState> state = CallState::kNone;
  std::array<std::atomic<std::uint64_t>, kWords> text = {};

  void put(const CallText& call) noexcept {
    for (std::size_t i = 0; i < kWords; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, call.bytes().data() + i * sizeof(word), sizeof(word));
      text[i].store(word, std::memory_order_release);
    }
  }

  template <class Write>
  void write(const Write& write_fields) noexcept {
    std::uint64_t even = sequence.load(std::memory_order_relaxed);
    if (even % 2 != 0 || !sequence.compare_exchange_strong(even, even + 1)) return;
    write_fields();
    sequence.store(even + 2, std::memory_order_release);
  }
};

std::size_t CallBoard::memory_bytes(int ranks) noexcept {
  return static_cast<std::size_t>(ranks) * sizeof(Line);
}

void CallBoard::initialize(void* memory, int ranks) noexcept {
  for (int rank = 0; rank < ranks; ++rank) new (static_cast<Line*>(memory) + rank) Line;
}

CallBoard::CallBoard(std::shared_ptr<void> lines, int rank, int ranks)
    : lines_(std::move(lines)), place_(rank), places_(static_cast<std::size_t>(ranks)) {
  std::iota(places_.begin(), places_.end(), 0);
}

CallBoard CallBoard::part(const std::vector<int>& members) const {
  CallBoard part = *this;
  part.places_.clear();
  for (const int member : members) {
    part.places_.push_back(places_[static_cast<std::size_t>(member)]);
  }
  return part;
}

void CallBoard::begin(const CallName& name, CallState state) noexcept {
  CallText text;
  text.put(name.what);
  text.put(" of ");
  text.put(name.layer.empty() ? kNoName : name.layer, Keep::kEnd);
  Line& own = line(place_);
  own.write([&] {
    own.put(text);
    own.state.store(state, std::memory_order_release);
    own.number.store(own.number.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    own.since.store(now(), std::memory_order_release);
  });
}

void CallBoard::end(CallState state) noexcept {
  Line& own = line(place_);
  own.write([&] {
    own.state.store(state, std::memory_order_release);
    own.since.store(now(), std::memory_order_release);
  });
}

void CallBoard::show(int rank, const RankCall& call) noexcept {
  CallText text;
  text.put(call.name);
  Line& other = line(places_[static_cast<std::size_t>(rank)]);
  other.write([&] {
    other.put(text);
    other.state.store(valid(call.state), std::memory_order_release);
    other.number.store(call.number, std::memory_order_release);
    other.since.store(now() - call.age.count(), std::memory_order_release);
  });
}

std::vector<RankCall> CallBoard::read() const {
  std::vector<RankCall> calls;
  calls.reserve(places_.size());
  for (const int place : places_) calls.push_back(read(place));
  return calls;
}

RankCall CallBoard::read_own() const { return read(place_); }

CallBoard::Line& CallBoard::line(int place) const noexcept {
  return static_cast<Line*>(lines_.get())[place];
}

RankCall CallBoard::read(int place) const {
  // Bounded: a rank that died during a write leaves the number odd forever.
  constexpr int kTries = 1000;
  const Line& line = this->line(place);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t before = line.sequence.load(std::memory_order_acquire);
    std::array<std::uint64_t, kWords> words = {};
    for (std::size_t word = 0; word < kWords; ++word) {
      words[word] = line.text[word].load(std::memory_order_acquire);
    }
    RankCall call{.state = valid(line.state.load(std::memory_order_acquire)),
                  .name = {},
                  .age = time_since(line.since.load(std::memory_order_acquire)),
                  .number = line.number.load(std::memory_order_acquire)};
    if (before % 2 != 0 || line.sequence.load(std::memory_order_relaxed) != before) continue;
    char text[kTextBytes];
    std::memcpy(text, words.data(), kTextBytes);
    call.name = printable({text, strnlen(text, kTextBytes)});
    return call;
  }
  return {};
}

}  // namespace normscope
