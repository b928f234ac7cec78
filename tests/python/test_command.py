# SPDX-License-Identifier: Apache-2.0
"""``python -m normscope`` and the choice of kernels."""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import printed
from rank_pool import RankPool
from torch import distributed

import normscope
from normscope import __main__ as command
from normscope._binding import ops


def run_module(**environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "normscope"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_it_prints_versions_kernels_and_communicators() -> None:
    output = run_module()

    assert normscope.__version__ in output
    assert torch.__version__ in output
    assert all(name in output for name in ops.installation([]).kernels)
    assert "shared memory" in output
    assert "gloo" in output


def test_it_reports_cuda_as_not_built_if_no_library_contains_a_kernel() -> None:
    libraries = Path(normscope.__file__).parent.glob("*.so*")
    has_kernels = any(b"add_tiles_channels_first" in path.read_bytes() for path in libraries)

    assert ("\ncuda           not built\n" in printed()) == (not has_kernels)


@pytest.mark.slow
def test_the_environment_chooses_the_kernels() -> None:
    for name in ops.installation([]).kernels:
        assert f"in use: {name}\n" in run_module(NORMSCOPE_KERNELS=name)


def status_of_all() -> str:
    """Return the status of all processes while rank 1 waits."""
    net = normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    net(torch.randn(4, 2))
    text = ""
    if distributed.get_rank() == 0:
        while "rank 1 waits" not in text:
            text = printed("status")
    net(torch.randn(4, 2))
    return text


def test_status_lists_each_group_of_this_host_once(ranks: RankPool) -> None:
    [text, _] = ranks.run(2, status_of_all)

    lines = [line for line in text.splitlines() if "rank 1 waits in forward of 0" in line]
    assert len(lines) == 1
    assert re.match(
        r"process \d+ is rank 0 of 2, process \d+ is rank 1 of 2: rank 0 last", lines[0]
    )


def test_status_of_a_process_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"^status: .*process 4194999"):
        printed("status", "4194999")


def test_status_says_if_no_process_has_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_own_processes", lambda: [4194999])

    assert printed("status") == "no process has exchanged anything\n"


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2"}
ON_TWO_HOSTS = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({}, ["--ranks", "1"], "--ranks: expected at least 2, got 1"),
        (LAUNCHED, ["--ranks", "2"], "--ranks: expected none under a launcher, .* got 2"),
        (ON_TWO_HOSTS, [], "MASTER_ADDR: expected the address of rank 0, .* got none"),
    ],
)
def test_a_measurement_without_its_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SystemExit, match=f"^measure: {message}$"):
        printed("measure", *arguments)


def test_a_file_with_the_name_of_a_group_s_memory_is_skipped() -> None:
    file = os.memfd_create("normscope", os.MFD_ALLOW_SEALING)
    os.write(file, b"\xff" * 4096)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    skipped = f"process {os.getpid()}: /proc/{os.getpid()}/fd/{file} is skipped: "

    for processes in ([], [str(os.getpid())]):
        assert skipped in printed("status", *processes)
    os.close(file)
