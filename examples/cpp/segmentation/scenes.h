// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <ATen/core/Tensor.h>

// The label of pixels that are neither trained on nor counted.
inline constexpr std::int64_t kVoid = 255;

struct Batch {
  at::Tensor images;  // [n, 3, side, side] float32
  at::Tensor masks;   // [n, side, side] int64
};

// Scenes that write_scenes.py has written: those of each training step, then those held out. Each
// rank opens the file itself.
class SceneFile {
 public:
  // Throws std::runtime_error if there is no such file.
  explicit SceneFile(const std::string& path);

  [[nodiscard]] std::int64_t steps() const { return header_.steps; }
  [[nodiscard]] std::int64_t global_batch() const { return header_.global_batch; }
  [[nodiscard]] std::int64_t class_count() const { return header_.class_count; }
  [[nodiscard]] std::int64_t held_out_count() const { return header_.held_out; }

  // The scenes [begin, end) of the global batch of a step.
  [[nodiscard]] Batch training_batch(std::int64_t step, std::int64_t begin, std::int64_t end);

  // The held-out scenes [begin, end).
  [[nodiscard]] Batch held_out_batch(std::int64_t begin, std::int64_t end);

 private:
  // The beginning of the file, in the machine's byte order.
  struct Header {
    char magic[8];
    std::int64_t steps, global_batch, side, class_count, held_out;
  };

  [[nodiscard]] Batch read(std::int64_t begin, std::int64_t end);

  std::string path_;
  std::ifstream file_;
  Header header_ = {};
};
