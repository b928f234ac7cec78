# SPDX-License-Identifier: Apache-2.0
"""The parameters of the cost of an exchange, and its formulas ("The model" in docs/scaling.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# The longest message that shared memory takes at once; longer ones are sent in pieces
# (comm/exchange_options.h).
SLOT_BYTES = 65536

# The largest piece that is sent between hosts, and the trailer of each piece (docs/decisions/0030).
_PIECE_BYTES = 131072
_TRAILER_BYTES = 16

# Messages over a backend are padded to a multiple of this length. Two numbers of a message hold its
# length. The longer frames of the first steps are left out (docs/decisions/0012).
_FRAME_BYTES = 1024
_LENGTH_BYTES = 16

# A latency in seconds and seconds per byte; or the factors with which they enter a time.
Terms = tuple[float, float]

# Each parameter of a cost: its name in tables, and the machines on which it can be measured.
_LEVELS = {
    "shared_memory": ("shared memory, each further rank", "several ranks on a host"),
    "message": ("message between hosts", "two hosts or more"),
    "call": ("all-reduce of the backend", "a CPU backend"),
}


def _are_terms(numbers: Terms) -> bool:
    try:
        return len(numbers) == 2 and all(number >= 0 for number in numbers)
    except TypeError:
        return False


@dataclass(frozen=True)
class Costs:
    """Parameters of the cost model in docs/scaling.md, for one kind of machine and network.

    :func:`measure` and ``python -m normscope measure`` measure them. Each has two numbers: seconds
    for a message of any length (the latency), and seconds per byte. It is None if it was not
    measured: because there was only one rank on each host, or only one host.

    Args:
        shared_memory: Cost of each further rank of a host in an exchange through shared memory.
        message: Cost of a message that the process group's backend sends to another host.
        call: Cost of an all-reduce of the backend in addition to its messages, for example for
            copying.
        source: Where these numbers come from; shown in tables.
        deviations: Largest relative deviations of measured times from the model, by parameter.

    Raises:
        ValueError: If a parameter is not a pair of numbers of at least 0.

    Example:
        >>> costs = Costs.ethernet_25g()
        >>> latency, seconds_per_byte = costs.message
        >>> latency
        3e-05
    """

    shared_memory: Terms | None = None
    message: Terms | None = None
    call: Terms | None = None
    source: str = ""
    deviations: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for level in _LEVELS:
            numbers = getattr(self, level)
            if numbers is not None and not _are_terms(numbers):
                raise ValueError(
                    f"{level}: expected a latency and seconds per byte of at least 0, got {numbers}"
                )

    @classmethod
    def ethernet_25g(cls) -> Costs:
        """Return assumed, not measured, costs of 25 Gbit/s Ethernet with 30 us per message.

        A call is assumed to take as long as a message. Shared memory was measured with two ranks.
        """
        source = "assumed: 25 Gbit/s Ethernet, 30 us per message"
        return cls((0.7e-6, 0.1e-9), (30e-6, 8 / 25e9), (30e-6, 0.1e-9), source)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters as JSON, in seconds and bytes."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Costs:
        """Read a file that ``save`` or ``python -m normscope measure`` wrote.

        Raises:
            ValueError: If the file does not hold these parameters.
        """
        try:
            fields: dict[str, Any] = json.loads(Path(path).read_text())
            pairs = {level: tuple(fields[level]) for level in _LEVELS if fields.get(level)}
            return cls(**fields | pairs)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected what `python -m normscope measure` writes, got {error}"
            ) from error

    def seconds(self, level: str, terms: Terms) -> float:
        """Return the seconds of a part of an exchange.

        Args:
            level: ``shared_memory``, ``message`` or ``call``.
            terms: Factors of the level's latency and of its seconds per byte.

        Raises:
            ValueError: If the level was not measured.
        """
        numbers = getattr(self, level)
        if numbers is None:
            raise ValueError(
                f"costs: expected {level}, got None; measure with {_LEVELS[level][1]}, or give "
                "your own values, as in dataclasses.replace(costs, message=(30e-6, 8 / 25e9))"
            )
        return float(terms[0] * numbers[0] + terms[1] * numbers[1])

    def __str__(self) -> str:
        """Return a table of the parameters."""
        lines = [self.source or "given", f"{'us':>42}{'ns per KiB':>12}{'deviation':>11}"]
        for level, (label, _) in _LEVELS.items():
            numbers = getattr(self, level)
            if numbers is None:
                lines.append(f"{label:32}  not measured")
                continue
            off = f"{self.deviations[level]:11.0%}" if level in self.deviations else ""
            lines.append(f"{label:32}{numbers[0] * 1e6:10.2f}{numbers[1] * 1024e9:12.1f}{off}")
        return "\n".join(lines)


def exchange_seconds(
    size: int, hosts: int, ranks_on_host: int, costs: Costs, sharing: int = 1
) -> float:
    """Return the seconds of an exchange of the library if no rank is late.

    The ranks of a host add their messages in shared memory. If there are several hosts, a leader on
    each then sums over the backend, and the result goes back.

    A message has ``size`` bytes. ``ranks_on_host`` is the largest number of the group's ranks on
    one host, and ``sharing`` the number of groups that use a host's link to others at the same
    time.
    """
    if hosts == 1:
        return costs.seconds("shared_memory", shared_memory_terms(size, ranks_on_host))
    if ranks_on_host == 1:
        return _over_backend(size, hosts, costs, sharing)
    seconds = 0.0
    for begin in range(0, size, _PIECE_BYTES):
        piece = min(size - begin, _PIECE_BYTES)
        # The leader adds the messages of the others, who then copy the result, at the same time.
        # Each side waits for the other once.
        there_and_back = 2 * (ranks_on_host - 1), ranks_on_host * piece
        seconds += costs.seconds("shared_memory", there_and_back)
        seconds += _over_backend(piece + _TRAILER_BYTES, hosts, costs, sharing)
    return seconds


def _over_backend(size: int, hosts: int, costs: Costs, sharing: int) -> float:
    messages, sent = ring_terms(size, hosts)
    call = costs.seconds("call", call_terms(size))
    return call + costs.seconds("message", (messages, sent * sharing))


def call_terms(size: int, _ranks: int = 1) -> Terms:
    """Return the factors of the costs of a call of the backend, for any number of ranks."""
    return 1, padded_bytes(size)


def shared_memory_terms(size: int, ranks: int) -> Terms:
    """Return the factors of the costs of shared memory among ranks of a host."""
    return (ranks - 1) * -(-size // SLOT_BYTES), (ranks - 1) * size


def ring_terms(size: int, ranks: int) -> Terms:
    """Return the factors of the costs of messages for a ring of one rank on each host.

    Each rank sends its part of the message around the ring twice (Thakur, Rabenseifner and Gropp
    2005).
    """
    parts = 2 * (ranks - 1)
    return parts, parts / ranks * padded_bytes(size)


# By the parameters of which they are the factors; the arguments are bytes and ranks.
TERMS: dict[str, Callable[[int, int], Terms]] = {
    "call": call_terms,
    "shared_memory": shared_memory_terms,
    "message": ring_terms,
}


def padded_bytes(size: int) -> int:
    """Return the bytes of the all-reduce with which a backend sends a message."""
    return -(-(size + _LENGTH_BYTES) // _FRAME_BYTES) * _FRAME_BYTES
