// SPDX-License-Identifier: Apache-2.0
#include "segmentation/network.h"

#include <vector>

#include <torch/nn/functional/upsampling.h>
#include <torch/nn/modules/pooling.h>

namespace {

using torch::nn::Conv2dOptions;

// The dilation of each atrous branch, on a map with a quarter of the image's side.
constexpr std::int64_t kAtrousRates[] = {1, 3, 6};
constexpr std::int64_t kBranches = 4;  // and the image-level one

// One after the other, which draws their initial weights in this order.
torch::nn::Sequential encoder(std::int64_t width) {
  torch::nn::Sequential layers;
  for (const ConvolutionOptions& options : {
           ConvolutionOptions{.inputs = 3, .outputs = width, .stride = 2},
           ConvolutionOptions{.inputs = width, .outputs = width},
           ConvolutionOptions{.inputs = width, .outputs = 2 * width, .stride = 2},
           ConvolutionOptions{.inputs = 2 * width, .outputs = 2 * width},
           ConvolutionOptions{.inputs = 2 * width, .outputs = 4 * width, .dilation = 2},
           ConvolutionOptions{.inputs = 4 * width, .outputs = 4 * width, .dilation = 4},
       }) {
    layers->push_back(Convolution(options));
  }
  return layers;
}

torch::nn::ModuleList atrous_branches(std::int64_t width) {
  torch::nn::ModuleList branches;
  for (const std::int64_t rate : kAtrousRates) {
    branches->push_back(Convolution(
        ConvolutionOptions{.inputs = 4 * width, .outputs = 2 * width, .dilation = rate}));
  }
  return branches;
}

}  // namespace

ConvolutionImpl::ConvolutionImpl(const ConvolutionOptions& options)
    : convolution_(Conv2dOptions(options.inputs, options.outputs, options.kernel)
                       .stride(options.stride)
                       .padding(options.dilation * (options.kernel / 2))
                       .dilation(options.dilation)
                       .bias(false)),
      norm_(options.outputs) {
  register_module("0", convolution_);
  register_module("1", norm_);
}

at::Tensor ConvolutionImpl::forward(const at::Tensor& x) {
  return norm_->forward(convolution_->forward(x)).relu_();
}

SegmentationNetworkImpl::SegmentationNetworkImpl(std::int64_t class_count, std::int64_t width)
    : encoder_(encoder(width)),
      atrous_(atrous_branches(width)),
      image_level_(
          torch::nn::AdaptiveAvgPool2d(1),
          Convolution(ConvolutionOptions{.inputs = 4 * width, .outputs = 2 * width, .kernel = 1})),
      fuse_(ConvolutionOptions{.inputs = kBranches * 2 * width, .outputs = 4 * width}),
      classifier_(Conv2dOptions(4 * width, class_count, 1)) {
  register_module("encoder", encoder_);
  register_module("atrous", atrous_);
  register_module("image_level", image_level_);
  register_module("fuse", fuse_);
  register_module("classifier", classifier_);
}

at::Tensor SegmentationNetworkImpl::forward(const at::Tensor& images) {
  const at::Tensor features = encoder_->forward(images);
  std::vector<at::Tensor> branches;
  for (const auto& branch : *atrous_) {
    branches.push_back(branch->as<ConvolutionImpl>()->forward(features));
  }
  branches.push_back(
      image_level_->forward(features).expand({-1, -1, features.size(2), features.size(3)}));
  const at::Tensor logits = classifier_->forward(fuse_->forward(at::cat(branches, 1)));
  return torch::nn::functional::interpolate(
      logits, torch::nn::functional::InterpolateFuncOptions()
                  .size(std::vector<std::int64_t>{images.size(2), images.size(3)})
                  .mode(torch::kBilinear)
                  .align_corners(false));
}
