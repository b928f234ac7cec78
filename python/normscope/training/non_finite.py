# SPDX-License-Identifier: Apache-2.0
"""A guard against non-finite values."""

from __future__ import annotations

from types import TracebackType

from normscope._binding import ops


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

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous mode."""
        ops.set_detect_non_finite(self._before)
