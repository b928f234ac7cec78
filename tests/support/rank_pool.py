# SPDX-License-Identifier: Apache-2.0
"""Ranks to run tests on: processes that live for the whole session, unless a run fails."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import gpu_ranks
import pytest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# The environments of ranks whose tensors these kernels normalize: normscope's, torch's
# native_batch_norm, and those of torch's synchronized layer, which synchronized_kernels.py has.
KERNELS = {
    "own": {},
    "native": {"NORMSCOPE_DEVICE_KERNELS": "torch"},
    "synchronized": {
        "NORMSCOPE_DEVICE_KERNELS": "torch",
        "NORMSCOPE_TEST_KERNELS": "synchronized",
    },
}

# Ranks are forked from a process that has imported what takes seconds, and share its memory. It has
# not imported normscope, which reads environment variables then.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "pytest"])

# Far longer than any task takes, even on a busy machine.
HANG_SECONDS = 120.0

# Of a dead rank's standard error.
MOST_CHARACTERS = 10_000


class RankFailureError(AssertionError):
    """A rank raised, died, or did not answer in time."""


@dataclass(frozen=True)
class Task:
    """A function of a test file that every rank of a process group runs."""

    file: str
    function: str
    arguments: tuple[Any, ...]
    size: int
    store: str
    group_seconds: float
    environment: Mapping[str, str]
    backend: str = "gloo"


@dataclass(frozen=True)
class Answer:
    """The outcome of a task on one rank."""

    result: Any
    failure: str | None


@dataclass(frozen=True)
class Rank:
    """A process of a pool."""

    process: BaseProcess
    connection: Connection
    errors: IO[bytes]  # what the process writes to its standard error

    def close(self) -> None:
        """Kill the process."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.errors.close()


@dataclass
class RankPool:
    """A pool of processes. Each run uses the first few as the ranks of a new process group.

    Args:
        environment: Environment variables for every run.
        backend: Of the process groups; over "nccl", a test is skipped if it has too few GPUs.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    backend: str = "gloo"
    _ranks: list[Rank] = field(default_factory=list)
    # torch ends a process that finds the file of a store gone while it removes the store. Ranks may
    # do so after they have answered.
    _stores: tempfile.TemporaryDirectory[str] | None = None
    _runs: int = 0

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        group_seconds: float = 60.0,
        hang_seconds: float = HANG_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ``size`` ranks, with a default process group.

        Args:
            size: The number of ranks.
            function: A function at the top level of a file, which every rank imports.
            arguments: The same for every rank; torch.distributed.get_rank() tells them apart.
            group_seconds: The time limit of the process group.
            hang_seconds: The time after which ranks that have not answered are killed and reported.
            environment: Environment variables for this run.

        Returns:
            The result of the function on each rank.

        Raises:
            RankFailureError: With the traceback of each rank that raised, or the ranks that died or
                hung. The next run starts new processes: torch counts groups, and a rank that has
                failed to make one would give the next one another name than its peers.
        """
        if self.backend == "nccl":
            if (reason := gpu_ranks.reason_here(size)) is not None:
                pytest.skip(reason)
            # `make gpu-check` has less time for all tests.
            group_seconds, hang_seconds = min(group_seconds, 30.0), min(hang_seconds, 45.0)
        while len(self._ranks) < size:
            self._ranks.append(_start_rank(self.environment))
        task = Task(
            file=inspect.getfile(function),
            function=function.__name__,
            arguments=arguments,
            size=size,
            store=self._new_store(),
            group_seconds=group_seconds,
            environment=dict(environment or {}),
            backend=self.backend,
        )
        try:
            return self._results_of(task, hang_seconds)
        except RankFailureError:
            self.close()
            raise

    def close(self) -> None:
        """Kill all ranks."""
        for rank in self._ranks:
            rank.close()
        self._ranks.clear()
        if self._stores is not None:
            self._stores.cleanup()
            self._stores = None

    def _new_store(self) -> str:
        """Return the path of a file that does not exist."""
        if self._stores is None:
            self._stores = tempfile.TemporaryDirectory(prefix="normscope-ranks-")
        self._runs += 1
        return str(Path(self._stores.name, str(self._runs)))

    def _results_of(self, task: Task, hang_seconds: float) -> list[Any]:
        for rank in range(task.size):
            try:
                self._ranks[rank].connection.send_bytes(pickle.dumps((rank, task)))
            except ConnectionError:
                raise self._death_of(rank, task.size) from None
        answers = self._gather(task.size, hang_seconds)
        failures = [f"rank {r}: {a.failure}" for r, a in enumerate(answers) if a.failure]
        if failures:
            raise RankFailureError("\n".join(failures))
        return [answer.result for answer in answers]

    def _gather(self, size: int, hang_seconds: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + hang_seconds
        while len(answers) < size:
            waiting = {self._ranks[r].connection: r for r in range(size) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailureError(
                    f"ranks {sorted(waiting.values())} of {size} hung for {hang_seconds} s"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    raise self._death_of(rank, size) from None
        return [answers[rank] for rank in range(size)]

    def _death_of(self, rank: int, size: int) -> RankFailureError:
        process, errors = self._ranks[rank].process, self._ranks[rank].errors
        process.join()
        errors.seek(0)
        text = errors.read().decode(errors="replace")[-MOST_CHARACTERS:]
        return RankFailureError(
            f"rank {rank} of {size} died with exit code {process.exitcode}\n{text}"
        )


def connected_group(ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
    """Make a process group of some ranks, and wait until all of them are connected.

    ``torch.distributed.new_group`` returns on a rank as soon as that rank is connected. If this
    rank then destroys the group, or exits, the other ranks fail to connect to it.

    Args:
        ranks: Ranks of the default group. Every rank of the default group has to make this call,
            with the same ranks.
        backend: The group's; None for that of the default group.

    Returns:
        The group, or ``GroupMember.NON_GROUP_MEMBER`` on a rank that is not in it.
    """
    from torch import distributed

    group: ProcessGroup = distributed.new_group(list(ranks), backend=backend)
    distributed.barrier()
    return group


def connect_ranks(store: str, rank: int, size: int, seconds: float = 60.0) -> None:
    """Make the default process group over Gloo, and wait until all ranks are connected.

    Args:
        store: A file that does not exist yet, the same for every rank; or a URL that
            torch.distributed knows, such as "env://".
        rank: The rank of this process.
        size: The number of ranks.
        seconds: The time limit of the group.
    """
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        init_method=store if "://" in store else f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    # See connected_group().
    distributed.barrier()


def _start_rank(environment: Mapping[str, str]) -> Rank:
    ours, theirs = CONTEXT.Pipe()
    errors = tempfile.NamedTemporaryFile(prefix="normscope-rank-")  # noqa: SIM115 - close() does
    process = CONTEXT.Process(
        target=_serve, args=(theirs, errors.name, dict(environment)), daemon=True
    )
    process.start()
    theirs.close()
    return Rank(process, ours, errors)


def _serve(connection: Connection, errors: str, environment: Mapping[str, str]) -> None:
    """Run tasks until the connection is closed."""
    # pytest would keep what a process that dies has written.
    with open(errors, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    os.environ.update(environment)
    import synchronized_kernels  # noqa: F401 - registers them if they are wanted
    import torch

    # There are more ranks than cores.
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            rank, task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_run(rank, task)))


def _run(rank: int, task: Task) -> Answer:
    # The output of a rank would be mixed with that of pytest.
    with contextlib.redirect_stdout(io.StringIO()), _environment(task.environment):
        try:
            # Imports take seconds, which must not count towards the time limit of the group.
            function = getattr(module_of(task.file), task.function)
            with _process_group(rank, task):
                return Answer(function(*task.arguments), None)
        except BaseException:
            return Answer(None, traceback.format_exc())


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _process_group(rank: int, task: Task) -> Iterator[None]:
    from torch import distributed

    try:
        connect_ranks(task.store, rank, task.size, task.group_seconds)
        if task.backend == "nccl":
            with gpu_ranks.over_nccl(f"{task.store}-nccl", task.group_seconds):
                yield
        else:
            yield
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


@cache
def module_of(file: str) -> ModuleType:
    name = f"ranks_of_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def error_of(call: Callable[[], object], kind: type[Exception] | None = None) -> str:
    """Return the text of the error that a call raises, or "" if it raises none.

    Args:
        call: What to call.
        kind: The error to expect, ``torch.distributed.DistError`` by default; others pass through.
    """
    from torch.distributed import DistError

    expected = kind or DistError
    try:
        call()
    except expected as error:
        return str(error)
    return ""


def split_of(sizes: Sequence[int], rank: int) -> slice:
    """Return the samples of ``rank``, if rank i has ``sizes[i]`` of them, in order."""
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
