// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/message.h"

#include <span>

namespace normscope {

double Message::all_reduce(const CallLabel& label, double count, Exchange& exchange) {
  const std::span<double> header = std::span(numbers_).last(kHeaderSize);
  header[kCount] = count;
  exchange.all_reduce(label, numbers_, Stream{});
  return header[kCount];
}

}  // namespace normscope
