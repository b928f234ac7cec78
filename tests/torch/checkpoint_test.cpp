// SPDX-License-Identifier: Apache-2.0
//
// What C++ alone can test of checkpoints; compare_with_python.py tests the rest.
#include "normscope/torch/nn/checkpoint.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <unistd.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/text_of.h"

namespace normscope::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

// A file of this test, which exists during this object's lifetime.
class File {
 public:
  File()
      : path_(std::filesystem::temp_directory_path() /
              ("normscope_checkpoint_" + std::to_string(getpid()))) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { std::remove(path_.c_str()); }

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string refusal(torch::nn::Sequential& net, const std::string& path) {
  return text_of<ArgumentError>([&] { nn::load_state_dict(*net, path); });
}

TEST(StateDict, ComesBackAsItWasSaved) {
  const File file;
  torch::nn::Sequential net(nn::BatchNorm1d(3)), other(nn::BatchNorm1d(3));
  net->forward(torch::randn({4, 3}));
  const at::Tensor parameter = other->parameters()[0];

  nn::save_state_dict(*net, file.path());
  nn::load_state_dict(*other, file.path());

  for (const auto& [name, buffer] : net->named_buffers().pairs()) {
    EXPECT_TRUE(torch::equal(buffer, other->named_buffers()[name])) << name;
  }
  EXPECT_TRUE(other->parameters()[0].is_same(parameter));
  EXPECT_TRUE(parameter.requires_grad());
}

TEST(StateDict, RefusesFilesThatDoNotFitAndChangesNothing) {
  const File file;
  torch::nn::Sequential net(torch::nn::Linear(2, 3), nn::BatchNorm1d(3));
  torch::nn::Sequential shorter(torch::nn::Linear(2, 3));
  torch::nn::Sequential wider(torch::nn::Linear(2, 4));
  const at::Tensor before = net->parameters()[0].clone();

  nn::save_state_dict(*shorter, file.path());
  EXPECT_THAT(refusal(net, file.path()), EndsWith(": expected 1.bias, which is missing"));
  EXPECT_TRUE(torch::equal(net->parameters()[0], before));
  EXPECT_THAT(refusal(wider, file.path()), EndsWith("0.bias: expected shape [4], got [3]"));
  nn::save_state_dict(*net, file.path());
  EXPECT_THAT(refusal(shorter, file.path()),
              HasSubstr("1.bias: the module has no tensor of this name"));
}

TEST(StateDict, RefusesWhatIsNoCheckpoint) {
  const File file;
  torch::nn::Sequential net(nn::BatchNorm1d(3));

  EXPECT_THAT(refusal(net, file.path()), EndsWith(": cannot be read"));
  EXPECT_THAT(refusal(net, "/tmp"), EndsWith(": cannot be read"));
  std::ofstream(file.path()) << "not a checkpoint";
  EXPECT_THAT(refusal(net, file.path()),
              HasSubstr("expected what torch.save(dict(model.state_dict()), file) writes"));
  // The length of a name, after which torch reads the rest of the name as a number of elements.
  nn::save_state_dict(*net, file.path());
  std::ifstream saved(file.path(), std::ios::binary);
  std::string damaged(std::istreambuf_iterator<char>(saved), {});
  damaged[damaged.find("storage") - 4] = 3;
  std::ofstream(file.path(), std::ios::binary) << damaged;
  EXPECT_THAT(refusal(net, file.path()), HasSubstr("expected what torch.save"));
  const c10::IValue name("weight"), pair = c10::ivalue::Tuple::create({name});
  for (const c10::IValue& element : {name, pair}) {
    const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create({element}));
    std::ofstream(file.path(), std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_THAT(refusal(net, file.path()), EndsWith(": expected tensors under names"));
  }
  EXPECT_THROW(nn::save_state_dict(*net, "/nowhere/at/all"), ArgumentError);
}

}  // namespace
}  // namespace normscope::testing
