// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <normscope/core/scope.h>
#include <normscope/torch/groups/rank_group.h>
#include <normscope/torch/nn/batch_norm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>

struct ConvolutionOptions {
  std::int64_t inputs;
  std::int64_t outputs;
  std::int64_t kernel = 3;
  std::int64_t stride = 1;
  std::int64_t dilation = 1;
};

// Convolution that keeps the size (before its stride), batch normalization, ReLU.
class ConvolutionImpl : public torch::nn::Module {
 public:
  explicit ConvolutionImpl(const ConvolutionOptions& options);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Conv2d convolution_;
  normscope::nn::BatchNorm2d norm_;
};
TORCH_MODULE(Convolution);

// The network of examples/segmentation/network.py, whose parameters have the same names: dilated
// convolutions, three atrous branches next to an image-level one, a classifier.
class SegmentationNetworkImpl : public torch::nn::Module {
 public:
  explicit SegmentationNetworkImpl(std::int64_t class_count, std::int64_t width = 16);

  // images [N, 3, height, width] -> logits [N, class_count, height, width]
  at::Tensor forward(const at::Tensor& images);

 private:
  torch::nn::Sequential encoder_;
  torch::nn::ModuleList atrous_;
  torch::nn::Sequential image_level_;
  Convolution fuse_;
  torch::nn::Conv2d classifier_;
};
TORCH_MODULE(SegmentationNetwork);
