# SPDX-License-Identifier: Apache-2.0
"""Who shares statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from normscope._binding import ops


@dataclass(frozen=True)
class Scope:
    """Who shares statistics: a value that can be parsed, printed, compared and pickled.

    ==================  ============================================================
    text                the norm batch
    ==================  ============================================================
    ``slices:K``        each of K slices of this rank's batch separately
    ``local``           this rank's batch
    ``group:K``         the batches of K consecutive ranks
    ``node``            the batches of the ranks of one host
    ``world``           the batches of all ranks
    ``ranks:0,1/2,3``   the batches of each named set of ranks
    ``norm_batch:M``    about M samples, from as many ranks or slices as needed
    ==================  ============================================================

    A scope does not contain a process group. The layer looks up its group when it runs, and ranks
    are numbered within that group. The last group of ``group:K`` may be smaller. Ranks that are in
    no set of ``ranks`` are ``local``. The ranks of a node find each other by the host's boot id.

    With b samples on each rank, ``norm_batch:M`` is ``slices:floor(b / M)`` if b >= 2 M, ``local``
    if M <= b < 2 M, and otherwise the smallest ``group:K`` with K b >= M, or ``world`` if there is
    none. b is the largest of the ranks' batches when the scope is first used in the process group.
    With a single rank, every scope stays within that rank, and b is the size of each batch.

    Args:
        text: A text from the table, or another scope.

    Raises:
        ValueError: If the text is none of these.

    Example:
        >>> str(Scope.slices(8))
        'slices:8'
        >>> Scope("ranks:0,1/2,3") == Scope.ranks([[0, 1], [2, 3]])
        True
    """

    text: str

    def __post_init__(self) -> None:
        text = str(self.text)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"scope: expected text that can be encoded, got {text!a}") from None
        object.__setattr__(self, "text", ops.resolve_scope(text, "", None))

    def __str__(self) -> str:
        return self.text

    @property
    def is_of_one_rank(self) -> bool:
        """Whether the scope never extends over several ranks."""
        return self.text == "local" or self.text.startswith("slices:")

    @property
    def depends_on_samples(self) -> bool:
        """Whether the scope depends on the batch size."""
        return self.text.startswith("norm_batch:")

    @classmethod
    def slices(cls, count: int) -> Scope:
        """Each of ``count`` slices of this rank's batch separately, as torch.chunk cuts it."""
        return cls(f"slices:{count}")

    @classmethod
    def local(cls) -> Scope:
        """This rank's batch."""
        return cls("local")

    @classmethod
    def group(cls, ranks: int) -> Scope:
        """The batches of ``ranks`` consecutive ranks."""
        return cls(f"group:{ranks}")

    @classmethod
    def node(cls) -> Scope:
        """The batches of the ranks of one host."""
        return cls("node")

    @classmethod
    def world(cls) -> Scope:
        """The batches of all ranks."""
        return cls("world")

    @classmethod
    def ranks(cls, sets: Iterable[Iterable[int]]) -> Scope:
        """The batches of each of the ``sets`` of ranks."""
        try:
            text = "/".join(",".join(map(str, ranks)) for ranks in sets)
        except TypeError:
            raise TypeError(
                f"sets: expected sets of ranks, such as [[0, 1], [2, 3]], got {sets!r}"
            ) from None
        return cls(f"ranks:{text}")

    @classmethod
    def norm_batch(cls, samples: int) -> Scope:
        """Norm batches of about ``samples`` samples, from as many ranks or slices as needed."""
        return cls(f"norm_batch:{samples}")
