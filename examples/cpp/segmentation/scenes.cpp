// SPDX-License-Identifier: Apache-2.0
#include "segmentation/scenes.h"

#include <cstring>
#include <stdexcept>

#include <ATen/ops/empty.h>

namespace {

constexpr char kMagic[8] = {'S', 'C', 'E', 'N', 'E', 'S', '0', '1'};

}  // namespace

SceneFile::SceneFile(const std::string& path) : path_(path), file_(path, std::ios::binary) {
  file_.read(reinterpret_cast<char*>(&header_), sizeof(header_));
  if (!file_ || std::memcmp(header_.magic, kMagic, sizeof(kMagic)) != 0) {
    throw std::runtime_error(path + ": expected a file of write_scenes.py");
  }
}

Batch SceneFile::training_batch(std::int64_t step, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = step * header_.global_batch;
  return read(first + begin, first + end);
}

Batch SceneFile::held_out_batch(std::int64_t begin, std::int64_t end) {
  const std::int64_t first = header_.steps * header_.global_batch;
  return read(first + begin, first + end);
}

Batch SceneFile::read(std::int64_t begin, std::int64_t end) {
  const std::int64_t pixels = header_.side * header_.side;
  const auto image_bytes = static_cast<std::int64_t>(3 * sizeof(float)) * pixels;
  const std::int64_t scene_bytes = image_bytes + pixels;
  const at::Tensor images = at::empty({end - begin, 3, header_.side, header_.side}, at::kFloat);
  const at::Tensor masks = at::empty({end - begin, header_.side, header_.side}, at::kByte);
  file_.seekg(static_cast<std::streamoff>(sizeof(header_)) + begin * scene_bytes);
  for (std::int64_t i = 0; i < end - begin; ++i) {
    file_.read(static_cast<char*>(images[i].mutable_data_ptr()), image_bytes);
    file_.read(static_cast<char*>(masks[i].mutable_data_ptr()), pixels);
  }
  if (!file_) throw std::runtime_error(path_ + ": expected more scenes, the file ends too early");
  return {images, masks.to(at::kLong)};
}
