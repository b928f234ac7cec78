#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/scopes.md: who shares statistics, on four ranks of two samples.

    scripts/draw_scopes.py docs/pictures

A box is a rank and a square is a sample. Squares with the same letter and color form a norm batch.
A line connects the ranks that exchange its sums. The files are committed, and a test compares them.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS = 4


@dataclass(frozen=True)
class Row:
    """One scope: its label, and the norm batch of each sample, rank by rank."""

    label: str
    batches: str
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """Several scopes, one below the other; hosts are the ranks of each host."""

    title: str
    rows: Sequence[Row]
    hosts: Sequence[Sequence[int]] = ()


SLICES = "AB CD EF GH"
LOCAL = "AA BB CC DD"
PAIRS = "AA AA BB BB"
WORLD = "AA AA AA AA"

PICTURES = {
    "scopes": Picture(
        "From a slice of a batch to all ranks",
        [
            Row("slices:2", SLICES),
            Row("local", LOCAL),
            Row("group:2", PAIRS),
            Row("world", WORLD),
        ],
    ),
    "slices": Picture("Each slice of a batch is a norm batch", [Row("slices:2", SLICES)]),
    "local": Picture("Each rank's batch is a norm batch", [Row("local", LOCAL)]),
    "group": Picture(
        "Consecutive ranks share statistics",
        [Row("group:2", PAIRS), Row("group:3", "AA AA AA BB")],
    ),
    "node": Picture("The ranks of a host share statistics", [Row("node", PAIRS)], [(0, 1), (2, 3)]),
    "world": Picture("All ranks share statistics", [Row("world", WORLD)]),
    "ranks": Picture(
        "Named sets of ranks share statistics",
        [Row("ranks:0,3/1,2", "AA BB BB AA"), Row("ranks:0,3", "AA BB CC AA")],
    ),
    "norm_batch": Picture(
        "A norm batch of at least M samples",
        [
            Row("norm_batch:1", SLICES, "is slices:2"),
            Row("norm_batch:2", LOCAL, "is local"),
            Row("norm_batch:4", PAIRS, "is group:2"),
            Row("norm_batch:8", WORLD, "is world"),
        ],
    ),
    "progressive": Picture(
        "A scope that grows with the steps of training",
        [
            Row("local", LOCAL, "from step 0"),
            Row("group:2", PAIRS, "from step 500"),
            Row("world", WORLD, "from step 1000"),
        ],
    ),
}

# White letters are legible on these colors, and the colors on a white or black page.
COLOURS = dict(
    zip(
        "ABCDEFGH",
        ("#2f6fb0", "#b65a00", "#2a7f4f", "#7a4fc0", "#b83a4b", "#157f87", "#8a5f2b", "#64708f"),
        strict=True,
    )
)
INK = "#797979"  # has the same contrast to a white and a dark page

# Lengths are pixels.
LABELS = 158  # the column before the ranks
SAMPLE, GAP = 34, 8
RANK = 2 * SAMPLE + 3 * GAP
PITCH = RANK + 18  # from rank to rank
BOX = SAMPLE + 2 * GAP
WIRE = 11  # from a box to its first line, and from line to line
WIDTH = LABELS + RANKS * PITCH - (PITCH - RANK) + 2


def rank_left(rank: int) -> int:
    """Return the left edge of a rank's box."""
    return LABELS + rank * PITCH


def text(x: float, y: float, words: str, anchor: str = "middle", style: str = "label") -> str:
    """Draw words at a point of their baseline."""
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def draw_rank(top: int, rank: int, batches: str) -> Iterator[str]:
    """Draw a box with its samples."""
    left = rank_left(rank)
    yield f'<rect class="line" x="{left}" y="{top}" width="{RANK}" height="{BOX}" rx="7"/>'
    for i, batch in enumerate(batches):
        x, y = left + GAP + i * (SAMPLE + GAP), top + GAP
        yield (
            f'<rect x="{x}" y="{y}" width="{SAMPLE}" height="{SAMPLE}" rx="4" '
            f'fill="{COLOURS[batch]}"/>'
        )
        yield text(x + SAMPLE / 2, y + SAMPLE / 2 + 5.5, batch, style="batch")


def overlap(ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether the lines of two sets of ranks would overlap on the same level."""
    return ranks[0] < others[-1] and others[0] < ranks[-1]


def wires(batches: Sequence[str]) -> Iterator[tuple[list[int], int]]:
    """Yield the ranks of each norm batch of several ranks, and the level of its line."""
    taken: list[tuple[int, list[int]]] = []
    spanning = [
        [rank for rank, own in enumerate(batches) if batch in own]
        for batch in sorted(set("".join(batches)))
    ]
    for ranks in sorted(spanning, key=lambda ranks: ranks[-1] - ranks[0]):
        if len(ranks) > 1:
            level = 1 + max((above for above, other in taken if overlap(ranks, other)), default=0)
            taken.append((level, ranks))
            yield ranks, level


def draw_wire(bottom: int, ranks: list[int], level: int) -> str:
    """Draw a line below the boxes of the ranks that exchange sums."""
    y = bottom + level * WIRE
    centres = [rank_left(rank) + RANK // 2 for rank in ranks]
    risers = "".join(f"M{x} {bottom}V{y}" for x in centres)
    return f'<path class="line" d="{risers}M{centres[0]} {y}H{centres[-1]}"/>'


def draw_row(top: int, row: Row) -> tuple[list[str], int]:
    """Draw a scope; return the shapes and the top of the next one."""
    batches = row.batches.split()
    middle = top + BOX / 2 + 5
    shapes = [text(0, middle - (9 if row.note else 0), row.label, "start", "scope")]
    if row.note:
        shapes.append(text(0, middle + 11, row.note, "start"))
    for rank, own in enumerate(batches):
        shapes.extend(draw_rank(top, rank, own))
    joined = list(wires(batches))
    shapes.extend(draw_wire(top + BOX, ranks, level) for ranks, level in joined)
    return shapes, top + BOX + WIRE * max((level for _, level in joined), default=0) + 18


def draw_host(host: int, ranks: Sequence[int]) -> Iterator[str]:
    """Draw a bracket above the ranks of a host."""
    left, right = rank_left(ranks[0]), rank_left(ranks[-1]) + RANK
    yield text((left + right) / 2, 13, f"host {host}")
    yield f'<path class="line" d="M{left} 27V20H{right}V27"/>'


def draw(picture: Picture) -> str:
    """Return the picture as SVG."""
    top = 30 if picture.hosts else 0
    shapes = [shape for host in enumerate(picture.hosts) for shape in draw_host(*host)]
    shapes += [text(rank_left(r) + RANK / 2, top + 13, f"rank {r}") for r in range(RANKS)]
    top += 22
    for row in picture.rows:
        row_shapes, top = draw_row(top, row)
        shapes += row_shapes
    height = top - 16
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="-1 0 {WIDTH} {height}" role="img">',
            f"<title>{picture.title}</title>",
            "<style>",
            f".line {{ fill: none; stroke: {INK}; stroke-width: 1.5; }}",
            "text { font: 600 14px system-ui, sans-serif; }",
            f".label, .scope {{ fill: {INK}; }}",
            ".scope { font-family: ui-monospace, monospace; }",
            ".batch { fill: #ffffff; font-size: 15px; }",
            "</style>",
            *shapes,
            "</svg>",
            "",
        ]
    )


def main(folder: Path) -> None:
    """Write all pictures to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(picture))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    main(Path(sys.argv[1]))
