// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/recommend_scopes.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/processes.h"
#include "normscope/core/error.h"
#include "normscope/core/hash.h"
#include "normscope/core/header.h"
#include "normscope/core/independent_values.h"
#include "normscope/core/limbs.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/nn/layers.h"
#include "normscope/torch/nn/left_as_it_is.h"
#include "normscope/torch/ops/operators.h"

namespace normscope::nn {
namespace {

using Row = std::vector<double>;

std::string named_or_module(const std::string& layer) { return layer.empty() ? "module" : layer; }

// The rows of all ranks, in rank order.
std::vector<Row> gather(const Row& own, std::string_view what, const RankGroup& group) {
  if (group.size() == 1) return {own};
  Row message = row_to_gather(group.rank(), group.size(), own);
  message.resize(message.size() + kHeaderSize);
  group.all_reduce({.layer = what,
                    .scope = "world",
                    .direction = Direction::kParameters,
                    .channels = static_cast<std::int64_t>(own.size())},
                   message);
  std::vector<Row> rows;
  for (auto row = message.begin(); std::ssize(rows) < group.size(); row += std::ssize(own)) {
    rows.emplace_back(row, row + std::ssize(own));
  }
  return rows;
}

// If this rank alone throws, ends the wait of the others.
template <class Work>
auto with_peers_told(const RankGroup& group, const Work& work) {
  try {
    return work();
  } catch (const c10::DistError&) {
    throw;  // from an exchange, so the peers know
  } catch (const std::exception& error) {
    static const auto fail = binding::op_named<binding::FailExchangeOp>("normscope::fail_exchange");
    if (group.size() > 1) fail.call("world", group.name(), binding::what_of(error));
    throw;
  }
}

// The measurements of a layer.
struct Watched {
  NamedLayer layer;
  // Moments of its inputs in a forward of the module, call by call.
  std::vector<PartMoments> calls;
  std::size_t calls_of_batch = 0;  // made so far in the present batch
  double seconds = 0.0;            // spent in exchanges
  std::int64_t exchanges = 0;

  void look(const at::Tensor& x, std::int64_t parts) {
    static const auto op = binding::op_named<binding::PartMomentsOp>("normscope::part_moments");
    if (parts > 1 && x.size(0) < parts) {
      throw ArgumentError("batches: expected at least " + std::to_string(parts) +
                          " samples, one for each rank, got " + std::to_string(x.size(0)) + " in " +
                          named_or_module(layer.name));
    }
    const at::Tensor moments = op.call(x, parts);
    if (calls_of_batch == calls.size()) {
      calls.push_back({.batches = 0, .parts = parts, .channels = x.size(1), .rows = {}});
    }
    PartMoments& call = calls[calls_of_batch++];
    const double* rows = moments.const_data_ptr<double>();
    call.rows.insert(call.rows.end(), rows, rows + moments.numel());
    ++call.batches;
  }

  // Replaces this rank's moments by those of all ranks, as parts.
  void gather_moments(const RankGroup& group) {
    const std::string label = "recommend_scopes, " + named_or_module(layer.name);
    Row own = {0.0, seconds};
    Row rows;
    for (const PartMoments& call : calls) {
      own[0] += static_cast<double>(call.batches);
      rows.insert(rows.end(), call.rows.begin(), call.rows.end());
    }
    Row counts;
    seconds = 0.0;
    for (const Row& of_rank : gather(own, label, group)) {
      counts.push_back(of_rank[0]);
      seconds += of_rank[1] / group.size();
    }
    if (std::ranges::any_of(counts, [&](double count) { return count != counts[0]; })) {
      throw ArgumentError("module: expected " + named_or_module(layer.name) +
                          " to run as often on every rank, got " +
                          c10::str(at::ArrayRef<double>(counts)) + " times");
    }
    if (calls.empty()) return;
    const std::vector<Row> of_ranks = gather(rows, label, group);
    std::size_t begin = 0;
    for (PartMoments& call : calls) {
      const auto size = static_cast<std::size_t>(PartMoments::row_size(call.channels));
      call.parts = group.size();
      call.rows.clear();
      for (std::int64_t batch = 0; batch < call.batches; ++batch, begin += size) {
        for (const Row& of_rank : of_ranks) {
          const auto row = std::span(of_rank).subspan(begin, size);
          call.rows.insert(call.rows.end(), row.begin(), row.end());
        }
      }
    }
  }
};

void check_arguments(std::int64_t batches, const RankGroup& group,
                     const RecommendOptions& options) {
  if (!(options.independent_values() >= 2.0)) {
    throw ArgumentError("independent_values: expected at least 2, got " +
                        c10::str(options.independent_values()));
  }
  if (options.ranks() < 1 || (options.ranks() > 1 && group.size() > 1)) {
    throw ArgumentError(
        "ranks: expected at least 1, and exactly 1 if the group has several ranks (it has " +
        std::to_string(group.size()) + "), got " + std::to_string(options.ranks()));
  }
  if (batches < 0) {
    throw ArgumentError("batches: expected at least one, got " + std::to_string(batches));
  }
}

std::vector<Watched> layers_to_watch(::torch::nn::Module& module) {
  std::vector<Watched> watched;
  for (NamedLayer& layer : named_layers(module)) {
    if (layer.module->is_training()) watched.push_back({.layer = std::move(layer), .calls = {}});
  }
  if (watched.empty()) {
    throw ArgumentError("module: expected layers of normscope in training, got " + module.name() +
                        " without; normscope::nn::convert makes them");
  }
  return watched;
}

// The hosts of the ranks. Throws if the ranks differ in layers, batches or wanted numbers.
std::vector<std::int64_t> agree(const std::vector<Watched>& watched, std::int64_t batches,
                                double wanted, const RankGroup& group) {
  Hash hash;
  for (const Watched& each : watched) {
    hash.add(each.layer.name);
    hash.add(std::to_string(each.layer.options->num_features()));
  }
  constexpr int kBits = 48;  // exact in a double
  const std::vector<Row> ranks =
      gather({static_cast<double>(hash.low_bits(kBits)), static_cast<double>(batches), wanted,
              static_cast<double>(host_identity())},
             "recommend_scopes, agreement", group);
  const auto column = [&](std::size_t i) {
    Row numbers;
    for (const Row& rank : ranks) numbers.push_back(rank[i]);
    return numbers;
  };
  const auto differ = [&](std::size_t i) {
    return std::ranges::any_of(ranks, [&](const Row& rank) { return rank[i] != ranks[0][i]; });
  };
  if (differ(0)) {
    throw ArgumentError(
        "module: expected the same layers on every rank, got other names or channels");
  }
  if (differ(1)) {
    throw ArgumentError(
        "batches: expected the same number on every rank, since layers synchronize, got " +
        c10::str(at::ArrayRef<double>(column(1))));
  }
  if (differ(2)) {
    throw ArgumentError("independent_values: expected the same number on every rank, got " +
                        c10::str(at::ArrayRef<double>(column(2))));
  }
  std::vector<std::int64_t> hosts;
  for (const double host : column(3)) hosts.push_back(static_cast<std::int64_t>(host));
  return hosts;
}

// Runs the module over the batches, and watches the layers.
void run(std::vector<Watched>& watched, std::int64_t batches, std::int64_t parts,
         const std::function<void(std::int64_t)>& forward, const RankGroup& group) {
  const at::NoGradGuard no_grad;
  // All messages since the previous layer's forward belong to this layer.
  CommunicationCounters before = communication_counters();
  for (Watched& each : watched) {
    each.layer.options->scope(Scope::world());
    each.layer.observed->input_observer = [&each, &before, parts](const at::Tensor& x) {
      const CommunicationCounters after = communication_counters();
      each.exchanges += after.calls - before.calls;
      each.seconds += after.seconds - before.seconds;
      each.look(x, parts);
      before = communication_counters();
    };
  }
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    for (Watched& each : watched) each.calls_of_batch = 0;
    with_peers_told(group, [&] { forward(batch); });
  }
}

LayerPlan plan_of(const Watched& watched, double wanted, std::span<const std::int64_t> hosts) {
  const BatchNormOptions& options = *watched.layer.options;
  LayerPlan plan{
      .layer = watched.layer.name,
      .channels = options.num_features(),
      .choice = choose_scope(watched.layer.name, watched.calls, options.eps(), wanted, hosts),
      .exchange_bytes = (limbs_size(options.num_features()) + kHeaderSize) *
                        static_cast<std::int64_t>(sizeof(double)),
      .exchange_seconds = std::nullopt};
  if (watched.exchanges > 0) {
    plan.exchange_seconds = watched.seconds / static_cast<double>(watched.exchanges);
  }
  return plan;
}

}  // namespace

ScopePlan recommend_scopes(::torch::nn::Module& module, std::int64_t batches,
                           const std::function<void(std::int64_t)>& forward, const RankGroup& group,
                           const RecommendOptions& options) {
  std::vector<Watched> watched = with_peers_told(group, [&] {
    check_arguments(batches, group, options);
    return layers_to_watch(module);
  });
  // Before the ranks meet: ranks that are threads share torch's generator.
  const LeftAsItIs left_as_it_is(module);
  std::vector<std::int64_t> hosts = agree(watched, batches, options.independent_values(), group);
  if (batches == 0) throw ArgumentError("batches: expected at least one, got 0");
  run(watched, batches, options.ranks(), forward, group);
  if (group.size() > 1) {
    for (Watched& each : watched) each.gather_moments(group);
  } else {
    hosts.assign(static_cast<std::size_t>(options.ranks()), 0);
  }
  ScopePlan plan{.layers = {},
                 .independent_values = options.independent_values(),
                 .ranks = static_cast<std::int64_t>(hosts.size()),
                 .batches = batches};
  for (const Watched& each : watched) {
    if (!each.calls.empty()) {
      plan.layers.push_back(plan_of(each, options.independent_values(), hosts));
    }
  }
  return plan;
}

}  // namespace normscope::nn
