// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/self_communicator.h"

#include <mutex>
#include <optional>
#include <string>

#include "normscope/core/error.h"
#include "normscope/core/text.h"

namespace normscope {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }
  [[nodiscard]] std::string_view transport() const noexcept override { return "self"; }
  [[nodiscard]] bool compares_lengths() const noexcept override { return true; }

  void all_reduce_sum(std::span<double> /*values*/, Stream /*stream*/) override {
    throw_if_failed();
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int /*color*/, int /*key*/) override {
    throw_if_failed();
    return make_self_communicator();
  }

  void fail(std::string_view reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!reason_) reason_.emplace().put(reason);
  }

 private:
  void throw_if_failed() {
    const std::lock_guard lock(mutex_);
    if (!reason_) return;
    throw CommunicationError("self: rank 0 of 1 failed: " + std::string(reason_->view()));
  }

  std::mutex mutex_;  // guards the next one
  // In a fixed buffer: the rank may have failed because there is no memory.
  std::optional<FixedText<kReasonBytes>> reason_;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace normscope
