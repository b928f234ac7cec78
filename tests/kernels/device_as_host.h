// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/finalize.h"
#include "normscope/kernels/kernels.h"

namespace normscope::testing {

// The kernels of a device in the host's table, which lets one suite hold both to the same contract.
// The host can access the device's memory, and kernels have ended when they return.
template <const DeviceKernels& (*kDevice)()>
struct DeviceAsHost {
  // The memory of one call. By the device's conventions, some of it is zero before and after.
  struct Memory {
    explicit Memory(std::int64_t channels)
        : zeros(static_cast<std::size_t>(device_scratch_size(channels, 1))),
          message(static_cast<std::size_t>(limbs_size(channels) + kHeaderSize)),
          statistics(static_cast<std::size_t>(3 * channels)),
          coefficients(static_cast<std::size_t>(Coefficients::kInputGradient * channels)),
          channels_(channels) {}

    DeviceScratch scratch() { return {zeros.data(), channels_}; }
    MessageView sent() { return {message.data(), channels_}; }

    Coefficients rounded() { return {coefficients.data()}; }

    void copy_statistics(const Statistics& from) {
      std::copy_n(from.mean_hi, channels_, statistics.data());
      std::copy_n(from.mean_lo, channels_, statistics.data() + channels_);
      std::copy_n(from.inv_std, channels_, statistics.data() + 2 * channels_);
    }

    // Checks what the device promises about the scratch memory.
    void finish() const {
      if (std::ranges::any_of(zeros, [](double number) { return number != 0.0; })) {
        throw std::logic_error("the scratch memory: expected zeros after a call");
      }
    }

    std::vector<double> zeros;
    std::vector<double> message;
    std::vector<double> statistics;
    AlignedVector<double> coefficients;

   private:
    std::int64_t channels_;
  };

  // Adds the limbs of a message to `limbs`, which end in canonical form.
  static void add(const LimbsView& sent, const LimbsView& limbs) {
    for (int sum = 0; sum < kSums; ++sum) {
      for (std::int64_t c = 0; c < limbs.channels; ++c) {
        double values[kLimbs];
        for (int k = 0; k < kLimbs; ++k) values[k] = limbs.limb(sum, k)[c] + sent.limb(sum, k)[c];
        canonicalize(values);
        for (int k = 0; k < kLimbs; ++k) limbs.limb(sum, k)[c] = values[k];
      }
    }
  }

  static void add_moments(const Execution& /*execution*/, const TensorView& x, LimbsView limbs) {
    Memory memory(x.channels);
    kDevice().send_moments(Stream{}, x, memory.scratch(), memory.sent(), Header{});
    memory.finish();
    add(memory.sent().limbs(), limbs);
  }

  // Calls use(dz): with dy if there is no activation. A device writes dz first.
  template <class Use>
  static void with_dz(const TensorView& x, const TensorView& dy, Statistics statistics,
                      const AffineActivation& affine, const Use& use) {
    if (affine.activation.kind == Activation::kNone || x.empty()) return use(dy);
    const std::int64_t last = (x.samples - 1) * x.sample_stride +
                              (x.channels - 1) * x.channel_stride +
                              (x.positions - 1) * x.position_stride;
    AlignedVector<std::byte> bytes(static_cast<std::size_t>((last + 1) * size_of(x.dtype)));
    const MutableTensorView dz{bytes.data(), x.dtype,         x.samples,        x.channels,
                               x.positions,  x.sample_stride, x.channel_stride, x.position_stride};
    activation_gradient({}, x, dy, statistics, affine, dz);
    use(dz.read_only());
  }

  static void add_gradient_sums(const Execution& /*execution*/, const TensorView& x,
                                const TensorView& dy, Statistics statistics,
                                const AffineActivation& affine, LimbsView limbs) {
    with_dz(x, dy, statistics, affine, [&](const TensorView& dz) {
      Memory memory(x.channels);
      memory.copy_statistics(statistics);
      kDevice().send_gradient_sums(
          Stream{}, x, dz, memory.scratch(),
          {.batches = norm_batches(x, 1), .statistics = memory.statistics.data()}, memory.sent(),
          Header{});
      memory.finish();
      add(memory.sent().limbs(), limbs);
    });
  }

  // Turns limbs into a message that one rank has sent, with `count` in its header.
  static NormBatches send(Memory& memory, LimbsView limbs, double count) {
    for (int sum = 0; sum < kSums; ++sum) {
      for (int k = 0; k < kLimbs; ++k) {
        std::copy_n(limbs.limb(sum, k), limbs.channels, memory.sent().limbs().limb(sum, k));
      }
    }
    std::fill_n(memory.sent().header(), kHeaderSize, 0.0);
    memory.sent().header()[kCount] = count;
    return {.slices = 1, .totals = memory.sent().header()};
  }

  static void finalize_moments(const Execution& /*execution*/, LimbsView limbs, double count,
                               double eps, DType x_dtype, const MomentsResults& results) {
    Memory memory(limbs.channels);
    std::vector<double> found_count(1);
    kDevice().use_moments(Stream{}, x_dtype, memory.sent(), memory.scratch(),
                          {.batches = send(memory, limbs, count),
                           .eps = eps,
                           .running = results.running,
                           .statistics = memory.statistics.data(),
                           .counts = found_count.data(),
                           .coefficients = memory.rounded()});
    memory.finish();
    const double* found = memory.statistics.data();
    std::copy_n(found, limbs.channels, results.statistics.mean_hi);
    std::copy_n(found + limbs.channels, limbs.channels, results.statistics.mean_lo);
    std::copy_n(found + 2 * limbs.channels, limbs.channels, results.statistics.inv_std);
    if (results.count != nullptr) *results.count = found_count[0];
  }

  static void normalize(const Execution& /*execution*/, const TensorView& x, Statistics statistics,
                        const AffineActivation& affine, const TensorView& residual,
                        const MutableTensorView& y) {
    Memory memory(x.channels);
    memory.copy_statistics(statistics);
    kDevice().use_statistics(Stream{}, x.dtype, x.channels, 1, memory.statistics.data(),
                             affine.weight, affine.bias, memory.rounded());
    kDevice().normalize(Stream{}, x, norm_batches(x, 1), memory.rounded(), affine.activation,
                        residual, y);
    memory.finish();
  }

  static void finalize_gradient_sums(const Execution& /*execution*/, LimbsView limbs,
                                     Statistics statistics, const GradientResults& results) {
    Memory memory(limbs.channels);
    memory.copy_statistics(statistics);
    std::vector<double> dy(static_cast<std::size_t>(limbs.channels));
    std::vector<double> dy_xhat(dy.size());
    kDevice().use_gradient_sums(Stream{}, DType::kFloat64, memory.sent(), memory.scratch(),
                                {.batches = send(memory, limbs, 0.0),
                                 .statistics = memory.statistics.data(),
                                 .dweight = {dy_xhat.data(), DType::kFloat64},
                                 .dbias = {dy.data(), DType::kFloat64}});
    memory.finish();
    std::ranges::copy(dy, results.sums.dy);
    std::ranges::copy(dy_xhat, results.sums.dy_xhat);
    for (std::int64_t c = 0; c < limbs.channels; ++c) use_gradient_sums(results, c);
  }

  static void input_gradient(const Execution& /*execution*/, const TensorView& x,
                             const TensorView& dy, Statistics statistics,
                             const AffineActivation& affine, GradientSums sums, double count,
                             const MutableTensorView& dx) {
    Memory memory(x.channels);
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      for (std::int64_t c = 0; c < x.channels; ++c) {
        const InputGradient<Real> formula =
            input_gradient_coefficients<Real>(statistics, affine.weight, sums, count, c);
        Real* at = static_cast<Real*>(memory.rounded().data) + c;
        const Real values[] = {formula.mean_hi, formula.mean_lo, formula.scale, formula.mean_dy,
                               formula.slope};
        for (std::int64_t k = 0; k < Coefficients::kInputGradient; ++k) {
          at[k * x.channels] = values[k];
        }
      }
    });
    with_dz(x, dy, statistics, affine, [&](const TensorView& dz) {
      kDevice().input_gradient(Stream{}, x, dz, norm_batches(x, 1), memory.rounded(), dx);
    });
    memory.finish();
  }

  static void activation_gradient(const Execution& /*execution*/, const TensorView& x,
                                  const TensorView& dy, Statistics statistics,
                                  const AffineActivation& affine, const MutableTensorView& dz) {
    Memory memory(x.channels);
    memory.copy_statistics(statistics);
    kDevice().use_statistics(Stream{}, x.dtype, x.channels, 1, memory.statistics.data(),
                             affine.weight, affine.bias, memory.rounded());
    kDevice().activation_gradient(Stream{}, x, dy, norm_batches(x, 1), memory.rounded(),
                                  affine.activation, dz);
    memory.finish();
  }

  static void gradient_of_output(const Execution& /*execution*/, const TensorView& y,
                                 const TensorView& dy, const ActivationFunction& activation,
                                 const MutableTensorView& dz) {
    kDevice().gradient_of_output(Stream{}, y, dy, norm_batches(y, 1), activation, dz);
  }

  static constexpr Kernels kernels(std::string_view name) {
    return {
        .name = name,
        .can_run = [] { return kDevice().why_not().empty(); },
        .add_moments = add_moments,
        .finalize_moments = finalize_moments,
        .normalize = normalize,
        .add_gradient_sums = add_gradient_sums,
        .finalize_gradient_sums = finalize_gradient_sums,
        .input_gradient = input_gradient,
        .activation_gradient = activation_gradient,
        .gradient_of_output = gradient_of_output,
    };
  }
};

}  // namespace normscope::testing
