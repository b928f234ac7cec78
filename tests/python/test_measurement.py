# SPDX-License-Identifier: Apache-2.0
"""Measuring the cost of exchanges, in real processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import RankPool
from torch import distributed

from normscope.__main__ import main
from normscope.costs import Costs, measure, predict
from normscope.costs.measurement import beginnings

SIZES = (1 << 10, 1 << 17)


def test_two_four_and_more_ranks_are_timed_up_to_all() -> None:
    assert beginnings([3]) == []
    assert beginnings([1, 2, 4]) == [[1, 2], [1, 2, 4]]
    assert beginnings(list(range(8))) == [list(range(n)) for n in (2, 4, 8)]


def test_ranks_of_one_host_measure_shared_memory_and_the_backend(ranks: RankPool) -> None:
    found, environments = zip(*ranks.run(3, _measured), strict=True)

    costs = found[0]
    assert found == (costs,) * 3
    assert costs.seconds("shared_memory", (1, 1024)) > 0
    assert costs.seconds("call", (1, 1024)) > 0
    assert costs.message is None
    assert set(costs.deviations) == {"call", "shared_memory"}
    assert costs.source == "measured, gloo"
    assert environments == (None,) * 3
    assert predict([("bn", 8, "node")], hosts=1, ranks_per_host=3, costs=costs).seconds > 0


def _measured() -> tuple[Costs, str | None]:
    return measure(sizes=SIZES, rounds=3), os.environ.get("NORMSCOPE_SHARED_MEMORY")


@pytest.mark.slow
def test_ranks_of_several_hosts_measure_between_them(ranks: RankPool) -> None:
    for costs in ranks.run(3, _measured_on_hosts):
        assert costs.seconds("message", (1, 1024)) > 0
        assert costs.shared_memory is None
        assert set(costs.deviations) == {"call", "message"}


def _measured_on_hosts() -> Costs:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {distributed.get_rank()}")
        return measure(sizes=SIZES, rounds=3)


def test_arguments_out_of_range_are_refused(ranks: RankPool) -> None:
    ranks.run(2, _refuses)


def _refuses() -> None:
    with pytest.raises(ValueError, match="sizes: expected two or more different sizes"):
        measure(sizes=[1024])
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        measure(rounds=0)


@pytest.mark.usefixtures("world_of_one")
def test_a_group_without_a_cpu_backend_is_refused() -> None:
    distributed.init_process_group("cuda:gloo")

    with pytest.raises(ValueError, match="measure: expected a process group with a CPU backend"):
        measure()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "normscope", "measure", *arguments]


@pytest.mark.slow
def test_without_a_launcher_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"

    result = subprocess.run(
        command("--ranks", "2", "--rounds", "1", "--output", str(path)),
        capture_output=True,
        text=True,
        check=True,
    )

    costs = Costs.load(path)
    assert set(costs.deviations) == {"call", "shared_memory"}
    assert result.stdout == f"{costs}\n"


def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "costs.json"):
        with pytest.raises(SystemExit, match="measure: --output: expected a file in a folder that"):
            main(["measure", "--ranks", "2", "--output", str(path)])


@pytest.mark.slow
def test_the_command_measures_on_the_ranks_of_mpirun(tmp_path: Path) -> None:
    path, port = tmp_path / "costs.json", str(_free_port())
    processes = [
        subprocess.Popen(
            command("--rounds", "1", "--output", str(path)),
            env=os.environ
            | {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    texts = [process.communicate(timeout=120) for process in processes]

    assert [process.returncode for process in processes] == [0, 0], texts
    assert texts[0][0] == f"{Costs.load(path)}\n"
    assert texts[1][0] == ""


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])
