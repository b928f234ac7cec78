# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, and the arguments that say so."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from scenes import DigitScenes, FolderScenes, SceneSource

# Not a scope but a schedule of them: local, group:2, group:4, ..., world.
PROGRESSIVE = "progressive"

# Not a scope either, but one for each layer, as normscope.recommend_scopes finds them.
RECOMMENDED = "recommended"


@dataclass(frozen=True)
class Settings:
    """Choices that hold for every scope of a run."""

    ranks: int = 4  # processes
    images_per_rank: int = 2  # in a step
    steps: int = 700  # of the optimizer
    data: Path | None = None  # the user's images and masks; without it, digits on photographs

    @property
    def global_batch(self) -> int:
        """Images that all ranks together train on in a step."""
        return self.ranks * self.images_per_rank

    def share(self, rank: int) -> range:
        """Indices in the global batch that a rank trains on."""
        return range(rank * self.images_per_rank, (rank + 1) * self.images_per_rank)

    def source(self) -> SceneSource:
        """Opens the scenes."""
        return DigitScenes() if self.data is None else FolderScenes(self.data)

    def scopes(self, asked: list[str] | None = None) -> list[str]:
        """Checks the scopes that are asked for, or chooses some; there are as many slices as ranks.

        Raises:
            ValueError: if the demo cannot train under one of them.

        Example:
            >>> Settings(ranks=4).scopes()
            ['local', 'slices:4', 'group:2', 'world', 'recommended']
        """
        groups = [f"group:{size}" for size in range(2, self.ranks) if self.ranks % size == 0]
        if asked is None:
            asked = ["local", "slices", *groups[:1], "world", RECOMMENDED]
        known = ["local", "slices", *groups, "world", PROGRESSIVE, RECOMMENDED]
        for scope in asked:
            if scope not in known:
                raise ValueError(f"--scopes: expected some of {' '.join(known)}, got {scope!r}")
        slices = f"slices:{self.ranks}"
        return list(dict.fromkeys(slices if scope == "slices" else scope for scope in asked))

    def norm_batch_size(self, scope: str) -> int:
        """Images that one set of statistics is computed over.

        Example:
            >>> Settings(ranks=4, images_per_rank=2).norm_batch_size("group:2")
            4
        """
        kind, _, count = scope.partition(":")
        if kind == "slices":
            return self.global_batch // int(count)
        ranks = {"local": 1, "world": self.ranks}.get(kind) or int(count)
        return ranks * self.images_per_rank


def parse(parser: argparse.ArgumentParser) -> tuple[Settings, argparse.Namespace]:
    """Reads a program's own arguments, and those that all have: the settings and a seed."""
    for name, kind, default, what in (
        ("--ranks", positive, Settings.ranks, "number of processes"),
        ("--images-per-rank", positive, Settings.images_per_rank, "images of a rank in a step"),
        ("--steps", positive, Settings.steps, "optimizer steps per scope"),
        ("--seed", int, 0, "of the first weights and of the scenes"),
        ("--data", Path, Settings.data, "folder of your own pictures: DIR/images and DIR/masks"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{what} (default: %(default)s)")
    given = parser.parse_args()
    return Settings(given.ranks, given.images_per_rank, given.steps, given.data), given


def positive(text: str) -> int:
    """Reads an argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
