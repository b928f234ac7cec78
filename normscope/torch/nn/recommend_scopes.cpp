// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/recommend_scopes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/real.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/processes.h"
#include "normscope/core/error.h"
#include "normscope/core/hash.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/nn/layers.h"
#include "normscope/torch/nn/left_as_it_is.h"
#include "normscope/torch/ops/output_noise.h"

namespace normscope::nn {
namespace {

using Row = std::vector<double>;

// Ops of this library, which is another one than theirs.
template <class Op, class... Arguments>
auto call_op(const char* name, const Arguments&... arguments) {
  return binding::op_named<Op>(name).call(arguments...);
}

at::Tensor part_sums(const at::Tensor& x, const binding::OptionalTensor& dz) {
  return call_op<decltype(binding::part_sums)>("normscope::part_sums", x, dz, std::nullopt);
}

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

void notify_peers(const RankGroup& group, std::string_view reason) {
  if (group.size() == 1) return;
  call_op<decltype(binding::fail_exchanges)>("normscope::fail_exchanges", reason, "world",
                                             group.name());
}

// If this rank alone throws, ends the wait of the others. They know of errors of exchanges.
template <class Work>
auto with_notified_peers(const RankGroup& group, const Work& work) {
  try {
    return work();
  } catch (const c10::DistError&) {
    throw;
  } catch (const MismatchError&) {
    throw;
  } catch (const std::exception& error) {
    notify_peers(group, binding::what_of(error));
    throw;
  } catch (...) {
    notify_peers(group, "an unknown exception");
    throw;
  }
}

// A call of a layer in a forward.
struct WatchedCall {
  at::Tensor x;
  at::Tensor z;  // the output of the normalization; undefined in a block without gradients
};

// The measurements of a layer. A row has one number for each candidate.
struct Watched {
  NamedLayer layer;
  std::vector<WatchedCall> calls;  // in the present batch
  std::vector<Row> noise;          // for each batch that reached the layer
  Row samples, elements;           // of the smallest norm batch
  double updates = 0.0;            // of the running statistics before; infinity: it has none
  double seconds = 0.0;            // spent in exchanges
  std::int64_t exchanges = 0;

  // Also lets a program change z in place.
  at::Tensor observe(const at::Tensor& x, at::Tensor z) {
    if (!at::GradMode::is_enabled()) {
      calls.push_back({x.detach(), {}});
      return z;
    }
    if (!z.requires_grad()) z = z.detach().requires_grad_();
    calls.push_back({x.detach(), z});
    return z.clone();
  }
};

// Which ranks this process stands for.
struct Shares {
  std::int64_t first;
  std::int64_t parts;
  std::vector<std::int64_t> hosts;  // of all ranks
};

at::Tensor weight_of(const NamedLayer& layer) {
  const at::Tensor* weight = layer.module->named_parameters(/*recurse=*/false).find("weight");
  return weight ? *weight : at::Tensor();
}

// The rows of part_sums() for this process's parts.
at::Tensor part_rows(const at::Tensor& x, const at::Tensor& dz, std::int64_t parts) {
  std::vector<at::Tensor> rows;
  const std::vector<at::Tensor> gradients = dz.tensor_split(parts);
  for (const at::Tensor& part : x.tensor_split(parts)) {
    rows.push_back(part_sums(part, gradients[rows.size()]));
  }
  return at::stack(rows);
}

// The rows [P, *] of all ranks.
at::Tensor rows_of_ranks(const at::Tensor& own, const std::string& what, const RankGroup& group) {
  at::Tensor rows = own.dim() == 1 ? own.unsqueeze(0) : own.contiguous();
  if (group.size() == 1) return rows;
  const double* numbers = rows.const_data_ptr<double>();
  std::vector<at::Tensor> all;
  for (const Row& row :
       gather(Row(numbers, numbers + rows.numel()), "recommend_scopes, " + what, group)) {
    all.push_back(at::tensor(row, at::kDouble));
  }
  return at::stack(all);
}

// The beginnings of rows of part_sums().
at::Tensor moments_of(const at::Tensor& rows) {
  return rows.slice(1, 0, 2 + (rows.size(1) - 2) / 2).contiguous();
}

// Adds the noise of the calls of a batch. `to_noise` turns squared changes of the projection into
// noise; infinity if the outputs do not vary.
void add_batch(Watched& watched, std::span<const at::Tensor> gradients, double to_noise,
               const Shares& shares, const RankGroup& group) {
  if (watched.calls.empty()) return;
  Row noise;
  for (const WatchedCall& call : watched.calls) {
    at::Tensor dz = call.z.defined() ? gradients.front() : at::Tensor();
    if (call.z.defined()) gradients = gradients.subspan(1);
    if (!dz.defined()) dz = at::zeros_like(call.x);
    const at::Tensor rows = part_rows(call.x, dz, shares.parts);
    const at::Tensor fields = call_op<decltype(binding::output_noise)>(
        "normscope::output_noise", rows,
        rows_of_ranks(moments_of(rows), named_or_module(watched.layer.name), group), shares.first,
        binding::defined_or_none(weight_of(watched.layer)), watched.layer.options->eps(),
        shares.hosts);
    const auto candidates = static_cast<std::size_t>(fields.size(0));
    const bool is_known = call.z.defined() && std::isfinite(to_noise);
    noise.resize(candidates);
    watched.samples.resize(candidates, std::numeric_limits<double>::infinity());
    watched.elements.resize(candidates, std::numeric_limits<double>::infinity());
    const double* row = fields.const_data_ptr<double>();
    for (std::size_t i = 0; i < candidates; ++i, row += 3) {
      if (i + 1 == candidates) {
        noise[i] += row[0];  // world has none; NaN if x is not finite
      } else {
        noise[i] += is_known ? row[0] * to_noise : HUGE_VAL;
      }
      watched.samples[i] = std::min(watched.samples[i], row[1]);
      watched.elements[i] = std::min(watched.elements[i], row[2]);
    }
  }
  watched.calls.clear();
  watched.noise.push_back(std::move(noise));
}

// The moments of each output, as rows of all ranks.
std::vector<at::Tensor> moments_of_ranks(const std::vector<at::Tensor>& outputs,
                                         const RankGroup& group) {
  Row channels;
  for (const at::Tensor& output : outputs) {
    channels.push_back(output.dim() > 1 ? static_cast<double>(output.size(1)) : 1.0);
  }
  const std::vector<Row> of_ranks =
      gather(channels, "recommend_scopes, channels of outputs", group);
  std::vector<at::Tensor> moments;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool differ =
        std::ranges::any_of(of_ranks, [&](const Row& row) { return row[i] != channels[i]; });
    // Without channels in common, all elements are of one channel.
    const at::Tensor own =
        part_sums(differ ? outputs[i].flatten() : outputs[i], binding::kNoTensor);
    moments.push_back(rows_of_ranks(own, "outputs", group));
  }
  return moments;
}

// Runs a backward from the outputs of a batch, and adds the noise of its calls.
void measure(std::vector<Watched>& watched, const std::vector<at::Tensor>& outputs,
             std::int64_t batch, const Shares& shares, const RankGroup& group) {
  std::vector<at::Tensor> cotangents;
  double to_noise = 0.0;
  std::tie(cotangents, to_noise) = call_op<decltype(binding::random_cotangents)>(
      "normscope::random_cotangents", outputs, moments_of_ranks(outputs, group), batch,
      shares.first, shares.parts);
  std::vector<at::Tensor> inputs;
  for (const Watched& each : watched) {
    for (const WatchedCall& call : each.calls) {
      if (call.z.defined()) inputs.push_back(call.z);
    }
  }
  std::vector<at::Tensor> gradients;
  if (!inputs.empty()) {  // a batch may reach no layer, or each without gradients
    gradients = ::torch::autograd::grad(outputs, inputs, cotangents, /*retain_graph=*/std::nullopt,
                                        /*create_graph=*/false, /*allow_unused=*/true);
  }
  std::span<const at::Tensor> left = gradients;
  for (Watched& each : watched) {
    const auto with_gradient = static_cast<std::size_t>(std::ranges::count_if(
        each.calls, [](const WatchedCall& call) { return call.z.defined(); }));
    add_batch(each, left.first(with_gradient), to_noise, shares, group);
    left = left.subspan(with_gradient);
  }
}

void check_arguments(std::int64_t batches, const Forward& forward, const RankGroup& group,
                     const RecommendOptions& options) {
  if (!forward) throw ArgumentError("forward: expected a function, got none");
  if (!(options.noise() >= 0.0)) {
    throw ArgumentError("noise: expected at least 0, got " + c10::str(options.noise()));
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

// The updates of a layer's running statistics; infinity if it has none.
double updates_of(const NamedLayer& layer) {
  const at::Tensor* updates =
      layer.module->named_buffers(/*recurse=*/false).find("num_batches_tracked");
  return updates && updates->defined() ? updates->item<double>() : HUGE_VAL;
}

std::vector<Watched> layers_to_watch(::torch::nn::Module& module) {
  std::vector<Watched> watched;
  for (NamedLayer& layer : named_layers(module)) {
    if (!layer.module->is_training()) continue;
    const double updates = updates_of(layer);
    watched.push_back({std::move(layer), {}, {}, {}, {}, updates});
  }
  if (watched.empty()) {
    throw ArgumentError("module: expected layers of normscope in training, got " + module.name() +
                        " without; normscope::nn::convert makes them");
  }
  return watched;
}

// The hosts of the ranks. Throws if the ranks differ in layers, batches or wanted noise.
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
    throw ArgumentError("noise: expected the same number on every rank, got " +
                        c10::str(at::ArrayRef<double>(column(2))));
  }
  std::vector<std::int64_t> hosts;
  for (const double host : column(3)) hosts.push_back(static_cast<std::int64_t>(host));
  return hosts;
}

// Throws on all ranks unless every layer ran as often on each of them.
void check_calls(const std::vector<Watched>& watched, const RankGroup& group) {
  Row own;
  for (const Watched& each : watched) own.push_back(static_cast<double>(each.calls.size()));
  const std::vector<Row> ranks = gather(own, "recommend_scopes, calls", group);
  for (std::size_t i = 0; i < watched.size(); ++i) {
    Row calls;
    for (const Row& rank : ranks) calls.push_back(rank[i]);
    if (std::ranges::all_of(calls, [&](double count) { return count == calls[0]; })) continue;
    throw ArgumentError("module: expected " + named_or_module(watched[i].layer.name) +
                        " to run as often on every rank, got " +
                        c10::str(at::ArrayRef<double>(calls)) + " times");
  }
}

// The outputs with a gradient; the real and the imaginary part of a complex one.
std::vector<at::Tensor> outputs_of(const std::vector<Watched>& watched, const Forward& forward,
                                   std::int64_t batch, std::int64_t parts) {
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& output : forward(batch)) {
    if (!output.defined() || !output.requires_grad()) continue;
    outputs.push_back(output.is_complex() ? at::real(output) : output);
    if (output.is_complex()) outputs.push_back(at::imag(output));
  }
  if (outputs.empty()) {
    throw ArgumentError(
        "forward: expected outputs with a gradient, whose noise can be measured, got none");
  }
  for (const Watched& each : watched) {
    for (const WatchedCall& call : each.calls) {
      if (parts == 1 || call.x.size(0) >= parts) continue;
      throw ArgumentError("batches: expected at least " + std::to_string(parts) +
                          " samples, one for each rank, got " + std::to_string(call.x.size(0)) +
                          " in " + named_or_module(each.layer.name));
    }
  }
  return outputs;
}

// Runs the module over the batches, and measures the layers.
void run(std::vector<Watched>& watched, std::int64_t batches, const Shares& shares,
         const Forward& forward, const RankGroup& group) {
  const c10::InferenceMode without_inference_mode(false);
  const at::AutoGradMode with_gradients(true);
  // All messages since the previous layer's forward belong to this layer.
  CommunicationCounters before = communication_counters();
  for (Watched& each : watched) {
    each.layer.options->scope(Scope::world());
    each.layer.observed->observer = [&each, &before](const at::Tensor& x, const at::Tensor& z) {
      const CommunicationCounters after = communication_counters();
      each.exchanges += after.calls - before.calls;
      each.seconds += after.seconds - before.seconds;
      before = after;
      return each.observe(x, z);
    };
  }
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    before = communication_counters();
    const std::vector<at::Tensor> outputs = with_notified_peers(
        group, [&] { return outputs_of(watched, forward, batch, shares.parts); });
    check_calls(watched, group);
    with_notified_peers(group, [&] { measure(watched, outputs, batch, shares, group); });
  }
}

std::int64_t exchange_bytes_of(const NamedLayer& layer) {
  return (limbs_size(layer.options->num_features()) + kHeaderSize) *
         static_cast<std::int64_t>(sizeof(double));
}

// Adds up the noise of all ranks. Batches without the layer have none.
LayerNoise noise_of_ranks(Watched& watched, std::int64_t batches, LayerPlan& plan,
                          const RankGroup& group) {
  const std::size_t candidates = watched.samples.size();
  watched.noise.resize(static_cast<std::size_t>(batches), Row(candidates));
  Row own = {watched.updates,
             watched.seconds / static_cast<double>(std::max<std::int64_t>(watched.exchanges, 1))};
  for (const Row& row : watched.noise) own.insert(own.end(), row.begin(), row.end());
  Row sums(own.size());
  double updates = HUGE_VAL;
  for (const Row& of_rank :
       gather(own, "recommend_scopes, noise of " + named_or_module(watched.layer.name), group)) {
    updates = std::min(updates, of_rank[0]);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of_rank[i];
  }
  if (std::isfinite(updates)) plan.updates = static_cast<std::int64_t>(updates);
  if (watched.exchanges > 0) plan.exchange_seconds = sums[1] / group.size();
  plan.exchange_bytes = exchange_bytes_of(watched.layer);
  LayerNoise noise{.layer = watched.layer.name,
                   .exchange_bytes = plan.exchange_bytes,
                   .is_trained = updates >= static_cast<double>(kTrainedUpdates),
                   .candidates = std::vector<CandidateNoise>(candidates)};
  for (std::size_t k = 0; k < candidates; ++k) {
    CandidateNoise& candidate = noise.candidates[k];
    for (std::size_t i = 2 + k; i < sums.size(); i += candidates) {
      candidate.noise.push_back(sums[i]);
    }
    candidate.samples = watched.samples[k];
    candidate.elements = watched.elements[k];
    plan.noise.push_back(std::accumulate(candidate.noise.begin(), candidate.noise.end(), 0.0) /
                         static_cast<double>(batches));
  }
  return noise;
}

}  // namespace

ScopePlan recommend_scopes(::torch::nn::Module& module, std::int64_t batches,
                           const Forward& forward, const RankGroup& group,
                           const RecommendOptions& options) {
  std::vector<Watched> watched = with_notified_peers(group, [&] {
    check_arguments(batches, forward, group, options);
    return layers_to_watch(module);
  });
  // Before the ranks exchange: ranks that are threads share torch's generator.
  const LeftAsItIs left_as_it_is(module);
  Shares shares{.first = group.rank(),
                .parts = options.ranks(),
                .hosts = agree(watched, batches, options.noise(), group)};
  if (batches == 0) throw ArgumentError("batches: expected at least one, got 0");
  if (group.size() == 1) shares.hosts.assign(static_cast<std::size_t>(options.ranks()), 0);
  run(watched, batches, shares, forward, group);
  ScopePlan plan{.candidates = candidate_scopes(shares.hosts),
                 .layers = {},
                 .allowed = options.noise(),
                 .noise = {},
                 .ranks = std::ssize(shares.hosts),
                 .batches = batches};
  std::vector<LayerNoise> noise;
  for (Watched& each : watched) {
    if (each.noise.empty()) continue;
    LayerPlan& layer = plan.layers.emplace_back();
    layer.layer = each.layer.name;
    layer.channels = each.layer.options->num_features();
    noise.push_back(noise_of_ranks(each, batches, layer, group));
  }
  const std::vector<std::size_t> chosen = choose_scopes(noise, options.noise());
  for (std::size_t i = 0; i < chosen.size(); ++i) plan.layers[i].chosen = chosen[i];
  plan.noise = total_noise(noise, chosen);
  return plan;
}

}  // namespace normscope::nn
