// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <torch/nn/module.h>

#include "normscope/core/attributes.h"

namespace normscope {
namespace nn NORMSCOPE_EXPORT {

// Files that Python can also read and write, unlike those of torch::save. In Python:
//
//   model.load_state_dict(dict(torch.load(path)))
//   torch.save(dict(model.state_dict()), path)

// Writes the parameters and buffers of `module` under their qualified names. Throws ArgumentError
// if the file cannot be written.
void save_state_dict(const ::torch::nn::Module& module, const std::string& path);

// Copies the tensors of a file into the parameters and buffers of `module`, which keep their dtypes
// and devices.
//
// Throws ArgumentError if the file cannot be read, lacks a name, has one that `module` lacks, or
// has another shape. Nothing is changed then.
void load_state_dict(::torch::nn::Module& module, const std::string& path);

}  // namespace nn
}  // namespace normscope
