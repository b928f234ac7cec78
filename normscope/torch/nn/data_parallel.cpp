// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/data_parallel.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include "normscope/core/header.h"

namespace normscope::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

// The numbers of a message: 512 KiB, which fit into a core's cache.
constexpr std::int64_t kBucketNumbers = std::int64_t{1} << 16;

// A complex number is two.
std::int64_t numbers_in(const at::Tensor& tensor) {
  return tensor.is_complex() ? 2 * tensor.numel() : tensor.numel();
}

std::int64_t numbers_in(const Tensors& tensors) {
  std::int64_t numbers = 0;
  for (const at::Tensor& tensor : tensors) numbers += numbers_in(tensor);
  return numbers;
}

// Consecutive tensors whose numbers fit into one message. A larger tensor gets its own message.
// Without tensors there is an empty one, in which ranks that have some notice it.
std::vector<Tensors> buckets_of(const Tensors& tensors) {
  std::vector<Tensors> buckets(1);
  for (const at::Tensor& tensor : tensors) {
    const bool is_full = numbers_in(buckets.back()) + numbers_in(tensor) > kBucketNumbers;
    if (is_full && !buckets.back().empty()) buckets.emplace_back();
    buckets.back().push_back(tensor);
  }
  return buckets;
}

// The numbers of several tensors, one after the other, followed by room for a header.
class Message {
 public:
  explicit Message(std::int64_t numbers)
      : numbers_(static_cast<std::size_t>(numbers + kHeaderSize)) {}

  // The next of its numbers, in the shape of `like`, and complex if that is.
  at::Tensor next(const at::Tensor& like) {
    const at::ScalarType dtype = like.is_complex() ? at::kComplexDouble : at::kDouble;
    const at::Tensor part =
        at::from_blob(numbers_.data() + used_, like.sizes(), at::TensorOptions(dtype));
    used_ += numbers_in(like);
    return part;
  }

  void all_reduce(const std::string& what, const RankGroup& group) {
    group.all_reduce(
        {.layer = what, .scope = "world", .direction = Direction::kParameters, .channels = used_},
        numbers_);
    used_ = 0;
  }

 private:
  std::vector<double> numbers_;
  std::int64_t used_ = 0;
};

// The name of a call's messages. If there are several, it tells the number of all numbers: ranks
// with others notice it in the first message.
std::string name_of_messages(std::string_view what, const Tensors& tensors, std::size_t messages) {
  if (messages <= 1) return std::string(what);
  return std::string(what) + " (" + std::to_string(numbers_in(tensors)) + " numbers in all)";
}

}  // namespace

void broadcast_parameters(::torch::nn::Module& module, const RankGroup& group) {
  const at::NoGradGuard no_grad;
  Tensors tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  const std::vector<Tensors> buckets = buckets_of(tensors);
  const std::string name = name_of_messages("broadcast_parameters", tensors, buckets.size());
  for (const Tensors& bucket : buckets) {
    Message message(numbers_in(bucket));
    // All ranks but one send zeros, so the sum is what that rank sent.
    for (const at::Tensor& tensor : bucket) {
      const at::Tensor part = message.next(tensor);
      if (group.rank() == 0) part.copy_(tensor);
    }
    message.all_reduce(name, group);
    for (const at::Tensor& tensor : bucket) tensor.copy_(message.next(tensor));
  }
}

void average_gradients(::torch::nn::Module& module, const RankGroup& group) {
  const at::NoGradGuard no_grad;
  Tensors parameters;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.requires_grad()) parameters.push_back(parameter);
  }
  const std::vector<Tensors> buckets = buckets_of(parameters);
  const std::string name = name_of_messages("average_gradients", parameters, buckets.size());
  for (const Tensors& bucket : buckets) {
    const at::Tensor ranks_with_gradient =
        at::zeros({static_cast<std::int64_t>(bucket.size())}, at::kDouble);
    Message message(numbers_in(bucket) + ranks_with_gradient.numel());
    for (std::size_t i = 0; i < bucket.size(); ++i) {
      const at::Tensor part = message.next(bucket[i]);
      if (!bucket[i].grad().defined()) continue;
      part.copy_(bucket[i].grad().to_dense());
      ranks_with_gradient[static_cast<std::int64_t>(i)] = 1.0;
    }
    message.next(ranks_with_gradient).copy_(ranks_with_gradient);
    message.all_reduce(name, group);
    Tensors means;
    for (const at::Tensor& parameter : bucket) means.push_back(message.next(parameter));
    const at::Tensor present = message.next(ranks_with_gradient);
    for (std::size_t i = 0; i < bucket.size(); ++i) {
      if (present[static_cast<std::int64_t>(i)].item<double>() == 0.0) continue;
      at::Tensor& gradient = bucket[i].mutable_grad();
      if (!gradient.defined() || gradient.is_sparse()) gradient = at::empty_like(bucket[i]);
      gradient.copy_(means[i].div_(group.size()));
    }
  }
}

}  // namespace normscope::nn
