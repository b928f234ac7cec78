// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/recommend_scopes.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/real.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
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
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/nn/layers.h"
#include "normscope/torch/ops/output_noise.h"

namespace normscope::nn {
namespace {

// torch's default generators, of the host and of the devices that the parameters are on.
std::vector<at::Generator> generators_of(const ::torch::nn::Module& module) {
  std::vector<at::Generator> generators = {at::globalContext().defaultGenerator(at::kCPU)};
  std::set<c10::DeviceIndex> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    if (!parameter.is_cuda() || !seen.insert(parameter.get_device()).second) continue;
    generators.push_back(at::globalContext().defaultGenerator(parameter.device()));
  }
  return generators;
}

// Remembers the state of a module, and restores it when this object is destroyed.
class LeftAsItIs {
 public:
  explicit LeftAsItIs(::torch::nn::Module& module) {
    for (const NamedLayer& layer : named_layers(module)) {
      layers_.push_back({layer, layer.options->scope(), layer.observed->observer});
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : module.buffers()) {
      if (buffer.defined()) buffers_.emplace_back(buffer, buffer.clone());
    }
    for (at::Generator& generator : generators_of(module)) {
      const std::lock_guard lock(generator.mutex());
      generators_.emplace_back(generator, generator.get_state());
    }
  }
  LeftAsItIs(const LeftAsItIs&) = delete;
  LeftAsItIs& operator=(const LeftAsItIs&) = delete;
  ~LeftAsItIs() {
    const c10::InferenceMode may_write_to_inference_tensors;
    for (auto& [layer, scope, observer] : layers_) {
      layer.options->scope(scope);
      layer.observed->observer = std::move(observer);
    }
    for (const auto& [buffer, value] : buffers_) buffer.resize_(value.sizes()).copy_(value);
    for (auto& [generator, state] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  struct Layer {
    NamedLayer layer;
    Scope scope;
    decltype(Observed::observer) observer;
  };

  std::vector<Layer> layers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;        // with their values
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;  // with their states
};

std::string named_or_module(const std::string& layer) { return layer.empty() ? "module" : layer; }

// The numbers of all ranks, in rank order, for each of this rank's numbers.
std::vector<std::vector<double>> gather(const std::vector<double>& own, const std::string& what,
                                        const RankGroup& group) {
  const at::Tensor rows =
      binding::gather(at::tensor(own, at::kDouble), group.name(), "recommend_scopes, " + what);
  const at::Tensor numbers = rows.t().contiguous();
  std::vector<std::vector<double>> columns;
  const double* column = numbers.const_data_ptr<double>();
  for (; columns.size() < own.size(); column += rows.size(0)) {
    columns.emplace_back(column, column + rows.size(0));
  }
  return columns;
}

bool differ(const std::vector<double>& numbers) {
  return std::ranges::any_of(numbers, [&](double number) { return number != numbers[0]; });
}

// If this rank alone throws, ends the wait of the others.
template <class Work>
auto with_notified_peers(const RankGroup& group, const Work& work) {
  try {
    return work();
  } catch (...) {
    if (group.size() > 1) binding::notify_peers({"world", group.name(), {}}, nullptr);
    throw;
  }
}

// A call of a layer in a forward.
struct WatchedCall {
  at::Tensor x;
  at::Tensor z;  // the output of the normalization; undefined in a block without gradients
};

// The measurements of a layer.
struct Watched {
  NamedLayer layer;
  double updates;                  // of the running statistics before; infinity: it has none
  std::vector<WatchedCall> calls;  // in the present batch
  std::vector<at::Tensor> noise;   // for each batch that reached the layer: [candidates, 3]
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

// Adds the noise of the calls of a batch. `to_noise` turns squared changes of the projection into
// noise; infinity if the outputs do not vary.
void add_batch(Watched& watched, std::span<const at::Tensor> gradients, double to_noise,
               const Shares& shares, const RankGroup& group) {
  std::vector<at::Tensor> of_calls;
  for (const WatchedCall& call : watched.calls) {
    at::Tensor dz;
    if (call.z.defined()) {
      dz = gradients.front();
      gradients = gradients.subspan(1);
    }
    of_calls.push_back(binding::output_noise(
        call.x, binding::defined_or_none(dz), binding::kNoTensor,
        binding::defined_or_none(weight_of(watched.layer)), watched.layer.options->eps(),
        call.z.defined() ? to_noise : HUGE_VAL, watched.layer.name, group.name(), shares.first,
        shares.parts, shares.hosts));
  }
  watched.calls.clear();
  if (of_calls.empty()) return;
  const at::Tensor fields = at::stack(of_calls);
  watched.noise.push_back(
      at::cat({fields.narrow(2, 0, 1).sum(0), fields.narrow(2, 1, 2).amin(0)}, 1));
}

// Runs a backward from the outputs of a batch, and adds the noise of its calls.
void measure(std::vector<Watched>& watched, const std::vector<at::Tensor>& outputs,
             std::int64_t batch, const Shares& shares, const RankGroup& group) {
  const auto [cotangents, to_noise] =
      binding::random_cotangents(outputs, batch, group.name(), shares.first, shares.parts);
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
    watched.push_back({std::move(layer), updates, {}, {}});
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
  const auto of_ranks =
      gather({static_cast<double>(hash.low_bits(kBits)), static_cast<double>(batches), wanted,
              static_cast<double>(host_identity())},
             "agreement", group);
  if (differ(of_ranks[0])) {
    throw ArgumentError(
        "module: expected the same layers on every rank, got other names or channels");
  }
  if (differ(of_ranks[1])) {
    throw ArgumentError(
        "batches: expected the same number on every rank, since layers synchronize, got " +
        c10::str(at::ArrayRef<double>(of_ranks[1])));
  }
  if (differ(of_ranks[2])) {
    throw ArgumentError("noise: expected the same number on every rank, got " +
                        c10::str(at::ArrayRef<double>(of_ranks[2])));
  }
  return {of_ranks[3].begin(), of_ranks[3].end()};
}

// Throws on all ranks unless every layer ran as often on each of them.
void check_calls(const std::vector<Watched>& watched, const RankGroup& group) {
  std::vector<double> own;
  for (const Watched& each : watched) own.push_back(static_cast<double>(each.calls.size()));
  const auto of_ranks = gather(own, "calls", group);
  for (std::size_t i = 0; i < watched.size(); ++i) {
    if (!differ(of_ranks[i])) continue;
    throw ArgumentError("module: expected " + named_or_module(watched[i].layer.name) +
                        " to run as often on every rank, got " +
                        c10::str(at::ArrayRef<double>(of_ranks[i])) + " times");
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

// Chooses the scopes.
ScopePlan plan_of(const std::vector<Watched>& watched, std::int64_t batches, double allowed,
                  const Shares& shares, const RankGroup& group) {
  ScopePlan plan{.candidates = candidate_scopes(shares.hosts),
                 .layers = {},
                 .allowed = allowed,
                 .noise = {},
                 .ranks = std::ssize(shares.hosts),
                 .batches = batches};
  c10::List<std::string> names;
  std::vector<std::int64_t> exchange_bytes;
  std::vector<double> updates, seconds;
  std::vector<at::Tensor> noise;
  for (const Watched& each : watched) {
    if (each.noise.empty()) continue;
    LayerPlan& layer = plan.layers.emplace_back();
    layer.layer = each.layer.name;
    layer.channels = each.layer.options->num_features();
    layer.exchange_bytes = exchange_bytes_of(each.layer);
    names.push_back(layer.layer);
    exchange_bytes.push_back(layer.exchange_bytes);
    updates.push_back(each.updates);
    seconds.push_back(each.seconds / static_cast<double>(each.exchanges));
    noise.push_back(at::stack(each.noise));
  }
  const auto [scopes, ranks, measured, fewest_updates, mean_seconds, chosen, mean, standard_error] =
      binding::choose_scopes_of(names, exchange_bytes, updates, seconds, noise, batches, allowed,
                                group.name(), shares.hosts);
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    LayerPlan& layer = plan.layers[i];
    for (std::int64_t k = 0; k < std::ssize(plan.candidates); ++k) {
      layer.noise.push_back(measured[i][k][0].item<double>());
    }
    layer.chosen = static_cast<std::size_t>(chosen[i]);
    const double fewest = fewest_updates[i];
    if (std::isfinite(fewest)) layer.updates = static_cast<std::int64_t>(fewest);
    if (!std::isnan(mean_seconds[i])) layer.exchange_seconds = mean_seconds[i];
  }
  plan.noise = {.mean = mean, .standard_error = standard_error};
  return plan;
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
  return plan_of(watched, batches, options.noise(), shares, group);
}

}  // namespace normscope::nn
