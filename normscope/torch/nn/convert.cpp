// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/convert.h"

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/batch_norm.h"
#include "normscope/torch/nn/layers.h"

namespace normscope::nn {
namespace {

using ::torch::nn::AnyModule;
using ::torch::nn::Module;

// A layer that can be replaced has two owners: the registry, and the map that lists children.
constexpr long kOwnersOfRegistered = 2;

template <class Ours>
AnyModule converted_to(const Module& module) {
  const auto& layer = dynamic_cast<const typename Ours::ContainedType::TorchImpl&>(module);
  Ours ours(BatchNormOptions(layer.options.num_features())
                .eps(layer.options.eps())
                .momentum(layer.options.momentum())
                .affine(layer.weight.defined())
                .track_running_stats(layer.running_mean.defined()));
  ours->adopt(layer);
  // Which may have changed since the layer was made.
  ours->options.track_running_stats(layer.options.track_running_stats());
  return AnyModule(ours);
}

// normscope's layer with the contents of torch's; empty for any other module. Classes that derive
// from torch's have a forward of their own.
AnyModule converted(const Module& module) {
  const std::type_info& type = typeid(module);
  if (type == typeid(::torch::nn::BatchNorm1dImpl)) return converted_to<BatchNorm1d>(module);
  if (type == typeid(::torch::nn::BatchNorm2dImpl)) return converted_to<BatchNorm2d>(module);
  if (type == typeid(::torch::nn::BatchNorm3dImpl)) return converted_to<BatchNorm3d>(module);
  return {};
}

using Place = std::function<void(const AnyModule& layer)>;

// The places in which a container of torch holds the child besides its registry, each as a function
// that puts a layer there. A class that derives from a container may have registered other
// children.
std::vector<Place> places_in_container(Module& module, const Module& child) {
  std::vector<Place> places;
  const auto add_if_held = [&](const std::shared_ptr<Module>& held, Place place) {
    if (held.get() == &child) places.push_back(std::move(place));
  };
  if (auto* sequential = dynamic_cast<::torch::nn::SequentialImpl*>(&module)) {
    for (AnyModule& each : *sequential) {
      add_if_held(each.ptr(), [&each](const AnyModule& layer) { each = layer; });
    }
  } else if (auto* list = dynamic_cast<::torch::nn::ModuleListImpl*>(&module)) {
    for (std::shared_ptr<Module>& each : *list) {
      add_if_held(each, [&each](const AnyModule& layer) { each = layer.ptr(); });
    }
  } else if (auto* dict = dynamic_cast<::torch::nn::ModuleDictImpl*>(&module)) {
    for (auto& each : *dict) {
      add_if_held(each.value(), [&each](const AnyModule& layer) { each.value() = layer.ptr(); });
    }
  }
  return places;
}

[[noreturn]] void refuse(const std::string& layer, const std::string& why) {
  throw ArgumentError("convert: " + layer + ": " + why);
}

// The changes that convert() will make, determined before the first one.
class Plan {
 public:
  void visit(Module& module, const std::string& prefix) {
    for (const auto& child : module.named_children()) {
      const std::string name = prefix + child.key();
      const auto [seen, is_new] = seen_.try_emplace(child.value().get());
      AnyModule& layer = seen->second;
      if (is_new) layer = converted(*child.value());
      if (!layer.is_empty()) {
        if (is_new) scoped_.emplace_back(name, layer.ptr());
        replace(module, child.key(), child.value(), layer, name);
      } else if (is_new && options_of(*child.value()) != nullptr) {
        scoped_.emplace_back(name, child.value());
      } else if (is_new) {
        visit(*child.value(), name + ".");
      }
    }
  }

  // Returns the number of layers that now have the scope.
  std::size_t carry_out(const Scope& scope, const RankGroup& group) const {
    for (const auto& replace : replace_) replace();
    for (const auto& [name, layer] : scoped_) {
      options_of(*layer)
          ->scope(scope)
          .group(group.name())
          .layer_name(group.name_in_exchanges(name));
    }
    return scoped_.size();
  }

 private:
  void replace(Module& module, const std::string& key, const std::shared_ptr<Module>& child,
               const AnyModule& layer, const std::string& name) {
    std::vector<Place> places = places_in_container(module, *child);
    if (places.empty() && child.use_count() > kOwnersOfRegistered) {
      refuse(name, "expected a layer that only the registry holds, got one that a member of " +
                       module.name() +
                       " also holds and would keep using; declare it as normscope::nn's "
                       "layer there");
    }
    replace_.emplace_back([&module, key, layer, places = std::move(places)] {
      module.replace_module(key, layer.ptr());
      for (const Place& put : places) put(layer);
    });
  }

  // Every module below the first one, with the layer in its place or an empty one. A module may be
  // in several places.
  std::unordered_map<const Module*, AnyModule> seen_;
  std::vector<std::function<void()>> replace_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> scoped_;
};

}  // namespace

void convert(Module& module, const Scope& scope, const RankGroup& group) {
  if (BatchNormOptions* options = options_of(module)) {
    options->scope(scope).group(group.name());
    return;
  }
  if (!converted(module).is_empty()) {
    refuse(module.name(),
           "expected a module that holds layers, got a layer, which cannot be "
           "replaced in the variable that holds it");
  }
  Plan plan;
  plan.visit(module, "");
  if (plan.carry_out(scope, group) == 0) {
    TORCH_WARN("normscope::nn::convert: expected batch normalization layers in ", module.name(),
               ", got none");
  }
}

void set_scope(Module& module, const Scope& scope) {
  const std::vector<NamedLayer> layers = named_layers(module);
  for (const NamedLayer& layer : layers) layer.options->scope(scope);
  if (layers.empty()) {
    throw ArgumentError("set_scope: expected layers of normscope in " + module.name() +
                        ", got none");
  }
}

}  // namespace normscope::nn
