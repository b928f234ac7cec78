// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/part_moments.h"

#include <string>

#include "normscope/batch_norm/checks.h"
#include "normscope/batch_norm/message.h"
#include "normscope/batch_norm/parts.h"
#include "normscope/core/error.h"
#include "normscope/core/formulas.h"
#include "normscope/kernels/finalize.h"

namespace normscope {

PartMoments part_moments(const TensorView& x, std::int64_t parts, const Kernels& kernels,
                         const Execution& execution) {
  check_input(x);
  if (parts < 1) {
    throw ArgumentError("parts: expected at least 1, got " + std::to_string(parts));
  }
  const auto row_size = static_cast<std::size_t>(PartMoments::row_size(x.channels));
  PartMoments result{.batches = 1, .parts = parts, .channels = x.channels, .rows = {}};
  result.rows.resize(static_cast<std::size_t>(parts) * row_size);
  Message message(x.channels);
  std::int64_t begin = 0;
  for (std::int64_t k = 0; k < parts; ++k) {
    const std::int64_t end = begin + x.samples / parts + (k < x.samples % parts ? 1 : 0);
    const TensorView part = x.sample_range(begin, end);
    begin = end;
    if (part.empty()) continue;
    clear(message.limbs());
    kernels.add_moments(execution, part, message.limbs());
    double* row = result.rows.data() + static_cast<std::size_t>(k) * row_size;
    row[0] = static_cast<double>(part.elements_per_channel());
    for (std::int64_t c = 0; c < x.channels; ++c) {
      const Moments<double> of_channel =
          moments(total_of(message.limbs(), kSumOfValues, c),
                  total_of(message.limbs(), kSumOfProducts, c), row[0]);
      row[1 + c] = of_channel.mean.hi;
      row[1 + x.channels + c] = of_channel.population_variance;
    }
  }
  return result;
}

}  // namespace normscope
