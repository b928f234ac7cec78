# SPDX-License-Identifier: Apache-2.0
"""The comparison in figures and in words."""

from __future__ import annotations

from outcomes import Outcome
from settings import PROGRESSIVE

HEADINGS = (
    "scope",
    "processes",
    "images per norm batch",
    "mean IoU",
    "training time",
    "images/s",
    "synchronizing",
    "bytes sent per step",
)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """What stands under each heading."""
    return (
        outcome.scope,
        str(outcome.arrangement.processes),
        outcome.norm_batch_sizes,
        f"{outcome.mean_iou:.3f}",
        f"{outcome.seconds:.0f} s",
        f"{outcome.images_per_second:.0f}",
        f"{outcome.synchronization_share:.0%}",
        f"{outcome.bytes_per_step:,.0f}",
    )


def table(outcomes: list[Outcome]) -> str:
    """Formats the comparison for a terminal; the schedule of a progressive scope stands below."""
    rows = [HEADINGS, *(cells(outcome) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    notes = [f"{PROGRESSIVE}: {schedule}" for schedule in schedules(outcomes)]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *([""] if notes else []), *notes])


def schedules(outcomes: list[Outcome]) -> list[str]:
    """The progressive scope's schedule, if it was trained."""
    return [outcome.schedule for outcome in outcomes if outcome.scope == PROGRESSIVE]


def summary(outcomes: list[Outcome]) -> str:
    """Says in words how well each scope segments and how fast, from best to worst."""
    ranked = sorted(outcomes, key=lambda outcome: outcome.mean_iou.mean, reverse=True)
    return f"Mean IoU on held-out scenes: {'; '.join(_in_words(outcome) for outcome in ranked)}."


def _in_words(outcome: Outcome) -> str:
    return (
        f"{outcome.mean_iou:.3f} with {outcome.scope}, statistics over "
        f"{outcome.norm_batch_sizes} images, at {outcome.images_per_second.mean:.0f} images/s"
    )
