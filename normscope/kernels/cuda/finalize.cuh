// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/formulas.h"
#include "normscope/kernels/cuda/last_block.cuh"
#include "normscope/kernels/finalize.h"

namespace normscope::cuda {

// From the sums of a channel to results. This is done by the last blocks of the kernel that sums
// or, for the totals of a message, by a kernel of its own.

// The limbs of both sums of one channel of a norm batch, in canonical form.
struct ChannelLimbs {
  double values[kSums][kLimbs];

  NORMSCOPE_INLINE DoubleDouble<double> total(int sum) const {
    return normscope::total(values[sum]);
  }
  NORMSCOPE_INLINE void canonicalize_all() {
    for (auto& limbs : values) canonicalize(limbs);
  }
};

NORMSCOPE_INLINE ChannelLimbs read_limbs(const LimbsView& from, std::int64_t c) {
  ChannelLimbs limbs;
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) limbs.values[sum][k] = from.limb(sum, k)[c];
  }
  limbs.canonicalize_all();
  return limbs;
}

// Adds up the limbs of a slice at its places, and sets them to zero. The loads bypass L1, which
// does not see the additions of other multiprocessors. Those of a sum are in flight together.
template <int kCount>
__device__ ChannelLimbs take_limbs(const DeviceScratch& scratch, std::int64_t slice,
                                   std::int64_t c) {
  const LimbsView first_place = scratch.limbs(slice, 0);
  const std::int64_t from_place_to_place = kSums * kLimbs * scratch.channels;
  ChannelLimbs limbs;
  NORMSCOPE_UNROLL
  for (int sum = 0; sum < kSums; ++sum) {
    double values[kLimbs][kCount];
    NORMSCOPE_UNROLL
    for (int k = 0; k < kLimbs; ++k) {
      const double* at = first_place.limb(sum, k) + c;
      NORMSCOPE_UNROLL
      for (int place = 0; place < kCount; ++place) {
        values[k][place] = __ldcg(at + place * from_place_to_place);
      }
    }
    NORMSCOPE_UNROLL
    for (int k = 0; k < kLimbs; ++k) {
      double* at = first_place.limb(sum, k) + c;
      limbs.values[sum][k] = 0.0;
      NORMSCOPE_UNROLL
      for (int place = 0; place < kCount; ++place) {
        limbs.values[sum][k] += values[k][place];
        at[place * from_place_to_place] = 0.0;
      }
    }
  }
  limbs.canonicalize_all();
  return limbs;
}

// Writes the coefficients of a formula to [slices, kCount, C].
template <std::int64_t kCount, class Real>
NORMSCOPE_INLINE void write_coefficients(Coefficients to, std::int64_t slice, std::int64_t channels,
                                         std::int64_t c, const Real (&values)[kCount]) {
  Real* at = static_cast<Real*>(to.data) + slice * kCount * channels + c;
  for (std::int64_t k = 0; k < kCount; ++k) at[k * channels] = values[k];
}

template <class Real>
NORMSCOPE_INLINE void write_formula(Coefficients to, std::int64_t slice, std::int64_t channels,
                                    std::int64_t c, const Normalize<Real>& formula) {
  const Real values[] = {formula.mean_hi, formula.mean_lo, formula.scale, formula.bias};
  write_coefficients<Coefficients::kNormalize>(to, slice, channels, c, values);
}

template <class Real>
NORMSCOPE_INLINE void write_formula(Coefficients to, std::int64_t slice, std::int64_t channels,
                                    std::int64_t c, const InputGradient<Real>& formula) {
  const Real values[] = {formula.mean_hi, formula.mean_lo, formula.scale, formula.mean_dy,
                         formula.slope};
  write_coefficients<Coefficients::kInputGradient>(to, slice, channels, c, values);
}

// Finalizes moments. Real is the type of x's arithmetic.
template <class Real>
struct MomentsUser {
  UseOfMoments use;
  std::int64_t channels;

  // The sums of a channel over its slices.
  struct Channel {
    ChannelLimbs pooled = {};
    double pooled_count = 0.0;
  };

  __device__ void add_slice(Channel& channel, const ChannelLimbs& limbs, std::int64_t slice,
                            std::int64_t c) const {
    if (use.statistics == nullptr) return;
    const double n = use.batches.count(slice);
    const Moments<double> found = moments_of(limbs, n);
    const ChannelStatistics of_channel =
        statistics_of(found, use.eps, sizeof(Real) == sizeof(double));
    set_statistics(statistics_of_slice(use.statistics, slice, channels), c, of_channel);
    write_formula(use.coefficients, slice, channels, c,
                  normalize_coefficients<Real>(
                      of_channel.mean_hi, of_channel.mean_lo, of_channel.inv_std,
                      channel_value(use.weight, c, 1.0), channel_value(use.bias, c, 0.0)));
    if (updates_with(slice)) update(found, n, slice, c);
    if (!pools() && !accumulates(slice)) return;
    for (int sum = 0; sum < kSums; ++sum) {
      for (int k = 0; k < kLimbs; ++k) channel.pooled.values[sum][k] += limbs.values[sum][k];
    }
    channel.pooled_count += n;
  }

  __device__ void end(Channel& channel, std::int64_t c) const {
    if (use.statistics == nullptr) return;
    if (use.accumulated.data != nullptr) accumulate(channel.pooled, c);
    if (!pools()) return;
    channel.pooled.canonicalize_all();
    update(moments_of(channel.pooled, channel.pooled_count), channel.pooled_count, 0, c);
  }

  // Results that belong to no channel. Called after all channels if those read the number of
  // updates.
  [[nodiscard]] NORMSCOPE_INLINE bool once_is_last() const {
    return use.running_average == RunningAverage::kCumulative;
  }
  __device__ void once() const {
    use.batches.report_error();
    for (std::int64_t slice = 0; slice < use.batches.slices; ++slice) {
      const double n = use.batches.count(slice);
      if (use.counts != nullptr) use.counts[slice] = n;
      if (accumulates(slice)) use.accumulated.header()[kCount] += n;
      const bool is_update = pools() ? slice == 0 : updates_with(slice);
      if (is_update && n > 0.0) use.running.count();
    }
  }

 private:
  NORMSCOPE_INLINE bool pools() const {
    return use.slice_stats == SliceStats::kPooled && use.batches.slices > 1;
  }
  NORMSCOPE_INLINE bool updates_with(std::int64_t slice) const {
    return !pools() && (use.slice_stats != SliceStats::kFirst || slice == 0);
  }

  NORMSCOPE_INLINE bool accumulates(std::int64_t slice) const {
    return use.accumulated.data != nullptr && (use.slice_stats != SliceStats::kFirst || slice == 0);
  }

  __device__ void accumulate(const ChannelLimbs& limbs, std::int64_t c) const {
    for (int sum = 0; sum < kSums; ++sum) {
      for (int k = 0; k < kLimbs; ++k) {
        use.accumulated.limbs().limb(sum, k)[c] += limbs.values[sum][k];
      }
    }
  }

  static NORMSCOPE_INLINE Moments<double> moments_of(const ChannelLimbs& limbs, double n) {
    if (n == 0.0) return {{0.0, 0.0}, 0.0};
    return moments(limbs.total(kSumOfValues), limbs.total(kSumOfProducts), n);
  }

  // The update that follows `earlier` others of this call.
  __device__ void update(const Moments<double>& found, double n, std::int64_t earlier,
                         std::int64_t c) const {
    RunningUpdate running = use.running;
    if (!(n > 0.0) || (running.mean.data == nullptr && running.var.data == nullptr)) return;
    if (use.running_average == RunningAverage::kCumulative) {
      running.momentum = cumulative_momentum(*running.updates + earlier);
    }
    update_running(running, c, found, n);
  }
};

// Finalizes gradient sums.
template <class Real>
struct GradientSumsUser {
  UseOfGradientSums use;
  std::int64_t channels;

  struct Channel {
    double dy = 0.0;
    double dy_xhat = 0.0;
  };

  __device__ void add_slice(Channel& channel, const ChannelLimbs& limbs, std::int64_t slice,
                            std::int64_t c) const {
    const double* statistics = use.statistics + slice * 3 * channels + c;
    const double mean_lo = statistics[channels];
    const double inv_std = statistics[2 * channels];
    const DoubleDouble<double> total = limbs.total(kSumOfValues);
    const double dy = total.hi + total.lo;
    const double dy_xhat =
        gradient_sum_with_xhat(total, limbs.total(kSumOfProducts), mean_lo, inv_std);
    if (use.coefficients.data != nullptr) {
      write_formula(use.coefficients, slice, channels, c,
                    input_gradient_coefficients<Real>(statistics[0], mean_lo, inv_std,
                                                      channel_value(use.weight, c, 1.0), dy,
                                                      dy_xhat, use.batches.count(slice)));
    }
    // The sum of a single slice is taken as it is: 0 + x would lose the sign of a zero.
    const bool is_all = use.batches.slices == 1;
    channel.dy = is_all ? dy : dy + channel.dy;
    channel.dy_xhat = is_all ? dy_xhat : dy_xhat + channel.dy_xhat;
  }

  __device__ void end(const Channel& channel, std::int64_t c) const {
    set_channel_value(use.dweight, c, channel.dy_xhat);
    set_channel_value(use.dbias, c, channel.dy);
  }

  [[nodiscard]] NORMSCOPE_INLINE bool once_is_last() const { return false; }
  __device__ void once() const { use.batches.report_error(); }
};

// Lets the last blocks finalize the sums of all blocks and, if there is a message, write them to
// it.
template <class User>
struct AfterSums {
  User user;
  MessageView message;  // data nullptr: none
  Header header;

  __device__ void channel(const DeviceScratch& scratch, int places, std::int64_t c) const {
    typename User::Channel channel;
    for (std::int64_t slice = 0; slice < scratch.slices; ++slice) {
      const ChannelLimbs limbs =
          places == 1 ? take_limbs<1>(scratch, slice, c) : take_limbs<kPlaces>(scratch, slice, c);
      user.add_slice(channel, limbs, slice, c);
      if (message.data != nullptr) send(limbs, c);
    }
    user.end(channel, c);
  }

  [[nodiscard]] NORMSCOPE_INLINE bool once_is_last() const {
    return message.data == nullptr && user.once_is_last();
  }
  __device__ void once() const {
    if (message.data == nullptr) {
      user.once();
      return;
    }
    for (int i = 0; i < kHeaderSize; ++i) message.header()[i] = header.fields[i];
  }

 private:
  __device__ void send(const ChannelLimbs& limbs, std::int64_t c) const {
    for (int sum = 0; sum < kSums; ++sum) {
      for (int k = 0; k < kLimbs; ++k) message.limbs().limb(sum, k)[c] = limbs.values[sum][k];
    }
  }
};

// Finalizes from the totals of a message; one thread per channel.
// Limits: 24 to 96 registers; bytes: 0 stack, 0 spilled, 16 shared.
template <class User>
__global__ void use_message(MessageView message, unsigned* ticket, User user) {
  let_next_kernel_start();
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c < message.channels) {
    typename User::Channel channel;
    user.add_slice(channel, read_limbs(message.limbs(), c), 0, c);
    user.end(channel, c);
  }
  finish_once(ticket, user);
}

// Computes the coefficients from statistics [slices, 3, C]. One thread per channel; gridDim.y
// blocks share the slices.
// Limits: 16 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.
template <class Real>
__global__ void write_coefficients_of_statistics(std::int64_t channels, std::int64_t slices,
                                                 const double* statistics, ChannelView weight,
                                                 ChannelView bias, Coefficients coefficients) {
  let_next_kernel_start();
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  for (std::int64_t slice = blockIdx.y; slice < slices; slice += gridDim.y) {
    const double* of_slice = statistics + slice * 3 * channels + c;
    write_formula(
        coefficients, slice, channels, c,
        normalize_coefficients<Real>(of_slice[0], of_slice[channels], of_slice[2 * channels],
                                     channel_value(weight, c, 1.0), channel_value(bias, c, 0.0)));
  }
}

}  // namespace normscope::cuda
