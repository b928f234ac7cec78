# SPDX-License-Identifier: Apache-2.0
"""What the demo tells of trainings."""

from __future__ import annotations

import itertools
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from outcome_table import summary, table
from outcomes import Outcome, Spread
from point_chart import PLOT, Box, Cross, Mark, place_labels, point_chart
from report import Report, write_metrics, write_report
from results import Quality, Speed, Stage, Training
from scenes import DigitScenes, held_out_batch
from settings import Arrangement, Settings


def _training(scope: str, stages: list[Stage], seed: int, mean_iou: float) -> Training:
    return Training(
        Arrangement(scope, processes=4),
        seed,
        stages,
        Quality(losses=[2.0, 1.0], evaluated_steps=[1, 2], mean_ious=[0.1, mean_iou]),
        Speed(
            seconds=40.0 + seed,
            images_per_second=100.0 + seed,
            synchronization_share=0.25,
            bytes_per_step=4096.0,
        ),
    )


def _outcome(scope: str, stages: list[Stage], *mean_ious: float) -> Outcome:
    trainings = [_training(scope, stages, seed, value) for seed, value in enumerate(mean_ious)]
    return Outcome(trainings, np.zeros((2, 48, 48), np.int64))


def _local(*mean_ious: float) -> Outcome:
    return _outcome("local", [Stage(0, "local", 2)], *mean_ious)


def _progressive(*mean_ious: float) -> Outcome:
    stages = [Stage(0, "local", 2), Stage(1, "world", 8)]
    return _outcome("progressive", stages, *mean_ious)


def _report(seeds: tuple[int, ...], outcomes: list[Outcome]) -> Report:
    settings = Settings(ranks=4, images_per_rank=2, steps=2, seeds=seeds, device="cpu", data=None)
    source = DigitScenes(48)
    return Report(settings, source.class_names, held_out_batch(source), [], outcomes)


def test_a_training_is_read_as_it_was_written(tmp_path: Path) -> None:
    training = _progressive(0.5).trainings[0]

    training.save(tmp_path / "result.json")

    assert Training.load(tmp_path / "result.json") == training


def test_the_spread_of_a_hand_computed_example() -> None:
    spread = Spread.of([1.0, 2.0, 6.0])

    # The squares of -2, -1 and 3 add up to 14; divided by 2. A few roundings of float64.
    assert spread.mean == 3.0
    assert spread.deviation == pytest.approx(7**0.5, rel=4 * sys.float_info.epsilon)


def test_the_table_of_one_seed_has_numbers_without_spread() -> None:
    text = table([_local(0.5)])

    assert "0.500" in text
    assert "±" not in text


def test_the_table_of_several_seeds_has_mean_and_deviation() -> None:
    text = table([_local(0.5, 0.6)])

    assert "0.550 ± 0.071" in text
    assert "40 ± 1 s" in text


def test_the_table_says_what_a_progressive_scope_was_when() -> None:
    lines = table([_local(0.5), _progressive(0.6)]).splitlines()

    assert lines[-1] == "progressive: local from step 0, world from step 1"
    assert lines[3].split()[:4] == ["progressive", "4", "2,", "8"]


def test_the_summary_begins_with_the_best_scope() -> None:
    text = summary([_local(0.5), _progressive(0.6)])

    assert text.index("0.600 with progressive") < text.index("0.500 with local")


def test_metrics_hold_every_seed_and_their_spread(tmp_path: Path) -> None:
    write_metrics(_report((0, 1), [_local(0.5, 0.6)]), tmp_path / "metrics.json")

    local = json.loads((tmp_path / "metrics.json").read_text())["scopes"]["local"]
    assert local["mean_iou"] == {
        "mean": Spread.of([0.5, 0.6]).mean,
        "deviation": Spread.of([0.5, 0.6]).deviation,
    }
    assert [training["quality"]["mean_ious"][-1] for training in local["trainings"]] == [0.5, 0.6]


def test_the_page_shows_each_scope_in_both_figures(tmp_path: Path) -> None:
    write_report(_report((0,), [_local(0.5), _progressive(0.6)]), tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text()
    for figure in ("mean IoU, kB sent per step", "mean IoU, seconds of training"):
        chart = page[page.index(f'aria-label="{figure}"') :].partition("</svg>")[0]
        assert chart.count("<circle") == 2
        assert ">local</text>" in chart
        assert ">progressive</text>" in chart
    assert "Progressive: local from step 0, world from step 1." in page
    assert "This is one seed" in page


def test_the_page_of_several_seeds_says_so(tmp_path: Path) -> None:
    write_report(_report((0, 1), [_local(0.5, 0.6)]), tmp_path / "report.html")

    assert "means over 2 seeds" in (tmp_path / "report.html").read_text()


def test_error_bars_reach_one_deviation_to_each_side() -> None:
    mark = Mark("local", Spread(10.0, 2.0), Spread(0.5, 0.1))

    svg = ElementTree.fromstring(point_chart("x", "y", [mark]))

    across, up = (line.attrib for line in svg.iter("line") if line.get("class") == "series-0")
    circle = next(svg.iter("circle")).attrib
    # Places are written with one decimal: two roundings of up to 0.05 in each distance.
    middle = (float(across["x1"]) + float(across["x2"])) / 2
    assert middle == pytest.approx(float(circle["cx"]), abs=0.1)
    assert (float(up["y1"]) + float(up["y2"])) / 2 == pytest.approx(float(circle["cy"]), abs=0.1)
    assert float(across["x2"]) > float(across["x1"])
    assert float(up["y2"]) > float(up["y1"])


def _point(x: float, y: float) -> Cross:
    return Cross(x, y, Box(x, x, y, y))


@pytest.mark.parametrize(
    "places",
    [
        [(60.0, 100.0)] * 5,
        [(60.0, 100.0), (60.0, 104.0), (420.0, 100.0), (420.0, 104.0), (300.0, 102.0)],
        [(420.0, 20.0), (425.0, 255.0), (50.0, 14.0), (50.0, 258.0), (420.0, 24.0)],
    ],
    ids=["on one place", "pairs at both edges", "in the corners"],
)
def test_names_cover_neither_points_nor_each_other_nor_leave_the_chart(
    places: list[tuple[float, float]],
) -> None:
    crosses = [_point(x, y) for x, y in places]

    labels = place_labels(["local", "slices:4", "group:2", "world", "progressive"], crosses)

    points = [box for cross in crosses for box in cross.boxes()]
    assert all(label.within(PLOT) for label in labels)
    assert not any(one.meets(other) for one, other in itertools.combinations(labels, 2))
    assert not any(label.meets(point) for label in labels for point in points)


def test_a_name_stands_beside_its_error_bar() -> None:
    bars = Box(left=150.0, right=250.0, top=90.0, bottom=110.0)

    (label,) = place_labels(["world"], [Cross(200.0, 100.0, bars)])

    assert label.left > bars.right
