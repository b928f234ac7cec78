# SPDX-License-Identifier: Apache-2.0
"""A guard against values that are not finite."""

from __future__ import annotations

from types import TracebackType

from normscope import _library


class detect_non_finite:  # noqa: N801 - named as torch.autograd.set_detect_anomaly
    """Have layers raise if their input, or the gradient of their output, is not finite.

    As ``torch.autograd.set_detect_anomaly``: a function, or a context manager that restores what
    was before. In training all ranks of a layer's scope raise together, before any of them has
    updated a running statistic or a gradient, and are told on which rank it began: one NaN would
    reach them all by the statistics. The ranks can go on, with the next batch for example.

    It is off unless ``NORMSCOPE_DETECT_NON_FINITE=1``. All ranks must have it on, or none; those
    that differ are told so. It costs a pass over x and a message in each call, and on a device a
    wait for it.

    Args:
        mode: Whether to look.

    Example:
        >>> with detect_non_finite():
        ...     pass  # a training step
    """

    def __init__(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch's
        self._before = _library.set_detect_non_finite(mode)

    def __enter__(self) -> None:
        """Look from the constructor on."""

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore what was before."""
        _library.set_detect_non_finite(self._before)
