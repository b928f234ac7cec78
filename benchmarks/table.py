# SPDX-License-Identifier: Apache-2.0
"""Rows of at most 100 columns."""

from __future__ import annotations

from cases import Case
from timing import Direction, Quartiles, Timing

_SHORT = {"float32": "f32", "bfloat16": "bf16"}

_INPUT = f"{'input':14}{'layout':7}{'type':5}"
_DIRECTION = f"{'ms':>7}{'ratio':>6} {'(quartiles)':<11}{'copies':>7}"
_WIDTH = len(_DIRECTION) + 6

COMPARISON_HEADER = f"{_INPUT}{'':26}{'forward':>18}{'backward':>20}"


def header(scope: str) -> str:
    """Return the two lines above the rows of a scope."""
    columns = 2 * (_DIRECTION + f"{'alone' if scope == 'local' else 'local':>6}")
    directions = f"{'':{len(_INPUT)}}{'forward':^{_WIDTH}}{'backward':^{_WIDTH}}".rstrip()
    return f"{directions}\n{_INPUT}{columns}"


def row(case: Case, timing: Timing) -> str:
    """Return the row of a case, with forward and backward."""
    return f"{_input(case)}{_columns(timing.forward)}{_columns(timing.backward)}".rstrip()


def comparison_row(case: Case, name: str, forward: Quartiles, backward: Quartiles | None) -> str:
    """Return the row of a comparison."""
    columns = _ratio(forward) + "  " + ("" if backward is None else _ratio(backward))
    return f"{_input(case)}{name:26}{columns}".rstrip()


def _input(case: Case) -> str:
    shape, layout, dtype = str(case).split()
    return f"{shape:14}{layout:7}{_SHORT[dtype]:5}"


def _ratio(ratio: Quartiles) -> str:
    median, quartiles = str(ratio).split()
    return f"{median:>6} {quartiles:<11}"


def _columns(direction: Direction) -> str:
    last = ""
    if direction.kernel_copies is not None:
        last = f"{direction.kernel_copies:.1f}"
    if direction.of_local is not None:
        last = f"{direction.of_local.median:.2f}"
    return f"{direction.milliseconds:7.3f}{_ratio(direction.ratio)}{direction.copies:7.1f}{last:>6}"
