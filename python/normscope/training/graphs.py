# SPDX-License-Identifier: Apache-2.0
"""Controls what a layer becomes in a compiled graph."""

from __future__ import annotations

from types import TracebackType

from normscope._binding import ops


class exact_graphs:  # noqa: N801 - named as torch.autograd.set_detect_anomaly
    """Compile each layer as a single op that has the bits of eager mode.

    By default, ``torch.compile`` sees a training layer as an op that computes statistics, followed
    by elementwise operations, which it fuses with their neighbors: an activation, an addition, a
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

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous mode."""
        ops.exact_graphs = self._before
