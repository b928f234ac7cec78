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

import normscope
from normscope import Costs, measure_costs
from normscope.__main__ import main
from normscope.measurement import _beginnings, _levels

SIZES = (1 << 10, 1 << 17)


def test_levels_time_groups_on_one_host_and_across_hosts() -> None:
    levels = {level.name: level.groups for level in _levels([7, 5, 5, 7, 5, 9])}

    assert levels == {
        "alone": [[0]],
        "shared_memory": [[1, 2], [1, 2, 4]],
        "within_host": [[1, 2], [1, 2, 4]],
        "between_hosts": [[0, 1], [0, 1, 5]],
    }
    assert _beginnings([3]) == []
    assert _beginnings(list(range(8))) == [list(range(n)) for n in (2, 4, 8)]


def test_ranks_of_one_host_measure_shared_memory_and_the_backend(ranks: RankPool) -> None:
    found, environments = zip(*ranks.run(3, _measured), strict=True)

    costs = found[0]
    assert found == (costs,) * 3
    assert [point.ranks for point in costs.shared_memory or ()] == [2, 3]
    assert costs.within_host is not None
    assert costs.within_host.latency + costs.within_host.seconds_per_byte > 0
    assert costs.call > 0
    assert costs.seconds_per_byte_added > 0
    assert costs.between_hosts is None
    assert set(costs.errors or {}) == {"call", "shared_memory", "within_host"}
    assert environments == (None,) * 3
    prediction = normscope.predict([("bn", 8, "node")], hosts=1, ranks_per_host=3, costs=costs)
    assert prediction.sizes[0].seconds > 0


def _measured() -> tuple[Costs, str | None]:
    return measure_costs(sizes=SIZES, rounds=3), os.environ.get("NORMSCOPE_SHARED_MEMORY")


def test_ranks_of_several_hosts_measure_between_them(ranks: RankPool) -> None:
    for costs in ranks.run(3, _measured_on_hosts):
        assert costs.between_hosts is not None
        assert costs.between_hosts.latency + costs.between_hosts.seconds_per_byte > 0
        assert costs.shared_memory is None
        assert costs.within_host is None


def _measured_on_hosts() -> Costs:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {distributed.get_rank()}")
        return measure_costs(sizes=SIZES, rounds=3)


def test_without_a_process_group_nothing_is_measured() -> None:
    with pytest.raises(ValueError, match="measure_costs: expected a default process group"):
        measure_costs()


def test_arguments_out_of_range_are_refused(ranks: RankPool) -> None:
    ranks.run(2, _refuses)


def _refuses() -> None:
    with pytest.raises(ValueError, match="sizes: expected two or more different sizes"):
        measure_costs(sizes=[1024])
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        measure_costs(rounds=0)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "normscope", "measure", *arguments]


def test_without_a_launcher_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"

    result = subprocess.run(
        command("--ranks", "2", "--rounds", "1", "--output", str(path)),
        capture_output=True,
        text=True,
        check=True,
    )

    costs = Costs.load(path)
    assert [point.ranks for point in costs.shared_memory or ()] == [2]
    assert result.stdout == f"{costs}\n"
    assert "not measured: between_hosts" in result.stdout


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


def test_the_command_names_missing_and_conflicting_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(SystemExit, match="measure: MASTER_ADDR: expected the address of rank 0"):
        main(["measure"])
    with pytest.raises(SystemExit, match=r"--ranks: expected none under a launcher, .*, got 4"):
        main(["measure", "--ranks", "4"])


def test_the_command_needs_two_ranks() -> None:
    with pytest.raises(SystemExit, match="measure: ranks: expected at least 2, got 1"):
        main(["measure", "--ranks", "1"])
