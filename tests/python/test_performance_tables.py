# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md agree with the results."""

from pathlib import Path
from typing import Any

import pytest

import layers
import performance_tables as tables
from cases import ARRANGEMENTS, SMALLEST, Case
from ranks import Result
from timing import Direction, Quartiles, Timing

ROOT = Path(__file__).parents[2]


def test_the_document_has_the_tables_of_the_script() -> None:
    text = tables.DOCUMENT.read_text()

    assert tables.with_tables(text) == text, "run scripts/performance_tables.py"


def test_the_document_has_the_command_of_each_result(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    load = tables.load

    def load_and_note(name: str) -> dict[str, Any]:
        used.append(name)
        return load(name)

    monkeypatch.setattr(tables, "load", load_and_note)
    text = tables.with_tables(tables.DOCUMENT.read_text())

    for name in set(used):
        assert load(name)["command"] in text, name
        assert load(name)["machine"], name
    # Other files of results are those of `make gpu-check`.
    assert set(used) == {path.stem for path in tables.RESULTS.glob("*-zen[34].json")}


def test_the_readme_has_numbers_of_the_summary() -> None:
    rows = {row.split("|")[1].strip(): row for row in tables.layers_summary().splitlines()}
    readme = " ".join((ROOT / "README.md").read_text().split())

    def float32(name: str) -> str:
        forward, backward = rows[name].split("|")[2:4]
        return f"{forward.split()[0]} and {backward.split()[0]}"

    assert float32("local, 1 thread") in readme
    assert float32("world, 2 ranks of 1 thread") in readme


def timing(ratio: float) -> Timing:
    direction = Direction(1.0, ratio, Quartiles(ratio, ratio, ratio), 1.0, None, None)
    return Timing(direction, direction, 1.0)


def test_the_summary_is_made_from_saved_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {(2, 3): 0.5, (4, 3): 8.0, SMALLEST: 100.0}
    results = [
        Result(ARRANGEMENTS[0], Case(shape, "NC", dtype), timing(ratio))
        for dtype in tables.DTYPES
        for shape, ratio in shapes.items()
    ]
    layers.save(tmp_path / "layers-zen4.json", "a machine", results, [], {}, {})
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    # The geometric mean of 0.5 and 8, without the smallest input.
    assert tables.layers_summary().splitlines()[2:] == [
        "| local, 1 thread |" + " 2.00 (0.50) |" * 4
    ]
    assert "| 4x3 NC | 8.00 / 8.00 |" in tables.layers("float32")


def test_a_document_without_a_table_is_refused() -> None:
    text = tables.DOCUMENT.read_text().replace("<!-- table: memory -->", "")

    with pytest.raises(ValueError, match=r"tables: expected each of"):
        tables.with_tables(text)
