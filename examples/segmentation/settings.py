# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and their command-line arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from scenes import DigitScenes, FolderScenes, SceneSource

# Not a scope but a schedule of scopes: local, group:2, group:4, ..., world.
PROGRESSIVE = "progressive"

# Not a single scope but one for each layer, as found by normscope.recommend_scopes.
RECOMMENDED = "recommended"


@dataclass(frozen=True)
class Settings:
    """Settings for all scopes of a run."""

    ranks: int = 4  # processes
    images_per_rank: int = 2  # per step
    steps: int = 400  # optimizer steps
    data: Path | None = None  # the user's images and masks; None for digits on photographs

    @property
    def global_batch(self) -> int:
        """Number of images that all ranks together train on in a step."""
        return self.ranks * self.images_per_rank

    def share(self, rank: int) -> range:
        """Returns the indices in the global batch that a rank trains on."""
        return range(rank * self.images_per_rank, (rank + 1) * self.images_per_rank)

    def source(self) -> SceneSource:
        """Opens the scenes."""
        return DigitScenes() if self.data is None else FolderScenes(self.data)

    def scopes(self, asked: list[str]) -> list[str]:
        """Checks the requested scopes; there are as many slices as ranks.

        Raises:
            ValueError: if the demo cannot train under one of them.

        Example:
            >>> Settings(ranks=4).scopes(["local", "slices"])
            ['local', 'slices:4']
        """
        groups = [f"group:{size}" for size in range(2, self.ranks) if self.ranks % size == 0]
        known = ["local", "slices", *groups, "world", PROGRESSIVE, RECOMMENDED]
        for scope in asked:
            if scope not in known:
                raise ValueError(f"--scopes: expected some of {' '.join(known)}, got {scope!r}")
        slices = f"slices:{self.ranks}"
        return list(dict.fromkeys(slices if scope == "slices" else scope for scope in asked))

    def norm_batch_size(self, scope: str) -> int:
        """Returns the number of images that share statistics.

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
    """Parses the arguments of a program and the common ones: the settings and a seed."""
    for name, kind, default, what in (
        ("--ranks", positive, Settings.ranks, "number of processes"),
        ("--images-per-rank", positive, Settings.images_per_rank, "images per rank and step"),
        ("--steps", positive, None, f"optimizer steps per scope (default: {Settings.steps})"),
        ("--seed", int, 0, "seed of the initial weights and of the scenes"),
        ("--data", Path, Settings.data, "folder of your own pictures: DIR/images and DIR/masks"),
    ):
        described = what if default is None else f"{what} (default: %(default)s)"
        parser.add_argument(name, type=kind, default=default, help=described)
    given = parser.parse_args()
    steps = given.steps or Settings.steps
    return Settings(given.ranks, given.images_per_rank, steps, given.data), given


def positive(text: str) -> int:
    """Parses a positive number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
