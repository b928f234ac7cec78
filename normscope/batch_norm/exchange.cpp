// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/exchange.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/core/environment.h"
#include "normscope/core/error.h"
#include "normscope/core/hash.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

std::string describe(const CallLabel& label) {
  const std::string layer = text_of_layer(label.layer);
  if (label.direction == Direction::kAgreement) {
    return "first use of scope " + std::string(label.scope) + " by " + layer;
  }
  if (label.direction == Direction::kParameters) {
    return layer + " of " + std::to_string(label.channels) + " numbers";
  }
  std::string text = std::string(name_of(label.direction)) + " of " + layer;
  text += " (" + std::to_string(label.channels) + " channels, scope " + std::string(label.scope);
  if (label.kernels != kOwnKernels) text += ", kernels of " + std::string(label.kernels);
  if (label.direction == Direction::kForward && label.backward == BackwardNeeded::kNo) {
    text += ", nothing needs a gradient";
  }
  return text + ")";
}

std::string with_numbers(double eps, double momentum) {
  return " with eps " + decimal(eps) + " and momentum " +
         (std::isnan(momentum) ? "None" : decimal(momentum));
}

std::string_view bytes_of(const double& number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

// Longer texts are cut, in bytes. This bounds the size of the message for many ranks.
constexpr std::size_t kLongestText = 4096;

// The texts of all ranks, by rank. Each byte travels as a number, which any transport that adds
// doubles can carry. Collective.
std::vector<std::string> gather_texts(Communicator& group, std::string_view own) {
  own = shortened(own, kLongestText);
  const auto own_length = static_cast<double>(own.size());
  const auto longest = static_cast<std::size_t>(std::ranges::max(gather(group, {own_length})));
  std::vector<double> bytes(longest);
  std::ranges::transform(own, bytes.begin(),
                         [](char byte) { return static_cast<unsigned char>(byte); });
  const std::vector<double> of_ranks = gather(group, bytes);
  std::vector<std::string> texts(static_cast<std::size_t>(group.size()));
  for (std::size_t i = 0; i < of_ranks.size(); ++i) {
    const auto byte = static_cast<unsigned char>(of_ranks[i]);
    if (byte != 0) texts[i / longest] += static_cast<char>(byte);
  }
  std::ranges::transform(texts, texts.begin(), as_utf8);
  return texts;
}

bool are_equal(const std::vector<std::string>& texts) {
  return std::ranges::count(texts, texts[0]) == std::ssize(texts);
}

struct AtomicCounters {
  std::atomic<std::int64_t> calls = 0;
  std::atomic<std::int64_t> bytes = 0;
  std::atomic<std::int64_t> nanoseconds = 0;
};

constinit AtomicCounters counters;

// Counts a call, and shows it to the peers and to the observer during its own lifetime.
class ShownCall {
 public:
  ShownCall(Communicator& communicator, const CallLabel& label, std::size_t bytes)
      : board_(communicator.calls()), observer_(call_observer()) {
    counters.calls += 1;
    counters.bytes += static_cast<std::int64_t>(bytes);
    const CallName name{.what = name_of(label.direction), .layer = label.layer};
    if (board_ != nullptr) board_->begin(name);
    if (observer_ != nullptr) observer_->begin_call(name, label.scope, bytes);
  }
  ShownCall(const ShownCall&) = delete;
  ShownCall& operator=(const ShownCall&) = delete;
  ~ShownCall() {
    if (board_ != nullptr) board_->end(state_);
    if (observer_ != nullptr) observer_->end_call();
    const auto elapsed = std::chrono::steady_clock::now() - begin_;
    counters.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }

  void finish() noexcept { state_ = CallState::kFinished; }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  CallBoard* board_;
  CallObserver* observer_;
  CallState state_ = CallState::kFailed;
};

}  // namespace

std::string_view name_of(Direction direction) noexcept {
  switch (direction) {
    case Direction::kForward: return "forward";
    case Direction::kBackward: return "backward";
    case Direction::kDoubleBackward: return "double backward";
    case Direction::kParameters: return "parameters";
    case Direction::kAgreement: break;
  }
  return "agreement";
}

Exchange::Exchange(std::unique_ptr<Communicator> communicator, WhenAlone when_alone,
                   std::vector<int> names)
    : communicator_(std::move(communicator)), when_alone_(when_alone), names_(std::move(names)) {
  if (!communicator_) throw ArgumentError("communicator: expected one, got a null pointer");
  check_environment_of(*communicator_);
  checks_every_call_ = checks_every_call();
}

void Exchange::all_reduce(const CallLabel& label, std::span<double> message, Stream stream) {
  const std::span<double> header = message.last(kHeaderSize);
  compare_and_send(label, header[kCount], message.size_bytes(), communicator_->compares_lengths(),
                   [&](const Header& own, int /*call*/) {
                     std::ranges::copy(own.fields, header.begin());
                     communicator_->all_reduce_sum(message, stream);
                     compare(header);
                   });
}

void Exchange::all_reduce_on_device(const CallLabel& label, double count,
                                    const MessageView& message, Stream stream,
                                    const std::function<void(const DeviceMessage&)>& write) {
  stream.memory = Memory::kDevice;
  const std::span numbers(message.data,
                          static_cast<std::size_t>(limbs_size(message.channels) + kHeaderSize));
  compare_and_send(label, count, numbers.size_bytes(), communicator_->compares_lengths(),
                   [&](const Header& own, int call) {
                     const PeerMemory* const peers =
                         message.channels > 0 ? communicator_->peer_memory(message.channels, stream)
                                              : nullptr;
                     write({own, call, peers});
                     if (peers == nullptr) communicator_->all_reduce_sum(numbers, stream);
                   });
}

int Exchange::exchange_on_device(const CallLabel& label, double count, std::size_t bytes,
                                 const std::function<void(const Header&)>& send) {
  make_checks();
  return compare_and_send(label, count, bytes, /*compares_lengths=*/false,
                          [&](const Header& own, int /*call*/) { send(own); });
}

void Exchange::make_checks() {
  while (!checks_.empty()) {
    const std::function<bool()> check = std::move(checks_.front());
    checks_.pop_front();
    if (check()) continue;
    checks_.push_front(check);  // later ones have not arrived either
    return;
  }
}

std::vector<double> Exchange::gather(const CallLabel& label, const std::vector<double>& own) {
  std::vector<double> message = row_to_gather(communicator_->rank(), communicator_->size(), own);
  message.resize(message.size() + kHeaderSize);
  all_reduce(label, message, {});
  message.resize(message.size() - kHeaderSize);
  return message;
}

// Calls send(this rank's header, the label's number), and compares the headers before that if
// necessary. Errors say what this rank was doing. Returns the number.
template <class Send>
int Exchange::compare_and_send(const CallLabel& label, double count, std::size_t bytes,
                               bool compares_lengths, const Send& send) {
  // An agreement is about the scope, whichever layer needs it first: other parts of the group may
  // run other layers.
  const bool compares_layers = label.direction != Direction::kAgreement;
  Hash hash;
  if (compares_layers) hash.add(label.layer);
  hash.add(label.scope);
  hash.add(label.kernels);
  hash.add(name_of(label.direction));
  hash.add(std::to_string(label.channels));
  hash.add(label.dtype);
  const std::uint64_t label_hash = hash.value();
  // A layer without a name is identified by its position in the sequence of calls.
  if (compares_layers && label.layer.empty()) hash.add(std::to_string(calls_));
  calls_ += 1;
  // Not part of label_hash: a schedule may change these in every step.
  hash.add(bytes_of(label.eps));
  hash.add(bytes_of(label.momentum));

  const auto h = static_cast<double>(hash.low_bits(hash_bits(communicator_->size())));
  const double needs_backward = label.backward == BackwardNeeded::kYes ? 1.0 : 0.0;
  const Header header{{count, h, h * h, needs_backward}};

  ShownCall shown(*communicator_, label, bytes);
  const auto seen = seen_.find(label_hash);
  const bool is_new = seen == seen_.end();
  const int number = is_new ? static_cast<int>(labels_.size()) + 1 : seen->second;
  try {
    try {
      if (!compares_lengths && (is_new || checks_every_call_)) {
        Header ahead = header;
        communicator_->all_reduce_sum(ahead.fields);
        compare(ahead.fields);
      }
      send(header, number);
    } catch (const MismatchError&) {
      throw_mismatch(label);
    }
  } catch (const TimeoutError& error) {
    throw TimeoutError(describe_here(label) + ": " + error.what());
  } catch (const CommunicationError& error) {
    throw CommunicationError(describe_here(label) + ": " + error.what());
  }
  shown.finish();
  // Only after the exchange: a label must be new to all ranks or to none.
  if (is_new) {
    labels_.push_back(describe(label));
    seen_[label_hash] = number;
  }
  return number;
}

const std::string& Exchange::reported_call(int number) const {
  return labels_.at(static_cast<std::size_t>(number) - 1);
}

// Throws if the totals of the header show that the ranks made different calls.
void Exchange::compare(std::span<const double> totals) const {
  if (!ranks_agree(totals.data(), communicator_->size())) throw MismatchError("");
}

int Exchange::name_of_rank(std::size_t rank) const noexcept {
  return names_.empty() ? static_cast<int>(rank) : names_[rank];
}

// The label, and the names of the communicator's ranks.
std::string Exchange::describe_here(const CallLabel& label) const {
  std::string text = describe(label);
  for (std::size_t rank = 0; rank < names_.size(); ++rank) {
    text += (rank == 0 ? " among ranks " : ", ") + std::to_string(names_[rank]);
  }
  if (!names_.empty()) text += " (here 0 to " + std::to_string(names_.size() - 1) + ")";
  return text;
}

// Every rank now knows that the ranks disagree. They send each other what each of them was doing.
void Exchange::throw_mismatch(const CallLabel& label) {
  const auto gather = [this](std::string_view own) { return gather_texts(*communicator_, own); };
  std::vector<std::string> texts = gather(describe(label));
  // Rarer causes are shown only if nothing else differs.
  if (are_equal(texts)) {
    std::vector<std::string> details = gather(" with " + std::string(label.dtype) + " input");
    if (are_equal(details)) details = gather(with_numbers(label.eps, label.momentum));
    for (std::size_t rank = 0; rank < texts.size(); ++rank) texts[rank] += details[rank];
  }
  std::string message = "the ranks of a scope made different calls:";
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    message += "\n  rank " + std::to_string(name_of_rank(rank)) + ": " + texts[rank];
  }
  message +=
      "\nEvery rank must run the same layers in the same order, with a backward on all of them or "
      "on none.";
  throw MismatchError(message);
}

CommunicationCounters communication_counters() noexcept {
  constexpr double kSecondsPerNanosecond = 1e-9;
  return {counters.calls, counters.bytes,
          static_cast<double>(counters.nanoseconds) * kSecondsPerNanosecond};
}

}  // namespace normscope
