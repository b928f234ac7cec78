// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one instruction set. Compiled once for each set, whose name is NORMSCOPE_TARGET.

#include "normscope/kernels/cpu/target.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "normscope/core/activation_functions.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/core/tiles.h"

namespace normscope::cpu::NORMSCOPE_TARGET {
namespace {

// clang-format off: each uses what those before it define
#include "normscope/kernels/cpu/vector.h"
#include "normscope/kernels/cpu/block.h"
#include "normscope/kernels/cpu/formulas.h"
#include "normscope/kernels/cpu/activation.h"
#include "normscope/kernels/cpu/limb_sums.h"
#include "normscope/kernels/cpu/tile_terms.h"
#include "normscope/kernels/cpu/tile_sums.h"
#include "normscope/kernels/cpu/sum_channels_first.h"
#include "normscope/kernels/cpu/sum_channels_last.h"
#include "normscope/kernels/cpu/sum_elements.h"
#include "normscope/kernels/cpu/apply.h"
// clang-format on

// The instruction sets that kernels/CMakeLists.txt compiles for.
bool can_run() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

// terms_of(layout) returns the terms of x. The layout is a compile-time constant.
template <class TermsOf>
NORMSCOPE_INLINE void add_sums(const TensorView& x, const TermsOf& terms_of, TileRange tiles,
                               LimbsView limbs) {
  if (x.layout() == Layout::kChannelsFirst) {
    constexpr std::integral_constant<Layout, Layout::kChannelsFirst> kLayout;
    add_sums_channels_first(terms_of(kLayout), tiles, limbs);
    return;
  }
  constexpr std::integral_constant<Layout, Layout::kChannelsLast> kLayout;
  if (x.positions == 1) {
    add_sums_of_elements(terms_of(kLayout), tiles, limbs);
  } else {
    add_sums_channels_last(terms_of(kLayout), tiles, limbs);
  }
}

template <class Element>
[[gnu::noinline]] void add_moments(const TensorView& x, TileRange tiles, LimbsView limbs) {
  add_sums(x, [&](auto /*layout*/) { return MomentTerms<Element>{x}; }, tiles, limbs);
}

template <class Element>
[[gnu::noinline]] void add_gradient_sums(const TensorView& x, const TensorView& dy,
                                         const ChannelArrays& coefficients,
                                         const ActivationFunction& activation, TileRange tiles,
                                         LimbsView limbs) {
  const auto formulas = formula_arrays<Normalize, Arithmetic<Element>>(coefficients);
  if (activation.kind == Activation::kNone) {
    const auto terms_of = [&](auto /*layout*/) {
      return GradientTerms<Element, OutputGradient>{x, dy, formulas.mean_hi(), {}};
    };
    add_sums(x, terms_of, tiles, limbs);
    return;
  }
  const auto terms_of = [&](auto layout) {
    using Gradient = ActivatedOutputGradient<Element, decltype(layout)::value>;
    const Gradient gradient{formulas, clip_of<Arithmetic<Element>>(activation)};
    return GradientTerms<Element, Gradient>{x, dy, formulas.mean_hi(), gradient};
  };
  add_sums(x, terms_of, tiles, limbs);
}

template <class Element, class InputsAt, class Formulas, class Store>
NORMSCOPE_INLINE void apply_with(const Store& store, const InputsAt& inputs_at,
                                 const Formulas& formulas, TileRange tiles,
                                 const MutableTensorView& y) {
  if (y.layout() == Layout::kChannelsFirst) {
    apply_channels_first<Element>(inputs_at, formulas, tiles, store, y);
  } else {
    apply_channels_last<Element>(inputs_at, formulas, tiles, store, y);
  }
}

template <class Element, class InputsAt, class Formulas>
NORMSCOPE_INLINE void apply(const InputsAt& inputs_at, const Formulas& formulas, TileRange tiles,
                            Stores stores, const MutableTensorView& y) {
  if (stores == Stores::kCached) {
    apply_with<Element>(kStoreCached, inputs_at, formulas, tiles, y);
  } else {
    apply_with<Element>(kStoreStreaming, inputs_at, formulas, tiles, y);
    finish_streaming();
  }
}

// The same with a choice for each vector, which is half the code to compile. There are many
// activations, and all but the simplest take longer than the choice.
template <class Element, class InputsAt, class Formulas>
NORMSCOPE_INLINE void apply_activated(const InputsAt& inputs_at, const Formulas& formulas,
                                      TileRange tiles, Stores stores, const MutableTensorView& y) {
  const auto store = [stores](void* to, Words words) {
    if (stores == Stores::kCached) {
      store_bytes(to, words);
    } else {
      stream_words(to, words);
    }
  };
  apply_with<Element>(store, inputs_at, formulas, tiles, y);
  if (stores == Stores::kStreaming) finish_streaming();
}

template <class Element>
[[gnu::noinline]] void normalize(const TensorView& x, const ChannelArrays& coefficients,
                                 const ActivationFunction& activation, const TensorView& residual,
                                 TileRange tiles, Stores stores, const MutableTensorView& y) {
  const auto formulas = formula_arrays<Normalize, Arithmetic<Element>>(coefficients);
  if (activation.kind == Activation::kNone) {
    const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
      return OneInput<Element>{element_at<Element>(x, n, c, p)};
    };
    apply<Element>(inputs_at, formulas, tiles, stores, y);
  } else if (residual.data != nullptr) {
    with_piecewise_linear<Arithmetic<Element>>(activation, [&](const auto& function) {
      const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
        return ActivatedSum{element_at<Element>(x, n, c, p), element_at<Element>(residual, n, c, p),
                            function};
      };
      apply_activated<Element>(inputs_at, formulas, tiles, stores, y);
    });
  } else {
    with_function<Arithmetic<Element>>(activation, [&](const auto& function) {
      const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
        return ActivatedInput{element_at<Element>(x, n, c, p), function};
      };
      apply_activated<Element>(inputs_at, formulas, tiles, stores, y);
    });
  }
}

template <class Element>
[[gnu::noinline]] void activation_gradient(const TensorView& x, const TensorView& dy,
                                           const ChannelArrays& coefficients,
                                           const ActivationFunction& activation, TileRange tiles,
                                           const MutableTensorView& dz) {
  const auto formulas = formula_arrays<Normalize, Arithmetic<Element>>(coefficients);
  with_function<Arithmetic<Element>>(activation, [&](const auto& function) {
    const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
      return ActivationGradient{element_at<Element>(x, n, c, p), element_at<Element>(dy, n, c, p),
                                function};
    };
    apply_with<Element>(kStoreCached, inputs_at, formulas, tiles, dz);
  });
}

template <class Element>
[[gnu::noinline]] void gradient_of_output(const TensorView& y, const TensorView& dy,
                                          const ActivationFunction& activation, TileRange tiles,
                                          const MutableTensorView& dz) {
  with_piecewise_linear<Arithmetic<Element>>(activation, [&](const auto& function) {
    const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
      return GradientOfOutput{element_at<Element>(y, n, c, p), element_at<Element>(dy, n, c, p),
                              function};
    };
    apply_with<Element>(kStoreCached, inputs_at, NoFormulas{}, tiles, dz);
  });
}

template <class Element>
[[gnu::noinline]] void input_gradient(const TensorView& x, const TensorView& dy,
                                      const ChannelArrays& coefficients,
                                      const ActivationFunction& activation, TileRange tiles,
                                      Stores stores, const MutableTensorView& dx) {
  if (activation.kind == Activation::kNone) {
    // Its members are the first ones of ActivatedInputGradient.
    const auto formulas = formula_arrays<InputGradient, Arithmetic<Element>>(coefficients);
    const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
      return TwoInputs<Element>{element_at<Element>(x, n, c, p), element_at<Element>(dy, n, c, p)};
    };
    apply<Element>(inputs_at, formulas, tiles, stores, dx);
    return;
  }
  const auto formulas = formula_arrays<ActivatedInputGradient, Arithmetic<Element>>(coefficients);
  const auto function = clip_of<Arithmetic<Element>>(activation);
  const auto inputs_at = [&](std::int64_t n, std::int64_t c, std::int64_t p) {
    return ActivatedTwoInputs{element_at<Element>(x, n, c, p), element_at<Element>(dy, n, c, p),
                              function};
  };
  apply_activated<Element>(inputs_at, formulas, tiles, stores, dx);
}

// The same for the element type of the tensors. The functions for each type are out of line, so
// that each has the registers that it alone needs.

void add_moments(const TensorView& x, TileRange tiles, LimbsView limbs) {
  with_element_type(x.dtype,
                    [&]<class Element>(Element*) { add_moments<Element>(x, tiles, limbs); });
}

void add_gradient_sums(const TensorView& x, const TensorView& dy, const ChannelArrays& coefficients,
                       const ActivationFunction& activation, TileRange tiles, LimbsView limbs) {
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    add_gradient_sums<Element>(x, dy, coefficients, activation, tiles, limbs);
  });
}

void normalize(const TensorView& x, const ChannelArrays& coefficients,
               const ActivationFunction& activation, const TensorView& residual, TileRange tiles,
               Stores stores, const MutableTensorView& y) {
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    normalize<Element>(x, coefficients, activation, residual, tiles, stores, y);
  });
}

void input_gradient(const TensorView& x, const TensorView& dy, const ChannelArrays& coefficients,
                    const ActivationFunction& activation, TileRange tiles, Stores stores,
                    const MutableTensorView& dx) {
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    input_gradient<Element>(x, dy, coefficients, activation, tiles, stores, dx);
  });
}

void activation_gradient(const TensorView& x, const TensorView& dy,
                         const ChannelArrays& coefficients, const ActivationFunction& activation,
                         TileRange tiles, const MutableTensorView& dz) {
  with_element_type(x.dtype, [&]<class Element>(Element*) {
    activation_gradient<Element>(x, dy, coefficients, activation, tiles, dz);
  });
}

void gradient_of_output(const TensorView& y, const TensorView& dy,
                        const ActivationFunction& activation, TileRange tiles,
                        const MutableTensorView& dz) {
  with_element_type(y.dtype, [&]<class Element>(Element*) {
    gradient_of_output<Element>(y, dy, activation, tiles, dz);
  });
}

}  // namespace

constinit const Target kTarget{
    .can_run = can_run,
    .add_limbs = add_limbs,
    .canonicalize = canonicalize_limbs,
    .moments = moments_of_limbs,
    .gradient_sums = gradient_sums_of_limbs,
    .add_moments = add_moments,
    .add_gradient_sums = add_gradient_sums,
    .normalize = normalize,
    .input_gradient = input_gradient,
    .activation_gradient = activation_gradient,
    .gradient_of_output = gradient_of_output,
};

}  // namespace normscope::cpu::NORMSCOPE_TARGET
