// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/convert.h"

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/text_of.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A torch::nn::Sequential cannot be nested in another one.
struct BlockImpl : torch::nn::Module {
  BlockImpl() { layers = register_module("layers", layers); }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers{
      torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(4).affine(false))};
};
TORCH_MODULE(Block);

template <class Impl>
Impl& layer_at(const torch::nn::Sequential& net, std::size_t index) {
  return dynamic_cast<Impl&>(*net->ptr(index));
}

torch::nn::Sequential convertible_network() {
  return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)),
                               torch::nn::BatchNorm2d(4), Block());
}

// Registers a child that it does not call in order.
struct Shortcut : torch::nn::SequentialImpl {
  Shortcut() {
    shortcut = register_module("shortcut", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 1)));
    push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 1)));
    push_back(torch::nn::BatchNorm2d(4));
  }
  torch::nn::Conv2d shortcut{nullptr};
};

TEST(Convert, ReplacesTheLayerInASequentialWithOtherChildren) {
  const RankGroup group = alone();
  const auto net = std::make_shared<Shortcut>();

  nn::convert(*net, Scope::slices(2), group);

  ASSERT_EQ(net->size(), 2U);
  EXPECT_NE(dynamic_cast<torch::nn::Conv2dImpl*>(net->ptr(0).get()), nullptr);
  EXPECT_NE(dynamic_cast<nn::BatchNorm2dImpl*>(net->ptr(1).get()), nullptr);
  EXPECT_EQ(net->ptr(1), net->named_children()["1"]);
}

struct WithItsOwnForward : torch::nn::BatchNorm2dImpl {
  using BatchNorm2dImpl::BatchNorm2dImpl;
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): as programs do
  at::Tensor forward(const at::Tensor& x) { return 2 * BatchNorm2dImpl::forward(x); }
};

TEST(Convert, LeavesClassesThatDeriveFromTorchsAlone) {
  const RankGroup group = alone();
  const auto layer = std::make_shared<WithItsOwnForward>(4);
  torch::nn::Sequential net(torch::nn::BatchNorm2d(3));
  net->push_back(layer);

  nn::convert(*net, Scope::slices(2), group);

  EXPECT_EQ(net->ptr(1), layer);
}

TEST(Convert, ReplacesTheLayersOfSequentialsAndKeepsWhatTheyHold) {
  const RankGroup group = alone();
  torch::nn::Sequential net = convertible_network();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const at::Tensor weight = layer_at<torch::nn::BatchNorm2dImpl>(net, 1).weight;
  const at::Tensor running_mean = layer_at<torch::nn::BatchNorm2dImpl>(net, 1).running_mean;

  nn::convert(*net, Scope::slices(2), group);

  const auto& layer = layer_at<nn::BatchNorm2dImpl>(net, 1);
  EXPECT_TRUE(layer.weight.is_same(weight));
  EXPECT_EQ(layer.options.scope(), Scope::slices(2));
  EXPECT_EQ(layer.options.group(), group.name());
  EXPECT_EQ(layer.options.layer_name(), "1");
  const auto& nested = layer_at<nn::BatchNorm2dImpl>(layer_at<BlockImpl>(net, 2).layers, 0);
  EXPECT_EQ(nested.options.layer_name(), "2.layers.0");
  EXPECT_FALSE(nested.weight.defined());
  net->forward(torch::randn({4, 3, 5, 5})).square().sum().backward();
  optimizer.step();
  EXPECT_FALSE(torch::equal(layer.bias, torch::zeros({4})));
  EXPECT_FALSE(torch::equal(running_mean, torch::zeros({4})));
}

TEST(Convert, KeepsTheModeAndTheCheckpoint) {
  const RankGroup group = alone();
  torch::nn::Sequential net = convertible_network(), theirs = convertible_network();
  const at::Tensor x = torch::randn({4, 3, 5, 5});
  net->forward(x);
  net->eval();
  const at::Tensor expected = net->forward(x);

  nn::convert(*net, Scope::world(), group);

  EXPECT_TRUE(torch::equal(net->forward(x), expected));
  std::stringstream file;
  torch::save(net, file);
  torch::load(theirs, file);
  theirs->eval();
  EXPECT_TRUE(torch::equal(theirs->forward(x), expected));
}

struct HoldsALayer : torch::nn::Module {
  HoldsALayer() { norm = register_module("norm", torch::nn::BatchNorm2d(4)); }
  torch::nn::BatchNorm2d norm = nullptr;
};

struct LooksALayerUp : torch::nn::Module {
  LooksALayerUp() { register_module("norm", torch::nn::BatchNorm2d(4)); }
};

TEST(Convert, RefusesALayerThatAMemberHoldsBeforeAnythingHasChanged) {
  const RankGroup group = alone();
  torch::nn::Sequential net(torch::nn::BatchNorm2d(4));
  torch::nn::ModuleList whole;
  whole->push_back(net.ptr());
  whole->push_back(std::make_shared<HoldsALayer>());

  EXPECT_THAT(text_of<ArgumentError>([&] { nn::convert(*whole, Scope::world(), group); }),
              AllOf(HasSubstr("convert: 1.norm: expected a layer that only the registry "
                              "holds"),
                    HasSubstr("HoldsALayer also holds")));
  EXPECT_NO_THROW(layer_at<torch::nn::BatchNorm2dImpl>(net, 0));
}

TEST(Convert, ReplacesTheLayersOfListsAndDictsAndThoseThatOnlyTheRegistryHolds) {
  const RankGroup group = alone();
  torch::nn::ModuleDict dict;
  dict->update({{"norm", torch::nn::BatchNorm2d(4).ptr()}});
  torch::nn::ModuleList list;
  list->push_back(torch::nn::BatchNorm2d(4));
  list->push_back(dict.ptr());
  list->push_back(std::make_shared<LooksALayerUp>());

  nn::convert(*list, Scope::local(), group);

  EXPECT_NE(list[0]->as<nn::BatchNorm2dImpl>(), nullptr);
  EXPECT_NE(dict["norm"]->as<nn::BatchNorm2dImpl>(), nullptr);
  EXPECT_EQ(list[0], list->named_children()["0"]);
  EXPECT_EQ(dict["norm"], dict->named_children()["norm"]);
  EXPECT_NE(list[2]->named_children()["norm"]->as<nn::BatchNorm2dImpl>(), nullptr);
}

TEST(Convert, KeepsOneLayerThatIsInSeveralPlaces) {
  const RankGroup group = alone();
  const torch::nn::BatchNorm2d layer(3);
  torch::nn::Sequential one(layer, torch::nn::ReLU(), layer), other(layer);
  torch::nn::ModuleList whole;
  whole->push_back(one.ptr());
  whole->push_back(other.ptr());

  nn::convert(*whole, Scope::local(), group);

  auto& converted = layer_at<nn::BatchNorm2dImpl>(one, 0);
  EXPECT_EQ(converted.options.layer_name(), "0.0");
  EXPECT_EQ(one->ptr(2), one->ptr(0));
  EXPECT_EQ(other->ptr(0), one->ptr(0));
  one->forward(torch::randn({4, 3, 5, 5}));
  EXPECT_EQ(converted.num_batches_tracked.item<std::int64_t>(), 2);
}

TEST(Convert, KeepsBuffersThatAreNotTracked) {
  const RankGroup group = alone();
  torch::nn::BatchNorm2d layer(3);
  layer->options.track_running_stats(false);
  torch::nn::Sequential net(layer);

  nn::convert(*net, Scope::local(), group);

  const auto& converted = layer_at<nn::BatchNorm2dImpl>(net, 0);
  EXPECT_FALSE(converted.options.track_running_stats());
  EXPECT_EQ(converted.running_mean.data_ptr(), layer->running_mean.data_ptr());
}

TEST(Convert, RefusesALayerItselfAndWarnsWhereThereIsNone) {
  const RankGroup group = alone();
  torch::nn::BatchNorm2d layer(4);
  torch::nn::Sequential none(torch::nn::Linear(2, 2));

  EXPECT_THAT(text_of<ArgumentError>([&] { nn::convert(*layer, Scope::world(), group); }),
              HasSubstr("expected a module that holds layers, got a layer"));
  EXPECT_NO_THROW(nn::convert(*none, Scope::world(), group));
  EXPECT_THAT(text_of<ArgumentError>([&] { nn::set_scope(*none, Scope::world()); }),
              HasSubstr("set_scope: expected layers of normscope"));
}

TEST(Convert, TellsModelsOfOneGroupApart) {
  run_ranks(2, [](const RankGroup& group) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(3)), twin(torch::nn::BatchNorm1d(3));
    nn::convert(*net, Scope::world(), group);
    nn::convert(*twin, Scope::world(), group);
    const at::Tensor x = torch::randn({4, 3});
    net->forward(x);
    twin->forward(x);

    EXPECT_THAT(
        text_of<c10::Error>([&] { (group.rank() == 0 ? net : twin)->forward(x); }),
        AllOf(HasSubstr("rank 0: forward of 0 ("), HasSubstr("rank 1: forward of 0 of model 2 (")));
    EXPECT_EQ(layer_at<nn::BatchNorm1dImpl>(net, 0).num_batches_tracked.item<std::int64_t>(), 1);
  });
}

TEST(SetScope, ChangesEveryLayerOfNormscope) {
  nn::BatchNorm1d first(4), second(4);
  torch::nn::ModuleList net;
  net->push_back(torch::nn::Sequential(first).ptr());
  net->push_back(second.ptr());

  nn::set_scope(*net, Scope::group(2));

  EXPECT_EQ(first->options.scope(), Scope::group(2));
  EXPECT_EQ(second->options.scope(), Scope::group(2));
}

}  // namespace
}  // namespace normscope::testing
