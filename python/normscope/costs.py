# SPDX-License-Identifier: Apache-2.0
"""What an exchange costs between these machines: parameters, measured or assumed, as JSON.

Nothing here knows torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# docs/numerics.md, "Limbs": two sums of five float64 for each channel, and a header of four.
_BYTES_PER_CHANNEL = 80
_HEADER_BYTES = 32

# Of a message in shared memory; a longer one goes in pieces (comm/exchange_options.h).
SLOT_BYTES = 65536

# A backend for the host carries frames of a multiple of this length, of which two numbers are the
# message's length. After the first steps a frame holds the whole message (docs/decisions/0031).
FRAME_BYTES = 1024
_LENGTH_BYTES = 16

BACKEND_ALGORITHMS = ("flat", "ring", "tree")


def message_bytes(channels: int) -> int:
    """Bytes that a rank of a layer sends in forward, and again in backward.

    Example:
        >>> message_bytes(64)
        5152
    """
    return _BYTES_PER_CHANNEL * channels + _HEADER_BYTES


@dataclass(frozen=True)
class HostCosts:
    """An exchange through shared memory among the ranks of one host.

    Args:
        ranks: That exchanged.
        latency: Seconds, whatever the length.
        seconds_per_byte: Of the message; copying it and adding those of the others.
    """

    ranks: int
    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class LinkCosts:
    """A message of the process group's backend between two ranks (Hockney 1994).

    Args:
        latency: Seconds, whatever the length.
        seconds_per_byte: The inverse of the bandwidth.
    """

    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Costs:
    """The parameters of the model of docs/scaling.md, for one kind of machines and network.

    ``python -m normscope measure`` finds them. What is None was not measured: there was one host,
    or one rank on each.

    Args:
        shared_memory: By the number of ranks; others are interpolated. None if not known.
        within_host: The backend's messages between two ranks of a host; None: as between hosts.
        between_hosts: The backend's messages between ranks of two hosts.
        call: Seconds that the backend takes for each all-reduce, whatever it sends.
        seconds_per_byte_copied: Of the message to the backend and back.
        seconds_per_byte_added: Of adding float64 numbers in memory.
        algorithm: That the backend sums by: one of ``flat``, ``ring``, ``tree``.
        frame_bytes: The backend's messages are padded to a multiple of it; 0 if they are not
            padded, as with NCCL.
        source: Where these numbers come from, for tables.
        errors: Largest relative deviation of the measured times from the model, by level.

    Example:
        >>> costs = Costs.ethernet_25g()
        >>> costs.between_hosts.latency
        3e-05
    """

    shared_memory: tuple[HostCosts, ...] | None = None
    within_host: LinkCosts | None = None
    between_hosts: LinkCosts | None = None
    call: float = 0.0
    seconds_per_byte_copied: float = 0.0
    seconds_per_byte_added: float = 0.0
    algorithm: str = "ring"
    frame_bytes: int = FRAME_BYTES
    source: str = ""
    errors: dict[str, float] | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in BACKEND_ALGORITHMS:
            raise ValueError(
                f"algorithm: expected one of {', '.join(BACKEND_ALGORITHMS)}, got {self.algorithm}"
            )
        if self.shared_memory is not None:
            ranks = [point.ranks for point in self.shared_memory]
            if not ranks or ranks[0] < 2 or ranks != sorted(set(ranks)):
                raise ValueError(
                    "shared_memory: expected points of growing numbers of ranks, from 2 on, got "
                    f"{ranks}"
                )
        numbers = [
            ("call", self.call),
            ("seconds_per_byte_copied", self.seconds_per_byte_copied),
            ("seconds_per_byte_added", self.seconds_per_byte_added),
            ("frame_bytes", self.frame_bytes),
            *(
                (name, value)
                for name in ("within_host", "between_hosts")
                if (link := getattr(self, name)) is not None
                for value in (link.latency, link.seconds_per_byte)
            ),
            *(
                ("shared_memory", value)
                for point in self.shared_memory or ()
                for value in (point.latency, point.seconds_per_byte)
            ),
        ]
        for name, value in numbers:
            if not value >= 0:
                raise ValueError(f"{name}: expected numbers of at least 0, got {value}")

    @classmethod
    def ethernet_25g(cls) -> Costs:
        """An assumption, not a measurement: TCP over 25 Gbit/s Ethernet, 30 us a message.

        Shared memory was measured with two ranks, and is taken in proportion for more.
        """
        return cls(
            _TWO_RANKS,
            LinkCosts(15e-6, 1 / 3e9),
            LinkCosts(30e-6, 8 / 25e9),
            call=30e-6,
            seconds_per_byte_copied=0.1e-9,
            seconds_per_byte_added=0.1e-9,
            source="assumed: 25 Gbit/s Ethernet, 30 us a message",
        )

    @classmethod
    def infiniband_100g(cls) -> Costs:
        """An assumption, not a measurement: MPI over 100 Gbit/s InfiniBand, 2 us a message.

        Shared memory as for :meth:`ethernet_25g`.
        """
        return cls(
            _TWO_RANKS,
            LinkCosts(0.5e-6, 1 / 10e9),
            LinkCosts(2e-6, 8 / 100e9),
            call=2e-6,
            seconds_per_byte_copied=0.1e-9,
            seconds_per_byte_added=0.1e-9,
            algorithm="tree",
            source="assumed: 100 Gbit/s InfiniBand, 2 us a message",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters as JSON, in seconds and bytes."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Costs:
        """Read what ``save`` or ``python -m normscope measure`` wrote.

        Raises:
            ValueError: If the file holds no such parameters.
        """
        try:
            fields = json.loads(Path(path).read_text())
            points = fields.pop("shared_memory", None)
            links: dict[str, Any] = {
                name: None if (link := fields.pop(name, None)) is None else LinkCosts(**link)
                for name in ("within_host", "between_hosts")
            }
            shared = None if points is None else tuple(HostCosts(**point) for point in points)
            return cls(shared_memory=shared, **links, **fields)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected what `python -m normscope measure` writes, got {error}"
            ) from error

    def on_host(self, ranks: int) -> HostCosts:
        """An exchange through shared memory among so many ranks.

        Between measured numbers of ranks it is interpolated; beyond them the last two go on
        linearly, or a single one in proportion to the number of the other ranks.

        Raises:
            ValueError: If that was not measured.
        """
        if self.shared_memory is None:
            raise ValueError(
                "costs: expected shared_memory, since ranks share a host, got None; measure with "
                "several ranks on a host, or give values of yours"
            )
        points = self.shared_memory
        if len(points) == 1:
            share = (ranks - 1) / (points[0].ranks - 1)
            return HostCosts(ranks, points[0].latency * share, points[0].seconds_per_byte * share)
        above = next((i for i, point in enumerate(points) if point.ranks >= ranks), len(points) - 1)
        low, high = points[max(above, 1) - 1 : max(above, 1) + 1]
        share = (ranks - low.ranks) / (high.ranks - low.ranks)
        return HostCosts(
            ranks,
            _between(low.latency, high.latency, share),
            _between(low.seconds_per_byte, high.seconds_per_byte, share),
        )

    def __str__(self) -> str:
        """A table of the parameters."""
        lines = [self.source] if self.source else []
        rows = [
            *(
                (f"shared memory, {point.ranks} ranks", point.latency, point.seconds_per_byte)
                for point in self.shared_memory or ()
            ),
            *(
                (name, link.latency, link.seconds_per_byte)
                for name, link in (
                    ("a message within a host", self.within_host),
                    ("a message between hosts", self.between_hosts),
                )
                if link is not None
            ),
        ]
        lines.append(f"{'':26}{'latency, us':>12}{'ns per KiB':>12}{'GB/s':>8}")
        for name, latency, per_byte in rows:
            rate = f"{1e-9 / per_byte:8.2f}" if per_byte > 0 else f"{'-':>8}"
            lines.append(f"{name:26}{latency * 1e6:12.2f}{per_byte * 1024e9:12.1f}{rate}")
        copied = self.seconds_per_byte_copied * 1024e9
        lines.append(
            f"an all-reduce of the backend ({self.algorithm}, padded to {self.frame_bytes} bytes): "
            f"{self.call * 1e6:.1f} us and {copied:.1f} ns per KiB more"
        )
        missing = [
            name
            for name in ("shared_memory", "within_host", "between_hosts")
            if getattr(self, name) is None
        ]
        if missing:
            lines.append(f"not measured: {', '.join(missing)}")
        if self.errors:
            told = ", ".join(f"{level} {error:.0%}" for level, error in self.errors.items())
            lines.append(f"largest deviation of a measured time from the model: {told}")
        return "\n".join(lines)


def padded_bytes(size: int, frame_bytes: int) -> int:
    """Return the bytes of the all-reduce by which a backend carries a message.

    Example:
        >>> padded_bytes(5152, 1024), padded_bytes(5152, 0)
        (6144, 5152)
    """
    if frame_bytes == 0:
        return size
    return -(-(size + _LENGTH_BYTES) // frame_bytes) * frame_bytes


def _between(low: float, high: float, share: float) -> float:
    """Linear, and never below 0: two measured points may fall."""
    return max(0.0, low + (high - low) * share)


# Measured (docs/scaling.md), with two ranks; an assumption for more of them.
_TWO_RANKS = (HostCosts(2, 0.7e-6, 0.1e-9),)
