// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/groups/tensor_message.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "normscope/core/error.h"
#include "normscope/torch/c10d/communicator.h"
#include "normscope/torch/groups/registry.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/kernels_in_use.h"

namespace normscope::binding {
namespace {

// The columns of a row's header.
enum Column { kColumnCount, kColumnHash, kColumnBackward };

// nullptr if there is none.
C10dCommunicator* over_torch(const ExchangeUse& use) {
  return use.get() == nullptr ? nullptr
                              : dynamic_cast<C10dCommunicator*>(&use.get()->communicator());
}

// The numbers of a header on a device. Kept, because making it would copy from the host: few layers
// of a program have different ones.
using Numbers = std::array<double, TensorMessage::kHeader>;
at::Tensor on_device(const Numbers& numbers, const at::TensorOptions& options) {
  using Key = std::tuple<Numbers, at::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  static std::mutex mutex;
  static std::map<Key, at::Tensor> kept;
  constexpr std::size_t kMost = 4096;
  const Key key{numbers, c10::typeMetaToScalarType(options.dtype()), options.device().type(),
                options.device().index()};
  const std::lock_guard lock(mutex);
  const auto found = kept.find(key);
  if (found != kept.end()) return found->second;
  if (kept.size() == kMost) kept.clear();
  return kept[key] = at::tensor(numbers, options);
}

at::Tensor header_of_row(const Header& header, const at::TensorOptions& options) {
  const double count = header.fields[kCount];
  return on_device({count == 0 ? kNoElements : count, header.fields[kCallHash],
                    header.fields[kBackwardNeeded], 0.0},
                   options);
}

at::Tensor header_of_sum(const Header& header, const at::TensorOptions& options) {
  static_assert(std::tuple_size_v<Numbers> == kHeaderSize);
  Numbers numbers;
  std::ranges::copy(header.fields, numbers.begin());
  return on_device(numbers, options);
}

// Copies numbers from a device to the host, and calls check(the copy, this rank's call) in a later
// call, once the copy has arrived.
template <class Check>
void check_later(Exchange& exchange, int call, const at::Tensor& numbers, const Check& check) {
  const at::Tensor on_host =
      at::empty(numbers.sizes(), numbers.options().device(c10::kCPU).pinned_memory(true));
  on_host.copy_(numbers, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl device(numbers.device().type());
  auto arrived = std::make_shared<c10::Event>(numbers.device().type());
  arrived->record(device.getStream(numbers.device()));
  exchange.check_later([&exchange, call, on_host, arrived, check] {
    if (!arrived->query()) return false;
    check(on_host, exchange.reported_call(call));
    return true;
  });
}

[[noreturn]] void throw_shared_with_another(const std::string& own_call,
                                            const std::string& of_whom) {
  throw MismatchError("the ranks of a scope made different calls: this rank's " + own_call +
                      " shared an exchange with another call" + of_whom +
                      ", and its results are wrong. NORMSCOPE_CHECK=1 finds it earlier, and says "
                      "what each rank was doing");
}

void check_count(double count, const std::string& of_call = "") {
  if (count != 1) return;
  throw OneValueError(
      "x: expected more than 1 value per channel in the norm batch when training, got 1" + of_call);
}

void check_earlier_count(double count, const std::string& call) {
  check_count(count, " in an earlier call, " + call);
}

}  // namespace

std::optional<Placement> placement_of_messages(const ScopedCall& call, const at::Tensor& x) {
  const Placement placement = placement_of(x);
  if (!uses_torch_kernels(x) || serves(call.group_name, placement.device)) return placement;
  return std::nullopt;
}

std::int64_t TensorMessage::ranks() const {
  return is_alone() ? 1 : use_.get()->communicator().size();
}

bool TensorMessage::is_on_device() const {
  const C10dCommunicator* const communicator = over_torch(use_);
  return communicator != nullptr && communicator->takes_device_tensors();
}

GatheredRows TensorMessage::gather(const CallLabel& label, std::int64_t count,
                                   std::initializer_list<at::Tensor> own) {
  std::vector<at::Tensor> parts(own);
  const at::TensorOptions options = parts.front().options();
  at::Tensor rows;
  int call = 0;
  std::int32_t hash = 0;
  if (is_alone()) {
    check_count(static_cast<double>(count));
    parts.push_back(header_of_row({{static_cast<double>(count)}}, options));
    rows = at::cat(parts).unsqueeze(0);
  } else if (is_on_device()) {
    std::size_t bytes = kHeader * parts.front().itemsize();
    for (const at::Tensor& part : parts) bytes += part.nbytes();
    call = use_.get()->exchange_on_device(
        label, static_cast<double>(count), bytes, [&](const Header& header) {
          hash = static_cast<std::int32_t>(header.fields[kCallHash]);
          parts.push_back(header_of_row(header, options));
          const at::Tensor row = at::cat(parts);
          rows = at::empty({ranks(), row.size(0)}, options);
          over_torch(use_)->all_gather_on_device(rows, row);
        });
  } else {
    rows = gather_through_host(label, count, at::cat(parts));
  }
  // A row for each column, so that the counts are contiguous.
  const at::Tensor headers = at::empty({kHeader, ranks()}, options.dtype(at::kInt));
  headers.copy_(rows.narrow(1, rows.size(1) - kHeader, kHeader).t());
  if (is_on_device()) check_rows_later(headers, call, hash);
  return {rows, headers[kColumnCount]};
}

at::Tensor TensorMessage::gather_through_host(const CallLabel& label, std::int64_t count,
                                              const at::Tensor& own) {
  const at::Tensor on_host = own.to(at::kCPU, at::kDouble);
  const double* const numbers = on_host.const_data_ptr<double>();
  std::vector<double> row(numbers, numbers + own.size(0));
  row.insert(row.end(), {count == 0 ? kNoElements : static_cast<double>(count), 0.0, 0.0, 0.0});
  const std::vector<double> rows = use_.get()->gather(label, row);
  double total = 0;
  for (std::size_t at = row.size() - kHeader; at < rows.size(); at += row.size()) {
    total += std::round(rows[at]);
  }
  check_count(total);
  return at::tensor(rows, at::kDouble).view({ranks(), -1}).to(own.options());
}

at::Tensor TensorMessage::sum(const CallLabel& label, std::int64_t count,
                              std::initializer_list<at::Tensor> own) {
  if (is_on_device()) return sum_on_device(label, count, own);
  const bool is_forward = label.direction == Direction::kForward;
  const auto elements = static_cast<double>(count);
  if (is_alone()) {
    if (is_forward) check_count(elements);
    std::vector<at::Tensor> parts(own);
    parts.push_back(at::full({1}, elements, parts.front().options()));
    return at::cat(parts);
  }
  const at::Tensor joined = at::cat(std::vector<at::Tensor>(own));
  const std::int64_t size = joined.size(0) + 1;
  const at::Tensor message =
      at::zeros({size + kHeaderSize}, at::TensorOptions().dtype(at::kDouble));
  message.narrow(0, 0, size - 1).copy_(joined);
  message[size - 1].fill_(elements);
  message[size + kCount].fill_(elements);
  use_.get()->all_reduce(
      label, {message.mutable_data_ptr<double>(), static_cast<std::size_t>(message.numel())}, {});
  if (is_forward) check_count(message.const_data_ptr<double>()[size + kCount]);
  return message.narrow(0, 0, size).to(joined.options());
}

at::Tensor TensorMessage::sum_on_device(const CallLabel& label, std::int64_t count,
                                        std::initializer_list<at::Tensor> own) {
  std::vector<at::Tensor> parts(own);
  const at::TensorOptions options = parts.front().options();
  parts.push_back(header_of_row({{static_cast<double>(count)}}, options).narrow(0, 0, 1));
  // The sums of a backward may be float32, which is too narrow for the hash.
  const bool has_header =
      label.direction == Direction::kForward && parts.front().dtype() == at::kDouble;
  std::int64_t size = 0;
  for (const at::Tensor& part : parts) size += part.size(0);
  at::Tensor message;
  const int call = use_.get()->exchange_on_device(
      label, static_cast<double>(count),
      static_cast<std::size_t>(size) * options.dtype().itemsize(), [&](const Header& header) {
        if (has_header) parts.push_back(header_of_sum(header, options));
        message = at::cat(parts);
        over_torch(use_)->sum_on_device(message);
      });
  if (!has_header) return message;
  check_later(*use_.get(), call, message.narrow(0, size, kHeader),
              [ranks = ranks()](const at::Tensor& totals, const std::string& own_call) {
                const auto* const fields = totals.const_data_ptr<double>();
                if (!ranks_agree(fields, static_cast<double>(ranks))) {
                  throw_shared_with_another(own_call, "");
                }
                check_earlier_count(fields[kCount], own_call);
              });
  return message.narrow(0, 0, size);
}

void TensorMessage::check_rows_later(const at::Tensor& headers, int call, std::int32_t hash) {
  Exchange& exchange = *use_.get();
  check_later(exchange, call, headers,
              [&exchange, hash](const at::Tensor& of_ranks, const std::string& own_call) {
                const auto values = of_ranks.accessor<std::int32_t, 2>();
                std::int64_t count = 0;
                std::string others;
                for (std::int64_t rank = 0; rank < of_ranks.size(1); ++rank) {
                  count += values[kColumnCount][rank];
                  const bool agrees = values[kColumnHash][rank] == hash &&
                                      values[kColumnBackward][rank] == values[kColumnBackward][0];
                  if (agrees) continue;
                  others += others.empty() ? "" : ", ";
                  others += std::to_string(exchange.name_of_rank(static_cast<std::size_t>(rank)));
                }
                if (!others.empty()) throw_shared_with_another(own_call, " of rank " + others);
                check_earlier_count(static_cast<double>(count), own_call);
              });
}

}  // namespace normscope::binding
