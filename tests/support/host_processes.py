# SPDX-License-Identifier: Apache-2.0
"""Processes of hosts.py: the switch, the first process of each host, and the ranks."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from namespaces import (
    NamespaceError,
    Switch,
    enter_network_of_switch,
    start_host,
    start_process,
    why_not,
)
from rank_pool import Answer, Task, connect_ranks, module_of


@dataclass(frozen=True)
class RankOfHost:
    """A rank for a host to start.

    Args:
        rank: Rank in the default process group.
        local_rank: Rank within the host.
        host: Name of the host.
    """

    rank: int
    local_rank: int
    host: str


@dataclass(frozen=True)
class Start:
    """A command to a host: start ranks for the run with this number."""

    run: int
    task: Task
    ranks: Sequence[RankOfHost]


@dataclass(frozen=True)
class Note:
    """A value that a rank sends while it runs."""

    value: Any


@dataclass(frozen=True)
class Died:
    """The message that a rank has ended without an answer."""

    exit_code: int


# In a rank: the connection to the first process of its host.
_to_host: list[Connection] = []


def tell(value: object) -> None:
    """Send a value from a rank to the test, which gets it from :meth:`hosts.Run.notes`."""
    _to_host[0].send_bytes(pickle.dumps(Note(value)))


def be_switch(commands: Connection, of_hosts: list[Connection]) -> None:
    """Make the hosts, then run commands on their links until the test has ended.

    Args:
        commands: Connection to the test. Each command is answered with "" or an error. The first
            message to the test says why the hosts are not isolated; it is "" if they are.
        of_hosts: Connections over which the hosts get their runs.
    """
    # Ctrl-C in a terminal is meant for the test, which then ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reason = why_not()
    switch = None
    if not reason:
        try:
            enter_network_of_switch()
            switch = Switch()
        except NamespaceError as error:  # for example, because the main program has threads
            reason = str(error)
    _import_what_ranks_need()
    every = [commands, *of_hosts]
    for host, own in enumerate(of_hosts):
        life = partial(_be_host, own, [one for one in every if one is not own])
        if switch:
            switch.connect(start_host(f"host{host}", life))
        else:
            start_process(life)
    for connection in of_hosts:
        connection.close()
    commands.send(reason)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, arguments = commands.recv()
            try:
                getattr(switch, method)(*arguments)
                commands.send("")
            except NamespaceError as error:
                commands.send(str(error))


def _import_what_ranks_need() -> None:
    # Forks inherit the imported modules.
    import pytest
    import torch

    import normscope

    assert pytest
    assert normscope
    # There can be more ranks than cores.
    torch.set_num_threads(1)


@dataclass(frozen=True)
class _Process:
    """A process of the current run."""

    run: int
    rank: int
    process: int


def _be_host(connection: Connection, of_others: Sequence[Connection]) -> None:
    """Start the ranks of a host and forward their messages, as the host's first process."""
    for other in of_others:
        other.close()
    ranks: dict[Connection, _Process] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for ready in wait([connection, *ranks]):
                assert isinstance(ready, Connection)
                if ready is connection:
                    _obey(connection.recv(), connection, ranks)
                elif ready in ranks:  # it is not if a command has just ended the run
                    _pass_on(ready, connection, ranks)


def _obey(
    message: Start | tuple[str, int], connection: Connection, ranks: dict[Connection, _Process]
) -> None:
    if isinstance(message, Start):
        for one in message.ranks:
            ours, theirs = Pipe(duplex=False)
            not_theirs = [connection, ours, *ranks]
            process = start_process(partial(_be_rank, one, message.task, theirs, not_theirs))
            theirs.close()
            ranks[ours] = _Process(message.run, one.rank, process)
    elif message[0] == "kill":
        for one_of in ranks.values():
            if one_of.rank == message[1]:
                os.kill(one_of.process, signal.SIGKILL)
    else:
        for ours, one_of in ranks.items():
            os.kill(one_of.process, signal.SIGKILL)
            os.waitpid(one_of.process, 0)
            ours.close()
        ranks.clear()


def _pass_on(ready: Connection, connection: Connection, ranks: dict[Connection, _Process]) -> None:
    of_rank = ranks[ready]
    message: bytes | Died
    try:
        message = ready.recv_bytes()
    except EOFError:
        _, status = os.waitpid(of_rank.process, 0)
        ready.close()
        del ranks[ready]
        message = Died(os.waitstatus_to_exitcode(status))
    connection.send((of_rank.run, of_rank.rank, message))


def _be_rank(one: RankOfHost, task: Task, to_host: Connection, others: list[Connection]) -> None:
    """Run a task as a rank, then wait until the host kills this process."""
    for other in others:
        other.close()
    _to_host.append(to_host)
    os.environ.update(task.environment)
    os.environ.update(NORMSCOPE_NODE=one.host, LOCAL_RANK=str(one.local_rank))
    # The output of a rank would mix with pytest's own.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            # Imports take seconds, which must not count towards the group's time limit.
            function = getattr(module_of(task.file), task.function)
            connect_ranks(task.store, one.rank, task.size, task.group_seconds)
            answer = Answer(function(*task.arguments), None)
        except BaseException:
            answer = Answer(None, traceback.format_exc())
    # send() would share the memory of tensors with the other process.
    to_host.send_bytes(pickle.dumps(answer))
    # Other ranks may still need the store of this process.
    while True:
        signal.pause()
