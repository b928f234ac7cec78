// SPDX-License-Identifier: Apache-2.0
//
// The places of tiles and elements in a tensor. Included once by each target (vector.h says why).

// The place of a tile.
struct Tile {
  std::int64_t sample;
  std::int64_t begin;  // position
  std::int64_t size;   // positions
};

NORMSCOPE_INLINE Tile tile_at(std::int64_t index, std::int64_t positions, const TileShape& shape,
                              std::int64_t tiles_per_sample) {
  const std::int64_t begin = index % tiles_per_sample * shape.positions;
  const std::int64_t rest = positions - begin;
  return {index / tiles_per_sample, begin, rest < shape.positions ? rest : shape.positions};
}

NORMSCOPE_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
NORMSCOPE_INLINE std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

template <class Element>
NORMSCOPE_INLINE const Element* element_at(const TensorView& x, std::int64_t n, std::int64_t c,
                                           std::int64_t p) {
  return static_cast<const Element*>(x.data) + n * x.sample_stride + c * x.channel_stride +
         p * x.position_stride;
}

template <class Element>
NORMSCOPE_INLINE Element* element_at(const MutableTensorView& x, std::int64_t n, std::int64_t c,
                                     std::int64_t p) {
  return static_cast<Element*>(x.data) + n * x.sample_stride + c * x.channel_stride +
         p * x.position_stride;
}
