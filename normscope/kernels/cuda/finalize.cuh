// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

#include "normscope/core/formulas.h"
#include "normscope/kernels/cuda/exchange_over_peers.cuh"
#include "normscope/kernels/cuda/last_block.cuh"
#include "normscope/kernels/finalize.h"

namespace normscope::cuda {

// From the sums of a channel to results. This is done by the last blocks of the kernel that sums
// or, for the totals of a message, by a kernel of its own. `n` is the number of elements per
// channel of the norm batch.

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

  __device__ void add_slice(Channel& channel, const ChannelLimbs& limbs, double n,
                            std::int64_t slice, std::int64_t c) const {
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
    if (use.accumulated.data != nullptr) accumulate(channel.pooled, c);
    if (!pools()) return;
    channel.pooled.canonicalize_all();
    update(moments_of(channel.pooled, channel.pooled_count), channel.pooled_count, 0, c);
  }

  // For a norm batch of several ranks: the results of this rank's sums, and the other ones.
  __device__ void use_own(const ChannelLimbs& /*limbs*/, std::int64_t /*c*/) const {}
  __device__ void use_totals(const ChannelLimbs& limbs, double n, std::int64_t c) const {
    Channel channel;
    add_slice(channel, limbs, n, 0, c);
    end(channel, c);
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

  __device__ void add_slice(Channel& channel, const ChannelLimbs& limbs, double n,
                            std::int64_t slice, std::int64_t c) const {
    const Channel of_slice = write_slice(limbs, n, slice, c);
    // The sum of a single slice is taken as it is: 0 + x would lose the sign of a zero.
    const bool is_all = use.batches.slices == 1;
    channel.dy = is_all ? of_slice.dy : of_slice.dy + channel.dy;
    channel.dy_xhat = is_all ? of_slice.dy_xhat : of_slice.dy_xhat + channel.dy_xhat;
  }

  __device__ void end(const Channel& channel, std::int64_t c) const {
    set_channel_value(use.dweight, c, channel.dy_xhat);
    set_channel_value(use.dbias, c, channel.dy);
  }

  __device__ void use_own(const ChannelLimbs& limbs, std::int64_t c) const {
    end(sums_of(limbs, 0, c), c);
  }
  __device__ void use_totals(const ChannelLimbs& limbs, double n, std::int64_t c) const {
    (void)write_slice(limbs, n, 0, c);
  }

  [[nodiscard]] NORMSCOPE_INLINE bool once_is_last() const { return false; }
  __device__ void once() const { use.batches.report_error(); }

 private:
  NORMSCOPE_INLINE const double* statistics(std::int64_t slice, std::int64_t c) const {
    return use.statistics + slice * 3 * channels + c;
  }

  __device__ Channel sums_of(const ChannelLimbs& limbs, std::int64_t slice, std::int64_t c) const {
    const double* of_slice = statistics(slice, c);
    const DoubleDouble<double> total = limbs.total(kSumOfValues);
    return {total.hi + total.lo,
            gradient_sum_with_xhat(total, limbs.total(kSumOfProducts), of_slice[channels],
                                   of_slice[2 * channels])};
  }

  // Writes the coefficients of a slice, if they are wanted. Returns its sums.
  __device__ Channel write_slice(const ChannelLimbs& limbs, double n, std::int64_t slice,
                                 std::int64_t c) const {
    const Channel sums = sums_of(limbs, slice, c);
    if (use.coefficients.data == nullptr) return sums;
    const double* of_slice = statistics(slice, c);
    write_formula(use.coefficients, slice, channels, c,
                  input_gradient_coefficients<Real>(
                      of_slice[0], of_slice[channels], of_slice[2 * channels],
                      channel_value(use.weight, c, 1.0), sums.dy, sums.dy_xhat, n));
    return sums;
  }
};

// Lets the last blocks finalize the sums of all blocks. If there is a message, they write the sums
// to it, and finalize only what belongs to this rank. If the ranks can write to each other's
// memory, they exchange the sums there, and write only the totals of the header to the message.
template <class User>
struct AfterSums {
  static constexpr bool kHasClusters = false;

  User user;
  MessageView message;  // data nullptr: none
  Header header;
  PeerMemory peers;

  [[nodiscard]] NORMSCOPE_INLINE bool exchanges() const { return peers.ranks > 0; }
  [[nodiscard]] NORMSCOPE_INLINE bool lets_next_kernel_start() const { return !exchanges(); }

  __device__ void channel(const DeviceScratch& scratch, int places, std::int64_t c) const {
    typename User::Channel channel;
    for (std::int64_t slice = 0; slice < scratch.slices; ++slice) {
      const ChannelLimbs limbs =
          places == 1 ? take_limbs<1>(scratch, slice, c) : take_limbs<kPlaces>(scratch, slice, c);
      if (message.data != nullptr) {  // there is one slice
        user.use_own(limbs, c);
        send(limbs, c);
        return;
      }
      user.add_slice(channel, limbs, user.use.batches.count(slice), slice, c);
    }
    user.end(channel, c);
  }

  // Exchanges the channels [begin, end) for which channel() was called.
  __device__ void exchange(std::int64_t begin, std::int64_t end) const {
    const bool have_come = meet_peers(peers, header, begin, end);
    const std::int64_t threads = std::int64_t{blockDim.x} * blockDim.y;
    for (std::int64_t c = begin + thread_of_block(); c < end; c += threads) {
      const bool has_come = have_come || has_come_from_all(peers, c);
      double totals[kHeaderSize];
      NORMSCOPE_UNROLL
      for (int i = 0; i < kHeaderSize; ++i) {
        totals[i] = has_come ? sum_over_peers(peers, c, PeerMemory::kHeader + i)
                             : std::numeric_limits<double>::quiet_NaN();
      }
      if (c == 0) keep(totals, has_come);
      ChannelLimbs limbs;
      NORMSCOPE_UNROLL
      for (int sum = 0; sum < kSums; ++sum) {
        NORMSCOPE_UNROLL
        for (int k = 0; k < kLimbs; ++k) {
          limbs.values[sum][k] = sum_over_peers(peers, c, sum * kLimbs + k);
        }
      }
      limbs.canonicalize_all();
      user.use_totals(limbs, user.use.batches.count_of(totals), c);
      count_exchange(peers, c);
    }
  }

  [[nodiscard]] NORMSCOPE_INLINE bool once_is_last() const {
    return !sends_message() && user.once_is_last();
  }
  __device__ void once() const {
    if (!sends_message()) {
      user.once();
      return;
    }
    for (int i = 0; i < kHeaderSize; ++i) message.header()[i] = header.fields[i];
  }

  // Another kernel writes the outputs.
  NORMSCOPE_INLINE void write_outputs(std::int64_t /*begin*/, std::int64_t /*end*/) const {}

 private:
  NORMSCOPE_INLINE bool sends_message() const { return message.data != nullptr && !exchanges(); }

  __device__ void send(const ChannelLimbs& limbs, std::int64_t c) const {
    if (exchanges()) {
      send_to_peers(peers, c, [&](int k) {
        return k < PeerMemory::kHeader ? limbs.values[k / kLimbs][k % kLimbs]
                                       : header.fields[k - PeerMemory::kHeader];
      });
      return;
    }
    for (int sum = 0; sum < kSums; ++sum) {
      for (int k = 0; k < kLimbs; ++k) message.limbs().limb(sum, k)[c] = limbs.values[sum][k];
    }
  }

  // Keeps the totals of the header for once(). Ranks that have made different calls may have
  // different channels: none may wait for a channel that another one does not have.
  __device__ void keep(const double* totals, bool has_come) const {
    for (int i = 0; i < kHeaderSize; ++i) message.header()[i] = totals[i];
    if (has_come && !ranks_agree(totals, peers.ranks)) {
      announce(peers.failure, PeerMemory::kEnded);
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
    user.add_slice(channel, read_limbs(message.limbs(), c), user.use.batches.count(0), 0, c);
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
