# SPDX-License-Identifier: Apache-2.0
"""Modes of all layers: exact graphs, and a guard against non-finite values."""

from __future__ import annotations

from normscope._binding import ops


class exact_graphs:  # noqa: N801 - named as torch.autograd.set_detect_anomaly
    """Compile each layer as a single op that has the bits of eager mode.

    By default, ``torch.compile`` sees a training layer as an op that computes statistics, followed
    by elementwise operations, which it fuses with their neighbours: an activation, an addition, a
    cast. Statistics, running statistics and the parameters' gradients then have the bits of eager
    mode. y and the input's gradient have them only if the compiler rounds each operation as eager
    mode does, which it need not. With exact graphs the elementwise part is an op as well: nothing
    is fused, and all results have the bits of eager mode.

    Can be used as a function, or as a context manager that restores the previous mode. It is off
    unless ``NORMSCOPE_EXACT_GRAPHS=1``. A graph is recompiled when the mode has changed.

    Args:
        mode: Whether graphs are exact.

    Example:
        >>> with exact_graphs():
        ...     pass  # compile, and train
    """

    def __init__(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch's
        self._before = ops.exact_graphs
        ops.exact_graphs = mode

    def __enter__(self) -> None:
        """Do nothing: the constructor has set the mode."""

    def __exit__(self, *_: object) -> None:
        """Restore the previous mode."""
        ops.exact_graphs = self._before


class detect_non_finite:  # noqa: N801 - named as torch.autograd.set_detect_anomaly
    """Make layers raise if their input, or the gradient of their output, is not finite.

    Can be used as a function, or as a context manager that restores the previous mode, like
    ``torch.autograd.set_detect_anomaly``. A single NaN would spread to all ranks through the
    statistics. In training, all ranks of a layer's scope therefore raise together, before any of
    them updates a running statistic or a gradient, and the error names the rank that has the value.
    The ranks can continue afterwards, for example with the next batch.

    It is off unless ``NORMSCOPE_DETECT_NON_FINITE=1``. Either all ranks turn it on, or none;
    otherwise they raise. It costs a pass over x and a message in each call; on a device, each call
    also waits for the device.

    Args:
        mode: Whether to check.

    Example:
        >>> with detect_non_finite():
        ...     pass  # a training step
    """

    def __init__(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch's
        self._before = ops.set_detect_non_finite(mode)

    def __enter__(self) -> None:
        """Do nothing: the constructor has set the mode."""

    def __exit__(self, *_: object) -> None:
        """Restore the previous mode."""
        ops.set_detect_non_finite(self._before)
