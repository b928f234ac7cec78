# SPDX-License-Identifier: Apache-2.0
"""What a run is made of, and the arguments that say so."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from folder import FolderScenes
from scenes import DigitScenes, SceneSource

# Side of a scene in pixels; a user's images are scaled to it.
SIDE = 48

# Not a scope but a schedule of them: local, group:2, group:4, ..., world.
PROGRESSIVE = "progressive"

# Not a scope either, but one for each layer, as normscope.recommend_scopes finds them.
RECOMMENDED = "recommended"


@dataclass(frozen=True)
class Settings:
    """Choices that hold for every scope of a run.

    Args:
        ranks: number of processes.
        images_per_rank: images that one rank trains on in a step.
        steps: optimizer steps.
        data: folder of the user's images and masks; without it, digits on photographs.
    """

    ranks: int = 4
    images_per_rank: int = 2
    steps: int = 700
    data: Path | None = None

    @property
    def global_batch(self) -> int:
        """Images that all ranks together train on in a step."""
        return self.ranks * self.images_per_rank

    def share(self, rank: int) -> range:
        """Indices in the global batch that a rank trains on."""
        return range(rank * self.images_per_rank, (rank + 1) * self.images_per_rank)

    def source(self) -> SceneSource:
        """Opens the scenes."""
        return DigitScenes(SIDE) if self.data is None else FolderScenes(self.data, SIDE)

    def scope(self, text: str) -> str:
        """Checks a scope that is asked for; `slices` alone gets as many as there are ranks.

        Raises:
            ValueError: if the demo does not know the scope, or its K does not divide the global
                batch (slices) or the ranks (group).

        Example:
            >>> Settings(ranks=4).scope("slices")
            'slices:4'
        """
        if text in ("local", "world", PROGRESSIVE, RECOMMENDED):
            return text
        spelling = re.fullmatch("slices|(slices|group):([0-9]+)", text)
        if spelling is None:
            raise ValueError(
                "scope: expected local, slices, slices:K, group:K, world, progressive or "
                f"recommended, got {text!r}"
            )
        kind, count = spelling[1] or "slices", int(spelling[2] or self.ranks)
        divided = self.global_batch if kind == "slices" else self.ranks
        if count < 1 or divided % count:
            what = "global batch" if kind == "slices" else "number of ranks"
            raise ValueError(
                f"scope: expected {kind}:K where K divides the {what}, {divided}, got {text!r}"
            )
        return f"{kind}:{count}"

    def default_scopes(self) -> list[str]:
        """Those that differ on so many ranks.

        Example:
            >>> Settings(ranks=4).default_scopes()
            ['local', 'slices', 'group:2', 'world', 'recommended']
        """
        pairs = ["group:2"] if self.ranks > 2 and self.ranks % 2 == 0 else []
        return ["local", "slices", *pairs, "world", RECOMMENDED]

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
        return min(ranks, self.ranks) * self.images_per_rank

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Settings:
        """Takes what the arguments of `add_arguments` were given."""
        data = None if arguments.data is None else arguments.data.resolve()
        return cls(arguments.ranks, arguments.images_per_rank, arguments.steps, data)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every program of this folder can be given: the settings and a seed."""
    default = Settings()
    for name, value, what in (
        ("--ranks", default.ranks, "number of processes"),
        ("--images-per-rank", default.images_per_rank, "that one rank trains on in a step"),
        ("--steps", default.steps, "optimizer steps a scope"),
    ):
        parser.add_argument(
            name, type=positive, default=value, help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first weights and of the scenes (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of your own pictures, DIR/images and DIR/masks with the same stems (default: "
        "digits on photographs)",
        metavar="DIR",
    )


def positive(text: str) -> int:
    """Reads an argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
