// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/comm/communicator.h"
#include "normscope/torch/c10d/expected_lengths.h"
#include "normscope/torch/c10d/own_group.h"
#include "normscope/torch/c10d/peer_devices.h"
#include "normscope/torch/c10d/publisher.h"
#include "normscope/torch/c10d/queued_messages.h"
#include "normscope/torch/tensors/device.h"

namespace normscope::binding {

// Whether a process group has a backend for tensors on this type of device.
[[nodiscard]] bool serves(const c10d::ProcessGroup& group, c10::DeviceType device);

// The device whose backend carries messages of tensors on `device`: that one, or the CPU if the
// group serves the host only.
[[nodiscard]] c10::DeviceType carrier_of(const c10d::ProcessGroup& group, c10::DeviceType device);

// A communicator over a process group of torch.distributed, with any backend. Does not keep the
// group alive. The group's own time limit applies unless another is given.
//
// Messages use a separate group (own_group.h) if there is one. Otherwise the process group must
// carry nothing but this communicator's messages.
//
// If ranks come with different lengths, some backends end the process (Gloo) or hang (NCCL). A host
// message therefore starts with a frame, which contains the message's length. All ranks choose the
// same length of the frame, from the messages before. The rest of the message follows once the
// lengths are known to agree. If the group serves devices only, host messages go through a device.
//
// NCCL sums a message in device memory directly, and nothing waits for it. Torch's backend makes
// NCCL's communicator for the first of these messages. If the peers are watched, later ones are
// passed to NCCL without torch. For other backends, and groups that serve the host only, the
// message is copied to the host and then treated like a host message. After connect_peers(),
// kernels of one host's devices exchange sums without a backend.
class C10dCommunicator final : public Communicator {
 public:
  explicit C10dCommunicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            const Placement& placement = {},
                            std::optional<std::chrono::milliseconds> time_limit = std::nullopt,
                            std::shared_ptr<OwnGroup> own = nullptr);
  ~C10dCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept override { return transport_; }
  [[nodiscard]] bool compares_lengths() const noexcept override {
    return !sums_on_device_ && !peer_devices_;
  }
  [[nodiscard]] CallBoard* calls() noexcept override { return board_ ? &*board_ : nullptr; }

  // From now on shows this rank's calls outside the process. If there is a separate group, the
  // peers also see calls that are older than `publish_after`. Later parts are included.
  void show_calls(std::chrono::milliseconds publish_after);

  // If there is a separate group: finds the peers' processes on this host, whose death errors then
  // name. Later parts are included. Collective.
  //
  // `kernels`: with which this rank's device can exchange messages with others; nullptr if there
  // are none, or they are not wanted.
  void know_processes(const DeviceKernels* kernels);

  // If all ranks have given kernels: from now on their devices exchange sums in each other's
  // memory, if all of them can (PeerDevices). Collective.
  void connect_peers();

  // If there is a separate group and messages are summed on a device: looks from now on whether a
  // peer has failed or died, or does not come within the time limit. Later calls then throw instead
  // of being queued, and those that wait for the peer are aborted, so that their results are wrong.
  // Later parts are included.
  void watch_peers();

  void all_reduce_sum(std::span<double> values, Stream stream = {}) override;
  [[nodiscard]] const PeerMemory* peer_memory(std::int64_t channels, Stream stream) override;

  // Splits through the group's backend if that can split. Parts are no groups of torch.distributed,
  // which does not know of them: a part ends with its communicator. It ends in good order if its
  // group has been destroyed by then. Otherwise it is aborted, as torch aborts a group that nobody
  // destroyed.
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;

  // Whether the group has a backend for the device that works on tensors there. Gloo copies them to
  // the host.
  [[nodiscard]] bool takes_device_tensors() const noexcept {
    return placement_.memory == Memory::kDevice && carrier_ == placement_.device &&
           transport_ != "gloo";
  }
  // For tensors of any type on that device. Queued on its current stream; nothing waits for them.
  void sum_on_device(const at::Tensor& sum);
  // `own` [k] of every rank, in rank order: all [ranks, k].
  void all_gather_on_device(at::Tensor& all, const at::Tensor& own);

  // Closes the separate group, and the peers throw at once. Without one they find out at their time
  // limit, because torch.distributed has no message for this.
  void fail(std::string_view reason) noexcept override;

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // A part of `whole`. `own`: of its separate group, if there is one, which `part` then belongs to.
  // Otherwise the part keeps `part` alive.
  C10dCommunicator(Group part, std::shared_ptr<OwnGroup> own, const std::vector<int>& members,
                   const C10dCommunicator& whole);

  [[nodiscard]] c10::intrusive_ptr<c10d::Backend> backend_for(const at::Tensor& sum) const;
  [[nodiscard]] Group part_of(c10d::ProcessGroup& group, const std::vector<int>& members) const;
  [[nodiscard]] c10::intrusive_ptr<c10d::Backend> split_backend(
      c10d::Backend& backend, const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& members) const;
  void stay_out_of_parts(c10d::ProcessGroup& group) const;
  void connect_devices();
  void end_part();
  void all_reduce_in_frame(std::span<double> values);
  void all_reduce(std::span<double> values);
  [[nodiscard]] at::Tensor all_reduce_of_host(const at::Tensor& of_host);
  void all_reduce(const at::Tensor& sum);
  template <class Start>
  void run(const Start& start);
  template <class Queue>
  [[nodiscard]] bool queue_by_nccl(const at::Tensor& message, const Queue& queue);
  void note_failure(const std::string& text);
  [[nodiscard]] std::optional<std::string> reason_to_end();
  void abort_work() noexcept;
  void wait_for(c10d::Work& work);
  void look_up(std::chrono::steady_clock::duration waited, int looks, bool& has_death);
  [[nodiscard]] std::string where_ranks_are();
  [[nodiscard]] std::unique_ptr<Communicator> make_part(const std::vector<int>& members) const;
  [[noreturn]] void throw_lengths_differ(double length);
  [[nodiscard]] std::string name_of_part(const std::vector<int>& members) const;
  [[nodiscard]] std::string describe(std::string_view text) const;

  std::shared_ptr<OwnGroup> own_;                      // nullptr: messages use group_
  Group part_;                                         // nullptr: others keep group_ alive
  c10::weak_intrusive_ptr<c10d::ProcessGroup> whole_;  // the program's group
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int parts_ = 0;                // made so far
  Placement placement_;          // of messages that are not in host memory
  c10::DeviceType carrier_;      // whose backend carries those
  c10::DeviceType host_device_;  // what host messages go through
  int rank_;
  int size_;
  std::string transport_;
  bool sums_on_device_;
  c10d::AllreduceOptions options_;
  ExpectedLengths lengths_;  // of messages in frames
  // What a thread that calls fail() needs to know of the one that uses this object.
  struct State {
    std::mutex mutex;     // guards the rest
    std::string failure;  // the first one; empty: none
    bool is_busy = false;
  };
  State state_;
  std::optional<CallBoard> board_;
  std::unique_ptr<Communicator> holder_of_board_;    // nullptr for a part
  std::shared_ptr<CallPublisher> publisher_;         // of the whole group
  const DeviceKernels* kernels_of_peers_ = nullptr;  // nullptr: not all ranks have given some
  std::unique_ptr<PeerDevices> peer_devices_;        // nullptr: the backend carries messages
  QueuedMessages queued_;                            // without torch
  bool shows_presence_ = false;                      // used by the thread that watches the peers
  bool watches_peers_ = false;                       // of parts too
  std::jthread peers_;                               // last, because it uses the other members
};

}  // namespace normscope::binding
