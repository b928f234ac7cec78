// SPDX-License-Identifier: Apache-2.0
#include "normscope/kernels/cpu/activated.h"

#include "normscope/core/element.h"
#include "normscope/kernels/cpu/channel_arrays.h"
#include "normscope/kernels/cpu/parts.h"

namespace normscope::cpu {
namespace {

template <class View>
View part_of(const View& tensor, TileRange channels) {
  return tensor.channel_range(channels.begin, channels.end);
}

}  // namespace

void normalize_activated(const Target& target, const Execution& execution, const TensorView& x,
                         Statistics statistics, ChannelView weight, ChannelView bias,
                         const ActivationFunction& activation, const TensorView& residual,
                         const MutableTensorView& y) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    const NormalizeFormulas<Arithmetic<Element>> formulas(x.channels, statistics, weight, bias);
    const Stores stores = stores_for(y);
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().normalize_activated(part(x), formulas.from(channels.begin), activation,
                                               part(residual), tiles, stores, part(y));
    });
  });
}

void activation_gradient(const Target& target, const Execution& execution, const TensorView& x,
                         const TensorView& dy, Statistics statistics, ChannelView weight,
                         ChannelView bias, const ActivationFunction& activation,
                         const MutableTensorView& dz) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    const NormalizeFormulas<Arithmetic<Element>> formulas(x.channels, statistics, weight, bias);
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().activation_gradient(part(x), part(dy), formulas.from(channels.begin),
                                               activation, tiles, part(dz));
    });
  });
}

void gradient_of_output(const Target& target, const Execution& execution, const TensorView& y,
                        const TensorView& dy, const ActivationFunction& activation,
                        const MutableTensorView& dz) {
  if (y.empty()) return;
  with_element_type(y.dtype, [&]<class Element>(Element*) {
    for_parts(execution, y, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      target.of<Element>().gradient_of_output(part(y), part(dy), activation, tiles, part(dz));
    });
  });
}

void add_activated_gradient_sums(const Target& target, const Execution& execution,
                                 const TensorView& x, const TensorView& dy, Statistics statistics,
                                 ChannelView weight, ChannelView bias,
                                 const ActivationFunction& activation, LimbsView limbs) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    const NormalizeFormulas<Arithmetic<Element>> formulas(x.channels, statistics, weight, bias);
    sum_parts(execution, x, target, limbs,
              [&](TileRange channels, TileRange tiles, LimbsView into) {
                target.of<Element>().add_activated_gradient_sums(
                    part_of(x, channels), part_of(dy, channels), formulas.from(channels.begin),
                    activation, tiles, into);
              });
  });
}

void activated_input_gradient(const Target& target, const Execution& execution, const TensorView& x,
                              const TensorView& dy, Statistics statistics, ChannelView weight,
                              ChannelView bias, const ActivationFunction& activation,
                              GradientSums sums, double count, const MutableTensorView& dx) {
  if (x.empty()) return;
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    const InputGradientFormulas<Real> formulas(x.channels, statistics, weight, sums, count);
    const NormalizeFormulas<Real> of_output(x.channels, statistics, weight, bias);
    const Stores stores = stores_for(dx);
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      const auto part = [&](const auto& tensor) { return part_of(tensor, channels); };
      const std::int64_t c = channels.begin;
      target.of<Element>().activated_input_gradient(part(x), part(dy),
                                                    {formulas.from(c), of_output.from(c).bias},
                                                    activation, tiles, stores, part(dx));
    });
  });
}

}  // namespace normscope::cpu
