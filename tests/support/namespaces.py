# SPDX-License-Identifier: Apache-2.0
"""Linux namespaces that look like hosts to the processes in them, and a switch to connect them.

The switch has a network namespace too. It is therefore invisible on the machine itself, and the
kernel removes it when the last process in the namespace ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

INTERFACE = "eth0"
SUBNET = "10.87.0"

_SWITCH = "switch"
_MOST_HOSTS = 16

# From linux/sched.h, sys/mount.h and sys/prctl.h.
_NEW_MOUNTS = 0x00020000
_NEW_HOST_NAME = 0x04000000
_NEW_IPC = 0x08000000
_NEW_USERS = 0x10000000
_NEW_PROCESSES = 0x20000000
_NEW_NETWORK = 0x40000000
_BIND = 0x1000
_RECURSIVE_AND_PRIVATE = 0x4000 | 0x40000
_DIE_WITH_PARENT = 1

# Longer than any message of a test takes at its rate: no packet may be dropped.
_LONGEST_QUEUE = "30s"
_BURST_BYTES = 16384

_PROBE_SECONDS = 20.0


class NamespaceError(Exception):
    """This machine does not allow namespaces, or lacks a program to set up their network."""


def address_of(host: int) -> str:
    """Return the address of a host in the subnet of the switch."""
    return f"{SUBNET}.{host + 1}"


def _die_with_parent() -> None:
    """Have the kernel kill this process as soon as the thread that forked it ends."""
    _call("prctl", _DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)


def enter_network_of_switch() -> None:
    """Move this process into a new network namespace, and without root also into a user namespace.

    Without root, the process must have a single thread.

    Raises:
        NamespaceError: If the system refuses.
    """
    for program in ("ip", "tc", "nsenter"):
        _path_of(program)
    if os.geteuid() == 0:
        _unshare(_NEW_NETWORK)
        return
    user, group = os.geteuid(), os.getegid()
    _unshare(_NEW_USERS | _NEW_NETWORK)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def start_host(name: str, life: Callable[[], None]) -> int:
    """Start the first process of a host, which ends with this thread.

    Args:
        name: Name of the host.
        life: Function that the process runs. When it returns or raises, all processes of the host
            end.

    Returns:
        The id of the process in this process's namespace.

    Raises:
        NamespaceError: If the system refuses the namespaces.
    """

    def begin() -> None:
        # This process stays in its PID namespace; its next child is the first process of a new one.
        _unshare(_NEW_NETWORK | _NEW_PROCESSES | _NEW_IPC | _NEW_HOST_NAME | _NEW_MOUNTS)
        process = _fork(life, prepare=lambda: _hide_other_hosts(name))
        to_parent.send((process, ""))
        os.waitpid(process, 0)

    def begin_or_tell() -> None:
        try:
            begin()
        except NamespaceError as error:
            to_parent.send((0, str(error)))

    ours, to_parent = multiprocessing.Pipe(duplex=False)
    _fork(begin_or_tell)
    to_parent.close()
    try:
        process, error = ours.recv()
    except EOFError:
        process, error = 0, "a process ended while it made a host"
    ours.close()
    if error:
        raise NamespaceError(error)
    return int(process)


def start_process(life: Callable[[], None]) -> int:
    """Start a process that runs ``life``, and ends at the latest with this thread."""
    return _fork(life)


def why_not() -> str:
    """Return why this machine cannot make hosts and their network; "" if it can."""

    def probe() -> None:
        try:
            enter_network_of_switch()
            switch = Switch()
            switch.connect(start_host("probe", lambda: time.sleep(_PROBE_SECONDS)))
            switch.limit_rate(0, "10mbit")
            to_parent.send("")
        except (NamespaceError, OSError) as error:
            to_parent.send(str(error))

    ours, to_parent = multiprocessing.Pipe(duplex=False)
    process = _fork(probe)
    to_parent.close()
    reason = str(ours.recv()) if ours.poll(_PROBE_SECONDS) else "making a host takes too long"
    ours.close()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return reason


def _hide_other_hosts(name: str) -> None:
    """Let this process see only the processes and the shared memory of its host."""
    _call("mount", b"none", b"/", None, _RECURSIVE_AND_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    socket.sethostname(name)
    # torch looks up the names of addresses, and there is no name server.
    names = Path("/dev/shm/hosts")
    lines = [
        f"{family}{address_of(host)} host{host}\n"
        for family in ("", "::ffff:")
        for host in range(_MOST_HOSTS)
    ]
    names.write_text("127.0.0.1 localhost\n" + "".join(lines))
    _call("mount", bytes(names), b"/etc/hosts", None, _BIND, None)
    names.unlink()


def _fork(life: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a child that runs ``prepare`` and then ``life``; return its id after ``prepare``.

    Raises:
        NamespaceError: If ``prepare`` fails.
    """
    ours, to_parent = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        code = 1
        try:
            ours.close()
            _die_with_parent()
            try:
                prepare()
                to_parent.send("")
            except (NamespaceError, OSError) as error:
                to_parent.send(str(error))
                os._exit(1)
            to_parent.close()
            life()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    to_parent.close()
    try:
        reason = ours.recv()
    except EOFError:
        reason = "a process ended before it was ready"
    ours.close()
    if reason:
        os.waitpid(process, 0)
        raise NamespaceError(reason)
    return process


@dataclass
class Switch:
    """A bridge in the network namespace of this process, with a port per host."""

    _processes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        _run("ip", "link", "add", _SWITCH, "type", "bridge")
        _run("ip", "link", "set", _SWITCH, "up")

    def connect(self, process: int) -> None:
        """Give the next host a link to the switch, and an address.

        Args:
            process: Id of a process of the host.
        """
        host = len(self._processes)
        self._processes.append(process)
        peer = ("type", "veth", "peer", "name", INTERFACE, "netns", str(process))
        _run("ip", "link", "add", _port(host), *peer)
        _run("ip", "link", "set", _port(host), "master", _SWITCH, "up")
        self._in_host(host, "ip", "link", "set", "lo", "up")
        self._in_host(host, "ip", "address", "add", f"{address_of(host)}/24", "dev", INTERFACE)
        self._in_host(host, "ip", "link", "set", INTERFACE, "up")

    def cut(self, host: int) -> None:
        """Disconnect a host from the switch; its own end of the link stays up."""
        _run("ip", "link", "set", _port(host), "nomaster")

    def mend(self, host: int) -> None:
        """Undo :meth:`cut`."""
        _run("ip", "link", "set", _port(host), "master", _SWITCH)

    def limit_rate(self, host: int, rate: str) -> None:
        """Limit the rate at which a host can send and receive.

        Args:
            host: Number of the host.
            rate: Rate in tc's notation, such as "10mbit".
        """
        limit = ("rate", rate, "burst", str(_BURST_BYTES), "latency", _LONGEST_QUEUE)
        _run("tc", "qdisc", "replace", "dev", _port(host), "root", "tbf", *limit)
        self._in_host(host, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limit)

    def lift_limit(self, host: int) -> None:
        """Undo :meth:`limit_rate`."""
        _run("tc", "qdisc", "delete", "dev", _port(host), "root")
        self._in_host(host, "tc", "qdisc", "delete", "dev", INTERFACE, "root")

    def _in_host(self, host: int, *command: str) -> None:
        of_host = f"--net=/proc/{self._processes[host]}/ns/net"
        _run("nsenter", of_host, _path_of(command[0]), *command[1:])


def _port(host: int) -> str:
    return f"port{host}"


def _path_of(program: str) -> str:
    # Not every user's PATH has the directories of these programs.
    path = shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if path is None:
        raise NamespaceError(f"there is no program {program}")
    return path


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [_path_of(program), *arguments], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode != 0:
        raise NamespaceError(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")


def _unshare(flags: int) -> None:
    _call("unshare", flags)


def _call(function: str, *arguments: bytes | int | None) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        error = os.strerror(ctypes.get_errno())
        raise NamespaceError(f"{function}: {error}")
