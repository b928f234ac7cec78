// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/checkpoint.h"

#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "normscope/core/error.h"

namespace normscope::nn {
namespace {

using StateDict = std::map<std::string, at::Tensor>;

StateDict state_of(const ::torch::nn::Module& module) {
  StateDict state;
  for (const auto& parameter : module.named_parameters()) {
    state.emplace(parameter.key(), parameter.value());
  }
  for (const auto& buffer : module.named_buffers()) state.emplace(buffer.key(), buffer.value());
  return state;
}

c10::IValue unpickled(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes;
  try {
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios_base::failure&) {  // of a directory
    file.setstate(std::ios::failbit);
  }
  if (!file) throw ArgumentError("load_state_dict: " + path + ": cannot be read");
  try {
    return ::torch::jit::pickle_load(bytes);
  } catch (const std::exception&) {  // also std::bad_alloc, if a damaged length is huge
    throw ArgumentError("load_state_dict: " + path +
                        ": expected what torch.save(dict(model.state_dict()), file) writes in "
                        "Python, or save_state_dict");
  }
}

// Python saves a dict; save_state_dict() saves a tuple of pairs.
StateDict state_in(const std::string& path) {
  const c10::IValue value = unpickled(path);
  StateDict state;
  const auto add = [&](const c10::IValue& name, const c10::IValue& tensor) {
    if (!name.isString() || !tensor.isTensor()) {
      throw ArgumentError("load_state_dict: " + path + ": expected tensors under names");
    }
    state.emplace(name.toStringRef(), tensor.toTensor());
  };
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) add(entry.key(), entry.value());
  } else if (value.isTuple()) {
    for (const c10::IValue& pair : value.toTupleRef().elements()) {
      const bool is_pair = pair.isTuple() && pair.toTupleRef().size() == 2;
      add(is_pair ? pair.toTupleRef().elements()[0] : c10::IValue(),
          is_pair ? pair.toTupleRef().elements()[1] : c10::IValue());
    }
  } else {
    throw ArgumentError("load_state_dict: " + path + ": expected a dict, got " + value.tagKind());
  }
  return state;
}

void check_fits(const StateDict& given, const StateDict& expected, const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw ArgumentError("load_state_dict: " + path + ": " + why);
  };
  for (const auto& [name, tensor] : expected) {
    const auto found = given.find(name);
    if (found == given.end()) {
      refuse("expected " + name + ", which is missing");
    } else if (found->second.sizes() != tensor.sizes()) {
      refuse(name + ": expected shape " +
             c10::str(tensor.sizes(), ", got ", found->second.sizes()));
    }
  }
  for (const auto& [name, tensor] : given) {
    if (!expected.contains(name)) refuse(name + ": the module has no tensor of this name");
  }
}

}  // namespace

void save_state_dict(const ::torch::nn::Module& module, const std::string& path) {
  // A dict would carry a mark of its type, which torch.load() takes for code.
  std::vector<c10::IValue> pairs;
  for (const auto& [name, tensor] : state_of(module)) {
    pairs.emplace_back(c10::ivalue::Tuple::create(name, tensor.detach()));
  }
  const std::vector<char> bytes =
      ::torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(pairs)));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw ArgumentError("save_state_dict: " + path + ": cannot be written");
}

void load_state_dict(::torch::nn::Module& module, const std::string& path) {
  const StateDict given = state_in(path);
  const StateDict expected = state_of(module);
  check_fits(given, expected, path);
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : expected) tensor.copy_(given.at(name));
}

}  // namespace normscope::nn
