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


@dataclass(frozen=True)
class Settings:
    """Choices that hold for every scope of a run; ranks read them from a file.

    Args:
        ranks: number of processes.
        images_per_rank: images that one rank trains on in a step.
        steps: optimizer steps.
        seed: of the network's first weights and of the scenes.
        device: where the network lives.
        data: folder of the user's images and masks; without it, digits on photographs.
    """

    ranks: int
    images_per_rank: int
    steps: int
    seed: int
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
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Arrangement:
    """How a scope is trained: by how many processes, and over how many images it normalizes.

    Args:
        scope: as normscope spells it.
        processes: that share the global batch.
        norm_batch_size: images that one set of statistics is computed over.
    """

    scope: str
    processes: int
    norm_batch_size: int

    @property
    def name(self) -> str:
        """The scope in words that can name a folder."""
        return self.scope.replace(":", "-")


def arrange(scope: str, ranks: int, images_per_rank: int) -> Arrangement:
    """Decides how to train `scope`.

    `slices:K` is trained by one process with the whole global batch, where K slices stand for K
    ranks; `slices` alone stands for as many as there are ranks.

    Raises:
        ValueError: if the scope is none of local, slices, slices:K, world, or if K does not divide
            the global batch.

    Example:
        >>> arrange("slices", ranks=4, images_per_rank=2)
        Arrangement(scope='slices:4', processes=1, norm_batch_size=2)
    """
    global_batch = ranks * images_per_rank
    if scope == "local":
        return Arrangement(scope, ranks, images_per_rank)
    if scope == "world":
        return Arrangement(scope, ranks, global_batch)
    spelling = re.fullmatch("slices(?::([0-9]+))?", scope)
    if spelling is None:
        raise ValueError(f"scope: expected local, slices, slices:K or world, got {scope!r}")
    slices = int(spelling[1] or ranks)
    if slices < 1 or global_batch % slices:
        raise ValueError(
            f"scope: expected slices:K where K divides the global batch of {global_batch}, "
            f"got {scope!r}"
        )
    return Arrangement(f"slices:{slices}", 1, global_batch // slices)
