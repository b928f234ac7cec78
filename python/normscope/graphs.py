# SPDX-License-Identifier: Apache-2.0
"""What a layer becomes in a compiled graph."""

from __future__ import annotations

from types import TracebackType

from normscope import _library


class exact_graphs:  # noqa: N801 - named as torch.autograd.set_detect_anomaly
    """Keep layers whole in compiled graphs, with the bits of eager mode.

    ``torch.compile`` gets a training layer as an op that computes statistics, and as elementwise
    operations that it fuses with its neighbours: an activation, an addition, a cast. Statistics,
    running statistics and parameters' gradients have the bits of eager mode; y and the input's
    gradient have them where the compiler rounds each operation as eager mode does, which it need
    not. With exact graphs the elementwise part is one op as well, with the bits of eager mode and
    nothing fused.

    A function, or a context manager that restores what was before; off unless
    ``NORMSCOPE_EXACT_GRAPHS=1``. A graph is compiled anew when it is called under the other mode.

    Args:
        mode: Whether graphs are to be exact.

    Example:
        >>> with exact_graphs():
        ...     pass  # compile, and train
    """

    def __init__(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch's
        self._before = _library.exact_graphs
        _library.exact_graphs = mode

    def __enter__(self) -> None:
        """Keep layers whole from the constructor on."""

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore what was before."""
        _library.exact_graphs = self._before
