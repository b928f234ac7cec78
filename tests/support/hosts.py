# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts, each of which is a set of Linux namespaces with its own address.

If the system does not allow namespaces, the hosts share the machine's network, and only
NORMSCOPE_NODE distinguishes them. One process imports torch. Hosts and ranks are forks of it, since
a fork takes milliseconds.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from host_processes import Died, Note, RankOfHost, Start, be_switch
from namespaces import INTERFACE, address_of
from rank_pool import Answer, RankFailureError, Task

# Far longer than any run takes, even on a busy machine.
HANG_SECONDS = 60.0

START_SECONDS = 60.0
FIRST_PORT = 29500


@dataclass
class Hosts:
    """Hosts that are connected by a switch. They can be used for several runs, one at a time.

    Args:
        number: Number of hosts.

    Example::

        with Hosts(2) as hosts:
            hosts.run((2, 2), train)
            with hosts.link_cut(1):
                ...
    """

    number: int
    why_not_isolated: str = field(default="", init=False)
    _switch: multiprocessing.process.BaseProcess | None = field(default=None, init=False)
    _to_switch: Connection | None = field(default=None, init=False)
    _to_hosts: list[Connection] = field(default_factory=list, init=False)
    _runs: int = field(default=0, init=False)

    def __enter__(self) -> Hosts:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolated(self) -> bool:
        """Whether the hosts have namespaces; ``why_not_isolated`` says why they have none."""
        return not self.why_not_isolated

    def run(
        self,
        ranks_of_hosts: Sequence[int],
        function: Callable[..., Any],
        *arguments: Any,
        group_seconds: float = 30.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ranks of the first hosts; see :meth:`begun`.

        Returns:
            The result of each rank.

        Raises:
            RankFailureError: If ranks raised, died or hung; the message has the tracebacks or the
                numbers of these ranks.
        """
        with self.begun(
            ranks_of_hosts,
            function,
            *arguments,
            group_seconds=group_seconds,
            environment=environment,
        ) as run:
            return run.results()

    @contextlib.contextmanager
    def begun(
        self,
        ranks_of_hosts: Sequence[int],
        function: Callable[..., Any],
        *arguments: Any,
        group_seconds: float = 30.0,
        hang_seconds: float = HANG_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Run]:
        """Start ``function(*arguments)`` on ranks, which are killed at the end of the block.

        Args:
            ranks_of_hosts: Number of ranks on each of the first hosts. The ranks of the default
                process group, over Gloo, are numbered host by host.
            function: Function at the top level of a file, from which every rank imports it.
            arguments: Arguments of the function, the same for every rank.
            group_seconds: Time limit of the process group.
            hang_seconds: Time after which ranks that have not answered are killed and reported.
            environment: Environment variables of this run.
        """
        if self._switch is None:
            self._start()
        if len(ranks_of_hosts) > self.number:
            raise ValueError(
                f"ranks_of_hosts: expected {self.number} hosts at most, got {len(ranks_of_hosts)}"
            )
        self._runs += 1
        task = Task(
            file=inspect.getfile(function),
            function=function.__name__,
            arguments=arguments,
            size=sum(ranks_of_hosts),
            store="env://",
            group_seconds=group_seconds,
            environment={**self._rendezvous(), **(environment or {})},
        )
        host_of_rank = [h for h, number in enumerate(ranks_of_hosts) for _ in range(number)]
        for host, number in enumerate(ranks_of_hosts):
            first = sum(ranks_of_hosts[:host])
            ranks = [RankOfHost(first + i, i, f"host{host}") for i in range(number)]
            self._to_hosts[host].send(Start(self._runs, task, ranks))
        run = Run(
            self._runs,
            [self._to_hosts[host] for host in host_of_rank],
            time.monotonic() + hang_seconds,
            self.close,
        )
        try:
            yield run
        finally:
            for connection in self._to_hosts:
                connection.send(("end", 0))

    @contextlib.contextmanager
    def link_cut(self, host: int) -> Iterator[None]:
        """Disconnect a host from the others within the block; only for isolated hosts."""
        self._ask_switch("cut", host)
        try:
            yield
        finally:
            self._ask_switch("mend", host)

    @contextlib.contextmanager
    def link_of_rate(self, host: int, rate: str) -> Iterator[None]:
        """Limit the rate of a host's link within the block; only for isolated hosts.

        Args:
            host: Number of the host.
            rate: Rate in each direction in tc's notation, such as "10mbit".
        """
        self._ask_switch("limit_rate", host, rate)
        try:
            yield
        finally:
            self._ask_switch("lift_limit", host)

    def close(self) -> None:
        """Kill all processes. The next run starts new ones."""
        for connection in (self._to_switch, *self._to_hosts):
            if connection is not None:
                connection.close()
        if self._switch is not None:
            self._switch.kill()
            self._switch.join()
        self._switch, self._to_switch = None, None
        self._to_hosts.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(self.number + 1)]
        (self._to_switch, of_switch), *rest = pipes
        self._to_hosts = [ours for ours, _ in rest]
        of_hosts = [theirs for _, theirs in rest]
        self._switch = context.Process(target=be_switch, args=(of_switch, of_hosts), daemon=True)
        self._switch.start()
        for _, theirs in pipes:
            theirs.close()
        self.why_not_isolated = self._reply_of_switch()

    def _rendezvous(self) -> dict[str, str]:
        if self.isolated:
            # The kernel keeps the port of a server for a while after its end: use another one.
            port = FIRST_PORT + self._runs
            address, interface = address_of(0), INTERFACE
        else:
            address, interface, port = "127.0.0.1", "lo", _free_port()
        return {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
        }

    def _ask_switch(self, method: str, *arguments: int | str) -> None:
        if not self.isolated:
            raise RuntimeError(f"{method}: the hosts share a network: {self.why_not_isolated}")
        if self._to_switch is None:  # it was killed with ranks that hung: there are no links left
            return
        self._to_switch.send((method, arguments))
        error = self._reply_of_switch()
        if error:
            raise RuntimeError(error)

    def _reply_of_switch(self) -> str:
        assert self._to_switch is not None
        try:
            if self._to_switch.poll(START_SECONDS):
                reply = self._to_switch.recv()
                assert isinstance(reply, str)
                return reply
        except (EOFError, ConnectionError):
            pass
        self.close()
        raise RuntimeError("the process that makes the hosts has ended or hangs")


@dataclass
class Run:
    """A run of a function on ranks, from its start."""

    number: int
    host_of_rank: list[Connection]
    deadline: float
    on_hang: Callable[[], None]
    _answers: dict[int, Answer] = field(default_factory=dict)
    _notes: dict[int, Any] = field(default_factory=dict)

    def notes(self) -> list[Any]:
        """Wait until every rank has called :func:`host_processes.tell`; return the latest values.

        Raises:
            RankFailureError: If ranks raised, died or hung.
        """
        self._receive_until(lambda: {*self._notes, *self._answers})
        self._raise_failures()
        return [self._notes[rank] for rank in range(len(self.host_of_rank))]

    def answers(self, of: Sequence[int] | Literal["all"] = "all") -> list[Answer]:
        """Wait for the answers of ranks; the answer of a killed rank is a failure."""
        ranks = range(len(self.host_of_rank)) if of == "all" else of
        self._receive_until(lambda: set(self._answers), set(ranks))
        return [self._answers[rank] for rank in ranks]

    def results(self) -> list[Any]:
        """Wait for all ranks, and return their results.

        Raises:
            RankFailureError: If ranks raised, died or hung.
        """
        answers = self.answers()
        self._raise_failures()
        return [answer.result for answer in answers]

    def kill(self, rank: int) -> None:
        """Kill a rank with a signal that it cannot handle."""
        self.host_of_rank[rank].send(("kill", rank))

    def _raise_failures(self) -> None:
        failures = [f"rank {r}: {a.failure}" for r, a in sorted(self._answers.items()) if a.failure]
        if failures:
            raise RankFailureError("\n".join(failures))

    def _receive_until(self, known: Callable[[], set[int]], wanted: set[int] | None = None) -> None:
        missing = wanted or set(range(len(self.host_of_rank)))
        while left := missing - known():
            ready = wait(
                list(set(self.host_of_rank)), timeout=max(0.0, self.deadline - time.monotonic())
            )
            if not ready:
                self.on_hang()
                raise RankFailureError(f"ranks {sorted(left)} hung")
            for connection in ready:
                assert isinstance(connection, Connection)
                self._take(connection)

    def _take(self, connection: Connection) -> None:
        try:
            number, rank, message = connection.recv()
        except (EOFError, ConnectionError):
            self.on_hang()
            raise RankFailureError("the first process of a host has ended") from None
        if number != self.number:  # a message of an earlier run
            return
        if isinstance(message, Died):
            what = f"died with exit code {message.exit_code}"
            self._answers.setdefault(rank, Answer(None, what))
            return
        told = pickle.loads(message)
        if isinstance(told, Note):
            self._notes[rank] = told.value
        else:
            self._answers[rank] = told


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
