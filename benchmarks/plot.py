# SPDX-License-Identifier: Apache-2.0
"""Draws the ratios to torch's layer."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cases import ARRANGEMENTS, SMALLEST
from ranks import Result

# The marks differ in shape as well as in colour.
_MARKS = {"float32": ("o", "#0b5fa5"), "bfloat16": ("s", "#c8571b")}
_TICKS = [0.25, 0.5, 1, 2, 4, 8]


def draw(path: Path, results: list[Result]) -> None:
    """Draw dots in one row per input and one column per direction and arrangement.

    Args:
        path: The PNG file to write.
        results: The rows of the table.
    """
    results = [result for result in results if result.case.shape != SMALLEST]
    names = list(dict.fromkeys(_name(result) for result in results))
    figure = Figure(figsize=(11, 8), layout="constrained")
    columns = figure.subplots(2, len(ARRANGEMENTS), sharex=True, sharey=True)
    for direction, axes_row in zip(("forward", "backward"), columns, strict=True):
        for arrangement, axes in zip(ARRANGEMENTS, axes_row, strict=True):
            axes.set_title(f"{direction}\n{arrangement}", fontsize=9)
            of_arrangement = [one for one in results if one.arrangement == arrangement]
            _draw_dots(axes, names, of_arrangement, direction)
    columns[0][0].legend(loc="lower right", fontsize=8)
    figure.supxlabel("torch.nn's time / normscope's: right of 1, normscope is faster; quartiles")
    figure.savefig(path, dpi=75)


def _name(result: Result) -> str:
    shape, layout, _ = str(result.case).split()
    return f"{shape} {layout}"


def _draw_dots(axes: Axes, names: list[str], results: list[Result], direction: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.set_xlim(_TICKS[0], _TICKS[-1])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(axis="both", color="#dddddd", linewidth=0.5)
    for offset, (dtype, (marker, color)) in zip((-0.15, 0.15), _MARKS.items(), strict=True):
        of_dtype = [one for one in results if one.case.dtype == dtype]
        ratios = [getattr(one.timing, direction).ratio for one in of_dtype]
        axes.errorbar(
            [ratio.median for ratio in ratios],
            [names.index(_name(one)) + offset for one in of_dtype],
            xerr=[
                [ratio.median - ratio.lower for ratio in ratios],
                [ratio.upper - ratio.median for ratio in ratios],
            ],
            fmt=marker,
            color=color,
            markersize=4,
            linewidth=1,
            label=dtype,
        )
