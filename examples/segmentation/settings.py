# SPDX-License-Identifier: Apache-2.0
"""What one run of the demo is made of."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from folder import FolderScenes
from scenes import DigitScenes, SceneSource

# Side of a scene in pixels; a user's images are scaled to it.
SIDE = 48

# Not a scope but a schedule of them: local, group:2, group:4, ..., world.
PROGRESSIVE = "progressive"


@dataclass(frozen=True)
class Settings:
    """Choices that hold for every scope of a run; ranks read them from a file.

    Args:
        ranks: number of processes.
        images_per_rank: images that one rank trains on in a step.
        steps: optimizer steps.
        seeds: each trains every scope; a seed is that of the network's first weights and of the
            scenes.
        device: where the network lives.
        data: folder of the user's images and masks; without it, digits on photographs.
    """

    ranks: int
    images_per_rank: int
    steps: int
    seeds: tuple[int, ...]
    device: str
    data: str | None

    @property
    def global_batch(self) -> int:
        """Images that all ranks together train on in a step."""
        return self.ranks * self.images_per_rank

    def source(self) -> SceneSource:
        """Opens the scenes."""
        return DigitScenes(SIDE) if self.data is None else FolderScenes(Path(self.data), SIDE)

    def save(self, path: Path) -> None:
        """Writes the settings as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2))

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Reads what `save` wrote."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "seeds": tuple(fields["seeds"])})


@dataclass(frozen=True)
class Arrangement:
    """How a scope is trained.

    Args:
        scope: as normscope spells it, or progressive.
        processes: that share the global batch.
    """

    scope: str
    processes: int

    @property
    def name(self) -> str:
        """The scope in words that can name a folder."""
        return self.scope.replace(":", "-")


def arrange(scope: str, ranks: int, images_per_rank: int) -> Arrangement:
    """Decides how to train `scope`.

    `slices:K` is trained by one process with the whole global batch, where K slices stand for K
    ranks; `slices` alone stands for as many as there are ranks.

    Raises:
        ValueError: if the scope is none that the demo knows, or if its K does not divide the
            global batch (slices) or the ranks (group).

    Example:
        >>> arrange("slices", ranks=4, images_per_rank=2)
        Arrangement(scope='slices:4', processes=1)
    """
    if scope in ("local", "world", PROGRESSIVE):
        return Arrangement(scope, ranks)
    spelling = re.fullmatch("slices|(slices|group):([0-9]+)", scope)
    if spelling is None:
        raise ValueError(
            f"scope: expected local, slices, slices:K, group:K, world or progressive, got {scope!r}"
        )
    kind, count = spelling[1] or "slices", int(spelling[2] or ranks)
    divided = images_per_rank * ranks if kind == "slices" else ranks
    if count < 1 or divided % count:
        what = "global batch" if kind == "slices" else "number of ranks"
        raise ValueError(
            f"scope: expected {kind}:K where K divides the {what}, {divided}, got {scope!r}"
        )
    return Arrangement(f"{kind}:{count}", 1 if kind == "slices" else ranks)


def default_scopes(ranks: int) -> list[str]:
    """The scopes to compare where none are given: those that differ on so many ranks.

    Example:
        >>> default_scopes(4)
        ['local', 'slices', 'group:2', 'world', 'progressive']
    """
    pairs = ["group:2"] if ranks > 2 and ranks % 2 == 0 else []
    return ["local", "slices", *pairs, "world", PROGRESSIVE]


def norm_batch_size(scope: str, ranks: int, images_per_rank: int) -> int:
    """Images that one set of statistics is computed over; a last group may have fewer.

    Example:
        >>> norm_batch_size("group:2", ranks=4, images_per_rank=2)
        4
    """
    kind, _, count = scope.partition(":")
    if kind == "local":
        return images_per_rank
    if kind == "group":
        return images_per_rank * int(count)
    if kind == "slices":
        return images_per_rank * ranks // int(count)
    return images_per_rank * ranks
