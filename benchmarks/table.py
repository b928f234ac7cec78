# SPDX-License-Identifier: Apache-2.0
"""Rows of at most 100 columns."""

from __future__ import annotations

from cases import Case
from timing import Direction, Timing

_DIRECTION = f"{'ms':>8}{'x torch':>8} {'(quartiles)':<12}{'copies':>6}"

HEADER = (
    f"{'':29}{'forward':^{len(_DIRECTION)}}{'backward':^{len(_DIRECTION)}}".rstrip()
    + f"\n{'input':14}{'layout':7}{'dtype':8}{2 * _DIRECTION}"
)


def row(case: Case, timing: Timing) -> str:
    """One case, forward and backward."""
    shape, layout, dtype = str(case).split()
    return f"{shape:14}{layout:7}{dtype:8}{_columns(timing.forward)}{_columns(timing.backward)}"


def _columns(direction: Direction) -> str:
    median, quartiles = str(direction.ratio).split()
    return f"{direction.milliseconds:8.3f}{median:>8} {quartiles:<12}{direction.copies:6.1f}"
