// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <torch/library.h>

#include "normscope/batch_norm/exchange.h"
#include "normscope/comm/group_status.h"
#include "normscope/comm/processes.h"
#include "normscope/core/environment.h"
#include "normscope/core/resolution.h"
#include "normscope/core/scope.h"
#include "normscope/core/scope_choice.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/kernels.h"
#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/finite.h"
#include "normscope/torch/calls/recomputation.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/registry.h"
#include "normscope/torch/ops/output_noise.h"
#include "normscope/torch/tensors/kernels_in_use.h"

namespace normscope::binding {
namespace {

// Divides ranks of imagined hosts, with `samples` samples each. Returns the resolved scope, and the
// leader of each rank (core/resolution.h).
std::tuple<std::string, std::vector<std::int64_t>> divide_ranks(std::string_view scope,
                                                                std::int64_t samples,
                                                                at::IntArrayRef host_of_rank) {
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  const Scope resolved = resolve_norm_batch(Scope::parse(scope), samples, ranks);
  const std::vector<int> leaders = leaders_of(resolved, {host_of_rank.data(), host_of_rank.size()});
  return {resolved.str(), std::vector<std::int64_t>(leaders.begin(), leaders.end())};
}

// The version; what decides how a graph records a layer: the version, and the kernels at hand; the
// numbers of core/scope_choice.h: the default noise, samples, elements, and updates; and what
// Python needs of the variables. Checks all variables.
using Settings = std::tuple<std::string, std::string, std::vector<double>, bool,
                            std::optional<double>, std::int64_t>;
Settings settings() {
  check_all_variables();
  std::string recorder = NORMSCOPE_VERSION;
  if (device_kernels() != nullptr) recorder += " cuda";
  if (torch_kernels_are_forced()) recorder += " torch";
  std::optional<double> seconds;
  if (const auto limit = chosen_time_limit()) {
    seconds = std::chrono::duration<double>(*limit).count();
  }
  std::vector<double> limits = {kDefaultOutputNoise, kLeastSamples, kLeastElements,
                                kTrainedUpdates};
  return {NORMSCOPE_VERSION, std::move(recorder), std::move(limits), has_exact_graphs(),
          seconds,           host_identity()};
}

std::string cuda_support() {
  if (device_kernels() == nullptr) return "not built";
  const std::string why_not = device_kernels()->why_not();
  return why_not.empty() ? "built" : "built, but the device cannot run it: " + why_not;
}

// The kernels of the host, those in use, the state of CUDA, and the kernels of each device. Chooses
// the kernels for good, and may start the driver of a device.
std::tuple<std::vector<std::string>, std::string, std::string, std::vector<std::string>>
installation(const c10::List<std::string>& devices) {
  std::vector<std::string> kernels, of_devices;
  for (const Kernels* each : available_kernels()) kernels.emplace_back(each->name);
  for (const std::string& device : devices) of_devices.push_back(kernels_of_device(device));
  return {std::move(kernels), std::string(default_kernels().name), cuda_support(),
          std::move(of_devices)};
}

// What comm/group_status.h says of a process.
std::tuple<std::string, std::string> status_and_fault(std::int64_t process) {
  return {status_of_process(process), fault_of_peers(process)};
}

std::tuple<std::int64_t, std::int64_t, double> counters() {
  const auto [calls, bytes, seconds] = communication_counters();
  return {calls, bytes, seconds};
}

std::vector<at::Tensor> copies_of(at::TensorList values) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& value : values) copies.push_back(value.clone());
  return copies;
}

}  // namespace

// The ops that Python calls. Tensors: x, y, dy, dx [N, C, *]; weight, bias, running_mean,
// running_var and their gradients [C]; num_batches_tracked []; statistics [slices, 3, C], float64,
// or, with spread and counts, the mean of torch's kernels (ForwardTensors). grad_t is the gradient,
// with respect to t, of a loss that is differentiated a second time.
//
// batch_norm_statistics and batch_norm_gradient_sums are forward and backward without the
// elementwise part. They return coefficients [slices, ., C], which other ops of the graph
// apply (graph.h). If an activation follows, the backward needs bias; if the forward had a
// residual, it also needs y, and returns the residual's gradient. batch_norm_with_statistics
// recomputes a forward's y from its statistics; it has no gradient of its own. A forward adds the
// moments of its norm batch to `accumulated`, from which batch_norm_finalize updates running
// statistics. This op and the part ops after it are those of batch_norm/moments.h. Only autograd
// sets needs_backward; callers leave it out.
//
// group_name is the name of a process group, "" for none. layer is a qualified name, "" for none.
// dims are the numbers of dimensions that x may have, [] for any. Calls that may wait for other
// ranks do not hold Python's lock: torch releases it around the ops of torch.ops, and in its
// autograd engine.
TORCH_LIBRARY(normscope, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "batch_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
      "int[] dims, str slice_stats, str scope, str group_name, str layer, *, "
      "Tensor(d!)? accumulated=None, bool? needs_backward=None, str activation=\"none\", "
      "float negative_slope=0., Tensor? residual=None, str? graph=None) "
      "-> (Tensor y, Tensor statistics, Tensor spread, Tensor counts)",
      tags);
  m.def(
      "batch_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, "
      "bool wants_dx, bool wants_dweight, bool wants_dbias, str scope, str group_name, str layer, "
      "*, str activation=\"none\", float negative_slope=0., Tensor? bias=None, Tensor? y=None, "
      "Tensor? spread=None, Tensor? counts=None) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)",
      tags);
  m.def(
      "batch_norm_statistics(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, Tensor? num_batches_tracked, float? momentum, float eps, "
      "int[] dims, str slice_stats, str scope, str group_name, str layer, *, "
      "Tensor? accumulated=None, bool? needs_backward=None) -> (Tensor statistics, "
      "Tensor coefficients, Tensor running_mean, Tensor running_var, Tensor num_batches_tracked, "
      "Tensor accumulated)",
      // A compiler may change the layout of x to suit other ops.
      {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout});
  m.def(
      "batch_norm_gradient_sums(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, "
      "bool wants_dx, bool wants_dweight, bool wants_dbias, str scope, str group_name, str layer) "
      "-> (Tensor coefficients, Tensor dweight, Tensor dbias)",
      tags);
  m.def(
      "batch_norm_double_backward(Tensor? grad_dx, Tensor? grad_dweight, Tensor? grad_dbias, "
      "Tensor dy, Tensor x, Tensor? weight, Tensor statistics, str scope, str group_name, "
      "str layer, *, Tensor? spread=None, Tensor? counts=None) "
      "-> (Tensor grad_dy, Tensor grad_x, Tensor grad_weight)",
      tags);
  m.def(
      "batch_norm_with_statistics(Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, *, "
      "str activation=\"none\", float negative_slope=0., Tensor? residual=None, "
      "Tensor? spread=None, Tensor? counts=None) -> Tensor y",
      tags);

  m.def("batch_norm_moments(Tensor x) -> Tensor moments", tags);
  m.def(
      "batch_norm_finalize(Tensor moments, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, float? momentum, float eps, ScalarType dtype) "
      "-> Tensor statistics",
      tags);
  m.def(
      "batch_norm_part_gradient_sums(Tensor dy, Tensor x, Tensor statistics) "
      "-> (Tensor sums, Tensor dweight, Tensor dbias)",
      tags);
  m.def(
      "batch_norm_part_input_gradient(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, "
      "Tensor sums) -> Tensor dx",
      tags);

  m.def(
      "portable_update(Tensor mean, Tensor var, Tensor count, Tensor? running_mean, "
      "Tensor? running_var, Tensor? num_batches_tracked, Tensor? accumulated, float? momentum, "
      "bool may_be_too_small) -> (Tensor running_mean, Tensor running_var, "
      "Tensor num_batches_tracked, Tensor accumulated)",
      tags);

  m.def("keep_order(Tensor[] values) -> Tensor[] values", tags);

  m.def(
      "settings() -> (str version, str recorder, float[] limits_of_scopes, bool exact_graphs, "
      "float? time_limit, int host)",
      op_of(&settings));
  m.def("resolve_scope(str scope, str group_name, int? samples) -> str", op_of(&resolve_scope));
  m.def("divide_ranks(str scope, int samples, int[] host_of_rank) -> (str resolved, int[] leaders)",
        op_of(&divide_ranks));
  m.def("installation(str[] devices) -> (str[] kernels, str in_use, str cuda, str[] of_devices)",
        &installation);
  m.def("set_detect_non_finite(bool wanted) -> bool before", &set_detect_non_finite);
  m.def("set_updates_in_backward(bool wanted) -> bool before", &set_updates_in_backward);
  m.def("batch_was_counted() -> bool", &batch_was_counted);
  m.def("gather(Tensor own, str group_name, str what) -> Tensor all", op_of(&gather));
  m.def(
      "random_cotangents(Tensor[] outputs, int batch, str group_name, int first, int parts) "
      "-> (Tensor[] cotangents, float to_noise)",
      op_of(&random_cotangents));
  m.def(
      "output_noise(Tensor x, Tensor? dz, Tensor? mask, Tensor? weight, float eps, float to_noise, "
      "str layer, str group_name, int first, int parts, int[] host_of_rank) -> Tensor noise",
      op_of(&output_noise));
  m.def(
      "choose_scopes(str[] layers, int[] exchange_bytes, float[] updates, float[] seconds, "
      "Tensor[] noise, int batches, float allowed, str group_name, int[] host_of_rank) "
      "-> (str[] scopes, int[] ranks, Tensor[] measured, float[] fewest_updates, "
      "float[] mean_seconds, int[] chosen, float noise, float standard_error)",
      op_of(&choose_scopes_of));
  m.def("status_of_process(int process) -> (str status, str fault_of_peers)",
        op_of(&status_and_fault));
  m.def("fail_exchanges(str reason, *, str? scope=None, str group_name=\"\") -> ()",
        &fail_exchanges);
  m.def("forget_groups(*, bool only_destroyed=False) -> ()", &forget_groups);
  m.def("note_change_of_scope() -> int number", &note_change_of_scope);
  m.def("change_before_forward() -> int number", &change_before_forward);
  m.def("know_process_group(str group_name) -> ()", &know_process_group);
  m.def("communication_counters() -> (int calls, int bytes, float seconds)", &counters);
}

TORCH_LIBRARY_IMPL(normscope, CompositeExplicitAutograd, m) { m.impl("keep_order", &copies_of); }

}  // namespace normscope::binding
