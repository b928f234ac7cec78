// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/c10d/communicator.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <unistd.h>

#include "normscope/comm/call_observer.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/message_length.h"
#include "normscope/comm/processes.h"
#include "normscope/comm/shared_memory_communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/comm/thread_communicator.h"
#include "normscope/core/error.h"
#include "normscope/torch/c10d/periodic_thread.h"
#include "normscope/torch/c10d/torch_nccl.h"
#include "normscope/torch/errors.h"

namespace normscope::binding {
namespace {

// The float64 numbers of the frame of an unexpected message: 32 KiB, enough for 409 channels. Over
// Gloo, a second all-reduce costs more than the padding of a short message.
constexpr std::size_t kUsualFrame = 4096;

// Frames have a multiple of 1 KiB, so that a message that differs a little from the expected one
// still fits, and at most 2 MiB: expecting a long message in vain must not cost much.
constexpr std::size_t kFrameStep = 128;
constexpr std::size_t kLongestFrame = 1 << 18;

std::size_t frame_for(std::optional<std::size_t> expected) {
  if (!expected) return kUsualFrame;
  const std::size_t needed = kLengthFields + *expected;
  return std::min((needed + kFrameStep - 1) / kFrameStep * kFrameStep, kLongestFrame);
}

// Backends have no exception of their own for a timeout.
bool is_of_time_out(std::string_view text) {
  return text.find("imed out") != std::string_view::npos ||
         text.find("imeout") != std::string_view::npos;
}

// Carries what an observer threw to end a wait.
struct Interruption : std::exception {
  explicit Interruption(std::exception_ptr thrown) : cause(std::move(thrown)) {}
  std::exception_ptr cause;
};

at::Tensor tensor_of_current_device(c10::DeviceType type, std::span<double> values) {
  const c10::Device device = c10::impl::VirtualGuardImpl(type).getDevice();
  return at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())},
                       at::TensorOptions().dtype(at::kDouble).device(device));
}

}  // namespace

bool serves(const c10d::ProcessGroup& group, c10::DeviceType device) {
  return std::ranges::any_of(group.getDeviceTypes(),
                             [&](const c10::Device& served) { return served.type() == device; });
}

c10::DeviceType carrier_of(const c10d::ProcessGroup& group, c10::DeviceType device) {
  const bool is_host = !serves(group, device) && serves(group, c10::DeviceType::CPU);
  return is_host ? c10::DeviceType::CPU : device;
}

C10dCommunicator::C10dCommunicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                   const Placement& placement,
                                   std::optional<std::chrono::milliseconds> time_limit,
                                   std::shared_ptr<OwnGroup> own)
    : own_(std::move(own)),
      whole_(group),
      group_(group),
      placement_(placement),
      carrier_(carrier_of(*group, placement.device)),
      host_device_(serves(*group, c10::DeviceType::CPU) ? c10::DeviceType::CPU : placement.device),
      rank_(group->getRank()),
      size_(group->getSize()),
      transport_(group->getBackend(carrier_)->getBackendName()),
      sums_on_device_(transport_ == "nccl") {
  if (time_limit) options_.timeout = *time_limit;
  // NCCL then sums on the caller's stream. With a stream of its own, the two would wait for each
  // other.
  if (sums_on_device_) options_.asyncOp = false;
}

C10dCommunicator::C10dCommunicator(Group part, std::shared_ptr<OwnGroup> own,
                                   const std::vector<int>& members, const C10dCommunicator& whole)
    : C10dCommunicator(part, whole.placement_, std::nullopt, std::move(own)) {
  if (!own_) part_ = std::move(part);
  rank_ = place_of(whole.rank_, members);
  whole_ = whole.whole_;
  options_ = whole.options_;
  if (whole.board_) board_ = whole.board_->part(members);
  publisher_ = whole.publisher_;
  kernels_of_peers_ = whole.kernels_of_peers_;
}

C10dCommunicator::~C10dCommunicator() {
  try {
    if (part_) end_part();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Nobody is left to report this to.
  }
}

// NCCL's shutdown() waits for operations in progress. Peers may never reach it if something has
// failed, or if the program ends without destroy_process_group().
void C10dCommunicator::end_part() {
  if (state_.failure.empty() && whole_.expired()) {
    part_->shutdown();
  } else {
    part_->abort();
  }
}

void C10dCommunicator::all_reduce_sum(std::span<double> values, Stream stream) {
  if (stream.memory == Memory::kHost) {
    all_reduce_in_frame(values);
    return;
  }
  const at::Tensor sum = tensor_of_current_device(placement_.device, values);
  if (sums_on_device_) {
    sum_on_device(sum);
  } else {
    const at::Tensor of_host =
        sum.to(c10::DeviceType::CPU, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    all_reduce_in_frame({of_host.mutable_data_ptr<double>(), values.size()});
    sum.copy_(of_host);
  }
}

const PeerMemory* C10dCommunicator::peer_memory(std::int64_t channels, Stream stream) {
  const auto current = [&] { return c10::impl::VirtualGuardImpl(placement_.device).getDevice(); };
  if (!peer_devices_ || !peer_devices_->exchange(channels, current())) return nullptr;
  const PeerMemory* memory = nullptr;
  run([&]() -> c10::intrusive_ptr<c10d::Work> {
    memory = &peer_devices_->memory_for_next(stream);
    return nullptr;
  });
  return memory;
}

void C10dCommunicator::all_reduce_in_frame(std::span<double> values) {
  const auto length = static_cast<double>(values.size());
  // The frame starts with the length of the whole message.
  const std::size_t frame_length = frame_for(lengths_.next());
  const std::span first = values.first(std::min(values.size(), frame_length - kLengthFields));

  // A separate tensor, because a backend may keep a reference to it after a failed operation.
  const at::Tensor frame = at::empty({static_cast<std::int64_t>(frame_length)}, at::kDouble);
  auto* const fields = frame.mutable_data_ptr<double>();
  write_length({fields, kLengthFields}, length);
  double* const end = std::ranges::copy(first, fields + kLengthFields).out;
  std::fill(end, fields + frame_length, 0.0);

  const at::Tensor sum = all_reduce_of_host(frame);
  const auto* const sums = sum.const_data_ptr<double>();
  if (!lengths_agree({sums, kLengthFields}, length, size_)) throw_lengths_differ(length);
  lengths_.add(values.size());
  std::copy_n(sums + kLengthFields, first.size(), first.begin());
  if (first.size() < values.size()) all_reduce(values.subspan(first.size()));
}

void C10dCommunicator::all_reduce(std::span<double> values) {
  const at::Tensor of_host = at::empty({static_cast<std::int64_t>(values.size())}, at::kDouble);
  std::ranges::copy(values, of_host.mutable_data_ptr<double>());
  const at::Tensor sum = all_reduce_of_host(of_host);
  std::copy_n(sum.const_data_ptr<double>(), values.size(), values.begin());
}

// The sum of a tensor in host memory, in host memory. If the group serves devices only, the message
// goes through the device that the group is bound to, otherwise through the current one.
at::Tensor C10dCommunicator::all_reduce_of_host(const at::Tensor& of_host) {
  if (host_device_ == c10::DeviceType::CPU) {
    all_reduce(of_host);
    return of_host;
  }
  const Group group = whole_.lock();
  const auto bound = group ? group->getBoundDeviceId() : std::nullopt;
  const c10::OptionalDeviceGuard guard(bound && bound->type() == host_device_ ? bound
                                                                              : std::nullopt);
  const at::Tensor sum = of_host.to(host_device_);
  all_reduce(sum);
  return sum.cpu();
}

void C10dCommunicator::all_reduce(const at::Tensor& sum) {
  std::vector<at::Tensor> tensors = {sum};
  run([&] { return backend_for(sum)->allreduce(tensors, options_); });
}

void C10dCommunicator::sum_on_device(const at::Tensor& sum) {
  const auto queue = [&](const TorchNccl& nccl) { nccl.all_reduce_sum(sum, options_.timeout); };
  if (!queue_by_nccl(sum, queue)) all_reduce(sum);
}

void C10dCommunicator::all_gather_on_device(at::Tensor& all, const at::Tensor& own) {
  const auto queue = [&](const TorchNccl& nccl) { nccl.all_gather(all, own, options_.timeout); };
  if (queue_by_nccl(own, queue)) return;
  c10d::AllgatherOptions options;
  options.timeout = options_.timeout;
  options.asyncOp = options_.asyncOp;
  at::Tensor given = own;
  run([&] { return backend_for(own)->_allgather_base(all, given, options); });
}

// Calls queue(nccl) if that is possible. Only if somebody watches the peers: torch does not know of
// the message. Work that is being captured has no time limit: the program decides when it runs.
template <class Queue>
bool C10dCommunicator::queue_by_nccl(const at::Tensor& message, const Queue& queue) {
  if (!peers_.joinable() || !TorchNccl::takes(message)) return false;
  bool is_queued = false;
  run([&]() -> c10::intrusive_ptr<c10d::Work> {
    const c10::DeviceGuard guard(message.device());
    const auto nccl = TorchNccl::of(*backend_for(message), message.device());
    if (nccl && nccl->is_capturing()) {
      queue(*nccl);
    } else if (nccl) {
      queued_.add(message.device(), [&] { queue(*nccl); });
    }
    is_queued = nccl.has_value();
    return nullptr;
  });
  return is_queued;
}

// Waits for what start() starts. It returns nullptr if there is nothing to wait for.
template <class Start>
void C10dCommunicator::run(const Start& start) {
  {
    const std::lock_guard lock(state_.mutex);
    if (!state_.failure.empty()) throw CommunicationError(state_.failure);
    state_.is_busy = true;
  }
  const auto end = c10::make_scope_exit([this] {
    const std::lock_guard lock(state_.mutex);
    state_.is_busy = false;
  });
  try {
    if (const auto work = start()) wait_for(*work);
  } catch (const Interruption& interruption) {
    const std::string reason = "it was interrupted while it waited";
    note_failure(describe(reason));
    if (own_) own_->abandon(reason);
    std::rethrow_exception(interruption.cause);
  } catch (const std::exception& error) {
    const std::string what(what_of(error));
    const std::string text =
        describe(own_ ? own_->fail_after(what, [this] { return where_ranks_are(); }) : what);
    note_failure(text);
    if (is_of_time_out(what)) throw TimeoutError(text);
    throw CommunicationError(text);
  }
}

// The first failure is kept.
void C10dCommunicator::note_failure(const std::string& text) {
  const std::lock_guard lock(state_.mutex);
  if (state_.failure.empty()) state_.failure = text;
}

// Calls look_up() at intervals. At the end of each interval the work throws an exception.
void C10dCommunicator::wait_for(c10d::Work& work) {
  constexpr std::chrono::milliseconds kPause{100};
  const ObservedWait observed;
  // For a device, wait() returns once the stream is set to wait for the sum.
  if (sums_on_device_) {
    work.wait();
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  bool has_death = false;
  for (int looks = 1;; ++looks) {
    try {
      work.wait(kPause);
      return;
    } catch (const std::exception&) {
      if (work.isCompleted()) {
        work.wait();  // throws the work's error: it may have ended after the wait gave up
        return;
      }
    }
    look_up(std::chrono::steady_clock::now() - begin, looks, has_death);
  }
}

// has_death: whether a rank had died when this asked before. One that dies after it has sent all of
// its message does not break it: what it has sent arrives until the next question.
void C10dCommunicator::look_up(std::chrono::steady_clock::duration waited, int looks,
                               bool& has_death) {
  notify_observer(
      waited, [this] { return where_ranks_are(); },
      [] { throw Interruption(std::current_exception()); });
  // A peer may have failed in a way that does not close its connections. Those of a rank that has
  // died may be held open by its children.
  constexpr int kLooksPerQuestion = 5;
  if (!own_ || looks % kLooksPerQuestion != 0) return;
  const std::optional<std::string> published = own_->failure();
  const bool had_death = std::exchange(has_death, own_->death().has_value());
  if (!published && !(had_death && has_death)) return;
  own_->abandon("");  // the other rank's reason counts
  throw CommunicationError(published ? *published : "its connections are still open");
}

std::string C10dCommunicator::where_ranks_are() {
  if (!board_) return "";
  if (publisher_) publisher_->publish();
  // Ranks that have published nothing are unknown.
  return who_is_where_if_known(board_->read(), numbers_of_ranks(size_));
}

void C10dCommunicator::show_calls(std::chrono::milliseconds publish_after) {
  try {
    const auto segment = SharedMemorySegment::create(size_, {.slot_length = 1});
    holder_of_board_ = make_shared_memory_communicator(segment, rank_);
  } catch (const Error&) {
    // Without a free file descriptor, calls cannot be seen from outside the process.
    holder_of_board_ =
        std::move(make_thread_communicators(size_).at(static_cast<std::size_t>(rank_)));
  }
  board_ = *holder_of_board_->calls();
  if (own_) publisher_ = std::make_shared<CallPublisher>(own_, *board_, publish_after);
}

void C10dCommunicator::connect_peers() {
  if (kernels_of_peers_ == nullptr) return;
  peer_devices_ = PeerDevices::make(*this, *kernels_of_peers_, placement_.device, options_.timeout);
}

void C10dCommunicator::watch_peers() {
  watches_peers_ = true;
  if (!own_ || (!sums_on_device_ && !peer_devices_)) return;
  constexpr std::chrono::milliseconds kBetweenLooks{500};
  peers_ = periodic_thread(kBetweenLooks, [this, has_failed = false]() mutable {
    // One turn later: what a peer did before it ended has then arrived.
    if (has_failed) {
      abort_work();
      return false;
    }
    if (const auto reason = reason_to_end()) {
      note_failure(describe(*reason));
      has_failed = true;
    }
    return true;
  });
}

// A rank that has waited for half the limit shows that it is there. At the limit, those that do not
// come are named.
std::optional<std::string> C10dCommunicator::reason_to_end() {
  TorchNccl::allow_captures_of_other_threads();
  if (auto reason = own_->failure()) return reason;
  if (auto reason = own_->death()) return reason;
  const auto age = queued_.age();
  const bool waits_long = age && *age > options_.timeout / 2;
  if (waits_long != shows_presence_) {
    own_->show_presence(waits_long);
    shows_presence_ = waits_long;
  }
  if (!age || *age < options_.timeout) return std::nullopt;
  return own_->reason_of(
      "an exchange timed out: waited " + in_seconds(options_.timeout) + " for the other ranks",
      [] { return std::string(); });
}

// The separate group carries nothing else, and nothing more is queued on it.
void C10dCommunicator::abort_work() noexcept {
  if (peer_devices_) peer_devices_->end_waits();
  if (!sums_on_device_) return;
  try {
    if (const Group group = own_->get()) group->getBackend(carrier_)->abort();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The backend's own time limit ends the work then.
  }
}

void C10dCommunicator::know_processes(const DeviceKernels* kernels) {
  if (!own_) return;
  const auto identity = static_cast<double>(identity_of_process_ids());
  const std::vector<double> rows =
      gather(*this, {identity, static_cast<double>(getpid()), kernels == nullptr ? 0.0 : 1.0});
  std::vector<std::int32_t> processes;
  kernels_of_peers_ = kernels;
  for (std::size_t row = 0; row < rows.size(); row += 3) {
    processes.push_back(rows[row] == identity ? static_cast<std::int32_t>(rows[row + 1]) : 0);
    if (rows[row + 2] == 0.0) kernels_of_peers_ = nullptr;
  }
  own_->know_processes(std::move(processes));
}

// All ranks have found that their lengths differ. They send each other the lengths. They also
// forget the earlier ones: after a skipped message, a rank would expect other lengths than its
// peers.
void C10dCommunicator::throw_lengths_differ(double length) {
  lengths_ = {};
  std::vector<double> lengths = row_to_gather(rank_, size_, {length});
  all_reduce(lengths);
  throw MismatchError(describe(text_of_different_lengths(lengths)));
}

// The group itself would pass the tensors through torch's dispatcher.
c10::intrusive_ptr<c10d::Backend> C10dCommunicator::backend_for(const at::Tensor& sum) const {
  const bool uses_own = own_ && (sum.is_cpu() || own_->serves_devices());
  const Group group = uses_own ? own_->get() : group_.lock();
  if (!group) throw CommunicationError(describe("the process group was destroyed"));
  return group->getBackend(sum.device().type());
}

void C10dCommunicator::fail(std::string_view reason) noexcept {
  bool is_busy = false;
  {
    const std::lock_guard lock(state_.mutex);
    if (!state_.failure.empty()) return;
    try {
      state_.failure = describe("this rank has failed: " + std::string(reason));
    } catch (const std::bad_alloc&) {
      state_.failure = "failed";  // no memory for more
    }
    is_busy = state_.is_busy;
  }
  if (peer_devices_) peer_devices_->end_waits();
  if (!own_) return;
  if (is_busy) {
    own_->publish_failure(reason);  // the thread with the message finds it too
  } else {
    own_->fail(reason);
  }
}

std::string C10dCommunicator::describe(std::string_view text) const {
  return transport_ + ": " + name_of_rank(rank_, size_) + ": " + std::string(text);
}

}  // namespace normscope::binding
