// SPDX-License-Identifier: Apache-2.0
//
// Fetching of what is summed next. Included once by each target (vector.h says why).
//
// Sums go through memory in an order that the hardware does not foresee: a few channels of all
// rows, or parts of a few planes. In `make bench-networks` fetching makes the normalization ops of
// networks a tenth faster.

// Channels [begin, end) of a tile.
struct TileChannels {
  Tile tile;
  std::int64_t begin;
  std::int64_t end;
};

// Calls sum(block, next) for blocks of at most kBatchChannels channels that together are the tiles;
// after the last block comes itself.
template <class Sum>
NORMSCOPE_INLINE void for_blocks(const TensorView& x, Layout layout, TileRange tiles,
                                 const Sum& sum) {
  const std::int64_t per_sample = tiles_per_sample(layout, x.positions);
  const std::int64_t per_tile = (x.channels + kBatchChannels - 1) / kBatchChannels;
  const auto block_at = [&](std::int64_t i) {
    const std::int64_t begin = i % per_tile * kBatchChannels;
    return TileChannels{
        tile_at(tiles.begin + i / per_tile, x.positions, tile_shape(layout), per_sample), begin,
        smaller(begin + kBatchChannels, x.channels)};
  };
  const std::int64_t blocks = (tiles.end - tiles.begin) * per_tile;
  for (std::int64_t i = 0; i < blocks; ++i) sum(block_at(i), block_at(smaller(i + 1, blocks - 1)));
}

// Fetches rows of `row_length` elements, `row_stride` apart, in the order in which they lie in
// memory: `count` elements with each step of what is summed meanwhile.
template <class AnyTerms>
class FetchAhead {
 public:
  NORMSCOPE_INLINE FetchAhead(const AnyTerms& terms, std::int64_t row_stride,
                              std::int64_t row_length)
      : terms_(terms), row_stride_(row_stride), row_length_(row_length) {}

  NORMSCOPE_INLINE void operator()(std::int64_t count) {
    terms_.prefetch_at(row_ + element_, count);
    element_ += count;
    if (element_ < row_length_) return;
    element_ = 0;
    row_ += row_stride_;
  }

 private:
  AnyTerms terms_;
  std::int64_t row_stride_;
  std::int64_t row_length_;
  std::int64_t row_ = 0;
  std::int64_t element_ = 0;
};
