# SPDX-License-Identifier: Apache-2.0
"""Cost parameters of exchanges on given machines, measured or assumed; stored as JSON.

This module does not use torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# docs/numerics.md, "Limbs": two sums of five float64 per channel, and a header of four.
_BYTES_PER_CHANNEL = 80
_HEADER_BYTES = 32

# The longest message that shared memory takes at once; longer ones are sent in pieces
# (comm/exchange_options.h).
SLOT_BYTES = 65536

# Messages over a CPU backend are padded to a multiple of this length. Two numbers of a message hold
# its length. The longer frames of the first steps are left out (docs/decisions/0031).
FRAME_BYTES = 1024
_LENGTH_BYTES = 16

BACKEND_ALGORITHMS = ("flat", "ring", "tree")


def message_bytes(channels: int) -> int:
    """Return the bytes that a rank sends for a layer in the forward, and again in the backward.

    Args:
        channels: The layer's number of channels.

    Example:
        >>> message_bytes(64)
        5152
    """
    return _BYTES_PER_CHANNEL * channels + _HEADER_BYTES


@dataclass(frozen=True)
class HostCosts:
    """Cost of an exchange through shared memory among the ranks of one host.

    Args:
        ranks: Number of ranks in the exchange.
        latency: Seconds per exchange, for a message of any length.
        seconds_per_byte: Seconds per byte of the message, for copying it and adding those of the
            other ranks.
    """

    ranks: int
    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class LinkCosts:
    """Cost of a message that the process group's backend sends between two ranks (Hockney 1994).

    Args:
        latency: Seconds per message, for a message of any length.
        seconds_per_byte: Inverse of the bandwidth.
    """

    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Costs:
    """Parameters of the cost model in docs/scaling.md, for one kind of machine and network.

    ``python -m normscope measure`` measures them. A parameter is None if it was not measured:
    because there was only one host, or only one rank on each.

    Args:
        shared_memory: Costs for several numbers of ranks, in increasing order; other numbers are
            interpolated. None if not known.
        within_host: Cost of the backend's messages between two ranks of a host. If None,
            ``between_hosts`` is used.
        between_hosts: Cost of the backend's messages between ranks of two hosts. None if not known.
        call: Seconds that the backend takes per all-reduce, in addition to sending.
        seconds_per_byte_copied: Seconds per byte for copying a message to the backend and back.
        seconds_per_byte_added: Seconds per byte for adding float64 numbers in memory.
        algorithm: The backend's all-reduce algorithm: ``flat``, ``ring`` or ``tree``.
        frame_bytes: Messages over the backend are padded to a multiple of this number of bytes; 0
            for no padding, as with NCCL.
        source: Where these numbers come from; shown in tables.
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
                    f"shared_memory: expected increasing numbers of ranks, at least 2, got {ranks}"
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
        """Return assumed, not measured, costs of TCP over 25 Gbit/s Ethernet: 30 us per message.

        Shared memory was measured with two ranks, and is scaled in proportion for more ranks.
        """
        within, between = LinkCosts(15e-6, 1 / 3e9), LinkCosts(30e-6, 8 / 25e9)
        return cls._assumed(within, between, "ring", "25 Gbit/s Ethernet, 30 us per message")

    @classmethod
    def infiniband_100g(cls) -> Costs:
        """Return assumed, not measured, costs of MPI over 100 Gbit/s InfiniBand: 2 us per message.

        The costs of shared memory are those of :meth:`ethernet_25g`.
        """
        within, between = LinkCosts(0.5e-6, 1 / 10e9), LinkCosts(2e-6, 8 / 100e9)
        return cls._assumed(within, between, "tree", "100 Gbit/s InfiniBand, 2 us per message")

    @classmethod
    def _assumed(cls, within: LinkCosts, between: LinkCosts, algorithm: str, network: str) -> Costs:
        """Assume that a call takes as long as a message, and memory bandwidth of 10 GB/s."""
        return cls(
            _TWO_RANKS,
            within,
            between,
            call=between.latency,
            seconds_per_byte_copied=0.1e-9,
            seconds_per_byte_added=0.1e-9,
            algorithm=algorithm,
            source=f"assumed: {network}",
        )

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
        """Return the cost of an exchange through shared memory among the given number of ranks.

        It is interpolated linearly between the measured numbers of ranks, and extrapolated from
        the nearest two. A single measured point is scaled in proportion to ``ranks - 1``.

        Args:
            ranks: Number of ranks, at least 2.

        Raises:
            ValueError: If ``shared_memory`` is None.
        """
        if self.shared_memory is None:
            raise ValueError(
                "costs: expected shared_memory, since ranks share a host, got None; measure with "
                "several ranks on a host, or give your own values"
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
        """Return a table of the parameters."""
        lines = [self.source] if self.source else []
        rows = [
            *(
                (f"shared memory, {point.ranks} ranks", point.latency, point.seconds_per_byte)
                for point in self.shared_memory or ()
            ),
            *(
                (name, link.latency, link.seconds_per_byte)
                for name, link in (
                    ("message within a host", self.within_host),
                    ("message between hosts", self.between_hosts),
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
            f"all-reduce of the backend ({self.algorithm}, padded to {self.frame_bytes} bytes): "
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
            by_level = ", ".join(f"{level} {error:.0%}" for level, error in self.errors.items())
            lines.append(f"largest deviation of a measured time from the model: {by_level}")
        return "\n".join(lines)


def padded_bytes(size: int, frame_bytes: int) -> int:
    """Return the bytes of the all-reduce with which a backend sends a message.

    Args:
        size: Bytes of the message.
        frame_bytes: See :class:`Costs`.

    Example:
        >>> padded_bytes(5152, 1024), padded_bytes(5152, 0)
        (6144, 5152)
    """
    if frame_bytes == 0:
        return size
    return -(-(size + _LENGTH_BYTES) // frame_bytes) * frame_bytes


def _between(low: float, high: float, share: float) -> float:
    """Interpolate linearly. The result is never below 0: extrapolated times may decrease."""
    return max(0.0, low + (high - low) * share)


# Measured with two ranks (docs/scaling.md); an assumption for more ranks.
_TWO_RANKS = (HostCosts(2, 0.7e-6, 0.1e-9),)
