// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/activation.h"
#include "normscope/core/element.h"
#include "normscope/kernels/cpu/channel_arrays.h"
#include "normscope/kernels/cpu/parts.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// The functions of Kernels that apply an activation.
template <const Target& kTarget>
struct Activated {
  static void normalize(const Execution& execution, const TensorView& x, Statistics statistics,
                        ChannelView weight, ChannelView bias, const ActivationFunction& activation,
                        const TensorView& residual, const MutableTensorView& y) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const NormalizeFormulas<Arithmetic<Element>> formulas(x.channels, statistics, weight, bias);
      const Stores stores = stores_for(y);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
        kTarget.of<Element>().normalize_activated(part(x), formulas.from(channels.begin),
                                                  activation, part(residual), tiles, stores,
                                                  part(y));
      });
    });
  }

  static void activation_gradient(const Execution& execution, const TensorView& x,
                                  const TensorView& dy, Statistics statistics, ChannelView weight,
                                  ChannelView bias, const ActivationFunction& activation,
                                  const MutableTensorView& dz) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const NormalizeFormulas<Arithmetic<Element>> formulas(x.channels, statistics, weight, bias);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
        kTarget.of<Element>().activation_gradient(part(x), part(dy), formulas.from(channels.begin),
                                                  activation, tiles, Stores::kCached, part(dz));
      });
    });
  }

  static void gradient_of_output(const Execution& execution, const TensorView& y,
                                 const TensorView& dy, const ActivationFunction& activation,
                                 const MutableTensorView& dz) {
    if (y.empty()) return;
    with_element_type(y.dtype, [&]<class Element>(Element*) {
      for_parts(execution, y, [&](TileRange channels, TileRange tiles) {
        const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
        kTarget.of<Element>().gradient_of_output(part(y), part(dy), activation, tiles,
                                                 Stores::kCached, part(dz));
      });
    });
  }

  static void add_gradient_sums(const Execution& execution, const TensorView& x,
                                const TensorView& dy, Statistics statistics, ChannelView weight,
                                ChannelView bias, const ActivationFunction& activation,
                                LimbsView limbs) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      const NormalizeFormulas<Arithmetic<Element>> formulas(x.channels, statistics, weight, bias);
      sum_parts(execution, x, kTarget, limbs,
                [&](TileRange channels, TileRange tiles, LimbsView into) {
                  kTarget.of<Element>().add_activated_gradient_sums(
                      part_of(x, channels), part_of(dy, channels), formulas.from(channels.begin),
                      activation, tiles, into);
                });
    });
  }

  static void input_gradient(const Execution& execution, const TensorView& x, const TensorView& dy,
                             Statistics statistics, ChannelView weight, ChannelView bias,
                             const ActivationFunction& activation, GradientSums sums, double count,
                             const MutableTensorView& dx) {
    if (x.empty()) return;
    with_element_type(x.dtype, [&]<class Element>(Element*) {
      using Real = Arithmetic<Element>;
      const InputGradientFormulas<Real> formulas(x.channels, statistics, weight, sums, count);
      const NormalizeFormulas<Real> of_output(x.channels, statistics, weight, bias);
      const Stores stores = stores_for(dx);
      for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
        const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
        const std::int64_t c = channels.begin;
        kTarget.of<Element>().activated_input_gradient(part(x), part(dy),
                                                       {formulas.from(c), of_output.from(c).bias},
                                                       activation, tiles, stores, part(dx));
      });
    });
  }

 private:
  template <class View>
  static View part_of(const View& tensor, TileRange channels) {
    return tensor.channel_range(channels.begin, channels.end);
  }
};

}  // namespace normscope::cpu
