// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/torch/c10d/patient_store.h"

namespace normscope::binding {

// A process group that carries only normscope's messages, among ranks of one of the program's
// groups.
//
// torch.distributed identifies a message only by its place in the order of calls. If a rank ran one
// step more than its peers, its message on the program's own group would be added to their next
// messages: silently if the lengths agree. Over Gloo, different lengths end the process, and a
// timeout breaks the group. Closing a separate group also notifies the peers at once.
//
// Python makes and destroys it, which allows any backend of torch.distributed.
//
// What the ranks publish besides their messages is in a store, which can be read without
// waiting for the rank that wrote. If the store's server has died or hangs, one call waits a few
// seconds, and the calls of the next minute do not ask it; the rendezvous waits for the limit.
//
// After it is made, any thread may call fail(), publish_failure() and the functions that ask the
// store.
class OwnGroup {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Whether messages are in host memory only, or may also be on the devices that the program's
  // group serves.
  enum class Use { kHost, kDevices };

  // A group of all ranks of `group`, which Python knows by `name`. It is still to be made, in the
  // rendezvous of the ranks. Throws TimeoutError or CommunicationError if the store does not
  // answer.
  OwnGroup(c10d::ProcessGroup& group, const std::string& name, Use use, Milliseconds time_limit);

  // Waits until all ranks have come to the rendezvous, and makes the group. Throws the errors of
  // make().
  void wait_and_make();

  // A group that is still to be made. `ranks` are its ranks' numbers in the program's group
  // `parent`, and in errors; `rank` is this rank's place among them.
  OwnGroup(PatientStore store, std::string name, std::string parent, Use use, int rank,
           std::vector<int> ranks, Milliseconds time_limit);

  // For a rank that will not come to the rendezvous: notifies its peers that it failed, and why.
  static void refuse(c10d::ProcessGroup& group, const std::string& name,
                     std::string_view reason) noexcept;

  ~OwnGroup() { close(); }
  OwnGroup(const OwnGroup&) = delete;
  OwnGroup& operator=(const OwnGroup&) = delete;

  // A group of some of the ranks, given by their places in this one. It is still to be made.
  [[nodiscard]] std::unique_ptr<OwnGroup> part(const std::string& name,
                                               const std::vector<int>& members) const;

  // Makes the process group. Collective over its ranks. Throws TimeoutError, which names the ranks
  // that have not come, or CommunicationError if a rank has failed before or torch.distributed
  // cannot make the group.
  void make();

  [[nodiscard]] bool serves_devices() const noexcept { return use_ == Use::kDevices; }

  // Tells the group the processes of its ranks, by their places: 0 for ranks of other hosts. Errors
  // then name those that have died.
  void know_processes(std::vector<std::int32_t> processes);

  // nullptr if it was destroyed.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> get() const { return group_.lock(); }

  // Ends the group. Peers that wait, or come later, find that this rank failed, and why.
  void fail(std::string_view reason) noexcept;

  // The same while a message is in progress. Ending the backend would wait for the message, so the
  // backend is kept until the process ends. Waiting peers find out when they ask the store. An
  // empty reason is not published.
  void abandon(std::string_view reason) noexcept;

  // Only notifies the peers that this rank failed, and why.
  void publish_failure(std::string_view reason) noexcept;

  // Ends the group after an error of its backend, and returns reason_of().
  [[nodiscard]] std::string fail_after(const std::string& what,
                                       const std::function<std::string()>& who_is_where);

  // Shows the peers that this rank is waiting for them, or that it is not any more. Returns whether
  // the store has answered.
  bool show_presence(bool is_present);

  // Why a message to all ranks has failed with the error `what`: the text of the rank that failed
  // first. If no rank has failed, `what`, the ranks that are dead or not present, and where the
  // ranks are; the peers then get this text too.
  [[nodiscard]] std::string reason_of(const std::string& what,
                                      const std::function<std::string()>& who_is_where);

  // The reason of the first rank that failed, if any.
  [[nodiscard]] std::optional<std::string> failure();

  // Which ranks of this host have died, if any.
  [[nodiscard]] std::optional<std::string> death() const;

  // Shows a text to ranks that ask later, in place of the one before.
  void show(std::string text);

  // What the other ranks have shown, by their places in this group.
  [[nodiscard]] std::vector<std::pair<int, std::string>> shown_by_others();

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] int own_rank() const { return ranks_[rank_]; }

  // Waits until every rank has called this once with the same `what`.
  void wait_for_ranks(const std::string& what);
  [[nodiscard]] std::optional<std::vector<std::size_t>> missing_at(const std::string& what) const;

  struct Wait;
  template <class Answer>
  Answer await(
      std::future<Answer> answer, const std::string& whom, const Wait& wait,
      const std::function<void()>& look = [] {});
  void notify_observer(const Wait& wait, const std::function<std::string()>& who_is_where);

  // Why a message to all ranks has failed: what another rank has published, or which ranks are dead
  // or do not answer; nullopt if the store does not answer. All ranks that are present must call
  // this at about the same time.
  struct RollCall;
  [[nodiscard]] std::optional<RollCall> call_roll();
  [[nodiscard]] std::string describe(const std::optional<RollCall>& roll) const;
  [[nodiscard]] std::string reason_of(const std::optional<RollCall>& roll, const std::string& what,
                                      const std::function<std::string()>& who_is_where);

  // Notes that this rank has read the reason, and that the ranks at the places `missing` never
  // will. Rank 0, whose process usually has the store, waits until all ranks have read it.
  void hand_out(Milliseconds patience, const std::vector<std::size_t>& missing);

  [[nodiscard]] std::string list(const std::vector<std::size_t>& places) const;
  [[nodiscard]] std::string text_of_dead(const std::vector<std::size_t>& places) const;

  void close() noexcept;

  PatientStore store_;
  std::string name_;    // torch's name of this group
  std::string parent_;  // and of the program's group
  Use use_;
  std::size_t rank_;                     // this rank's place
  std::vector<int> ranks_;               // numbered as in the program's group
  std::vector<std::int32_t> processes_;  // 0: of another host, or unknown
  Milliseconds time_limit_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_{c10::intrusive_ptr<c10d::ProcessGroup>()};
};

}  // namespace normscope::binding
