// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "normscope/comm/communicator.h"
#include "normscope/core/error.h"

namespace normscope::testing {

// Owns nothing: lets an Exchange use a communicator that somebody else owns.
class BorrowedCommunicator : public Communicator {
 public:
  explicit BorrowedCommunicator(Communicator& communicator) : communicator_(communicator) {}

  [[nodiscard]] int rank() const noexcept override { return communicator_.rank(); }
  [[nodiscard]] int size() const noexcept override { return communicator_.size(); }
  [[nodiscard]] std::string_view transport() const noexcept override {
    return communicator_.transport();
  }
  [[nodiscard]] bool compares_lengths() const noexcept override {
    return communicator_.compares_lengths();
  }
  void all_reduce_sum(std::span<double> values, Stream stream) override {
    communicator_.all_reduce_sum(values, stream);
  }
  [[nodiscard]] const PeerMemory* peer_memory(std::int64_t channels, Stream stream) override {
    return communicator_.peer_memory(channels, stream);
  }
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    return communicator_.split(color, key);
  }
  void fail(std::string_view reason) noexcept override { communicator_.fail(reason); }

 private:
  Communicator& communicator_;
};

// A transport that would not survive ranks with different lengths. Here it throws what no test
// expects.
class FragileCommunicator final : public BorrowedCommunicator {
 public:
  using BorrowedCommunicator::BorrowedCommunicator;

  [[nodiscard]] bool compares_lengths() const noexcept override { return false; }
  void all_reduce_sum(std::span<double> values, Stream stream) override {
    try {
      BorrowedCommunicator::all_reduce_sum(values, stream);
    } catch (const MismatchError& error) {
      throw std::logic_error(std::string("the transport has crashed: ") + error.what());
    }
  }
};

}  // namespace normscope::testing
