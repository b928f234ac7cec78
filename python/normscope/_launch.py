# SPDX-License-Identifier: Apache-2.0
"""Ranks for ``python -m normscope measure``: those of a launcher, or processes that it starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import distributed

from normscope.costs import Costs
from normscope.measurement import measure_costs

# Environment variables for the rank, the number of ranks, and the number of ranks on this host:
# of torchrun, Open MPI, MPICH and Intel MPI, and Slurm.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)
_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"
_USUAL_PORT = "29500"


def is_launched() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return _launcher() is not None


def _launcher() -> tuple[str, str, str] | None:
    return next(
        (names for names in _LAUNCHERS if names[0] in os.environ and names[1] in os.environ), None
    )


@contextlib.contextmanager
def joined_launch(backend: str) -> Iterator[None]:
    """Join the process group of the launcher's ranks, and leave it at the end of the block.

    Args:
        backend: A backend of torch.distributed.

    Raises:
        ValueError: If the environment does not say where rank 0 is.
    """
    names = _launcher()
    if names is None:
        raise ValueError(
            "measure: expected the variables of a launcher, such as RANK and WORLD_SIZE, got none"
        )
    rank, size = int(os.environ[names[0]]), int(os.environ[names[1]])
    on_this_host = os.environ.get(names[2], "")
    if _ADDRESS not in os.environ:
        if on_this_host != str(size):
            raise ValueError(
                f"{_ADDRESS}: expected the address of rank 0, since the ranks may be on several "
                "hosts, got none"
            )
        os.environ[_ADDRESS] = "127.0.0.1"
    os.environ.setdefault(_PORT, _USUAL_PORT)
    distributed.init_process_group(backend, init_method="env://", rank=rank, world_size=size)
    try:
        yield
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def measure_alone(ranks: int, rounds: int) -> Costs:
    """Measure among processes that this one starts on its host.

    Args:
        ranks: Number of processes, at least 2.
        rounds: See :func:`normscope.measure_costs`.
    """
    if ranks < 2:
        raise ValueError(f"ranks: expected at least 2, got {ranks}")
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="normscope-measure-") as folder,
        ProcessPoolExecutor(ranks, context) as processes,
    ):
        store = Path(folder, "store").as_uri()
        futures = [
            processes.submit(_measure_as_rank, rank, ranks, store, rounds) for rank in range(ranks)
        ]
        found = [future.result() for future in futures]
    return found[0]


def _measure_as_rank(rank: int, ranks: int, store: str, rounds: int) -> Costs:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    try:
        costs = measure_costs(rounds=rounds)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return costs
