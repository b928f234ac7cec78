# SPDX-License-Identifier: Apache-2.0
"""The demo as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

RUN = Path(__file__).parents[2] / "examples" / "segmentation" / "run.py"

# For an end that torchrun has up to 30 s for.
END_TIMEOUT_SECONDS = 60


def _command(output: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(RUN), "--output", str(output), *arguments]


def _run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(output, *arguments), capture_output=True, text=True, check=False)


def _metrics(output: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return metrics


@pytest.mark.slow
def test_the_same_command_gives_the_same_numbers_twice(tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--steps", "6")

    runs = [_run(tmp_path / name, *arguments) for name in ("one", "two")]

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    one, two = _metrics(tmp_path / "one"), _metrics(tmp_path / "two")
    assert set(one["scopes"]) == {"local", "slices:2", "world", "recommended"}
    for scope in one["scopes"]:
        assert _qualities(one, scope) == _qualities(two, scope)
    assert one["check"] == two["check"]


def _qualities(metrics: dict[str, Any], scope: str) -> list[tuple[list[float], list[float]]]:
    trainings = metrics["scopes"][scope]["trainings"]
    return [(training["losses"], training["mean_ious"]) for training in trainings]


@pytest.mark.slow
def test_a_thorough_run_tells_mean_and_spread_of_every_scope(tmp_path: Path) -> None:
    scopes = ("local", "slices", "group:2", "world", "progressive", "recommended")
    run = _run(tmp_path, "--thorough", "2", "--seed", "5", "--steps", "6", "--scopes", *scopes)

    assert run.returncode == 0, run.stderr
    metrics = _metrics(tmp_path)
    assert set(metrics["scopes"]) == {*scopes, "slices:4"} - {"slices"}
    assert [comparison["ranks"] for comparison in metrics["check"]] == [
        f"{scope} on 4 ranks" for scope in ("local", "group:2", "world")
    ]
    for scope, result in metrics["scopes"].items():
        assert [training["seed"] for training in result["trainings"]] == [5, 6]
        last = [mean_ious[-1] for _, mean_ious in _qualities(metrics, scope)]
        assert result["mean_iou"] == {
            "mean": statistics.fmean(last),
            "deviation": statistics.stdev(last),
        }
    stages = metrics["scopes"]["progressive"]["trainings"][0]["stages"]
    assert stages == {"0": "local", "2": "group:2", "4": "world"}
    assert metrics["scopes"]["world"]["exchanges_per_step"] == 22
    recommended = metrics["scopes"]["recommended"]
    assert recommended["trainings"][0]["scopes"]["image_level.1.1"] == "world"
    assert recommended["exchanges_per_step"] < 22
    assert "progressive: local from step 0, group:2 from step 2, world from step 4" in run.stdout


@pytest.mark.slow
def test_an_error_on_a_rank_ends_the_run_and_is_shown(tmp_path: Path) -> None:
    one_image = ("--ranks", "2", "--images-per-rank", "1", "--scopes", "local", "--steps", "2")

    run = _run(tmp_path, *one_image)

    assert run.returncode == 2
    assert "more than 1 value per channel" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_every_rank(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    endless = ("--ranks", "2", "--scopes", "local", "--steps", "1000000")
    with subprocess.Popen(
        _command(tmp_path, *endless), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        signal.signal(signal.SIGINT, inherited)
        assert run.stderr is not None
        assert any("images/s" in line for line in iter(run.stderr.readline, ""))

        send(run.pid, number)
        _, stderr = run.communicate(timeout=END_TIMEOUT_SECONDS)

    assert run.returncode == 128 + number
    assert f"run.py: ended by {number.name}" in stderr
    assert _commands_that_name(tmp_path) == []


def _commands_that_name(folder: Path) -> list[str]:
    """Command lines of running processes with the folder in them, as those of ranks have it."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text().replace("\0", " "))
        except OSError:  # It ended meanwhile.
            continue
    return [command for command in commands if str(folder) in command]


@pytest.mark.slow
def test_a_folder_of_images_and_masks_is_trained_on_and_reported(tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "output"
    _write_squares(data, count=10)

    run = _run(output, "--data", str(data), "--ranks", "2", "--steps", "8")

    assert run.returncode == 0, run.stderr
    metrics = _metrics(output)
    assert metrics["settings"]["data"] == str(data)
    assert len(metrics["check"]) == 2
    for scope in ("local", "slices:2", "world", "recommended"):
        assert [len(losses) for losses, _ in _qualities(metrics, scope)] == [8]
    assert (output / "report.html").exists()


def _write_squares(folder: Path, count: int) -> None:
    """Writes noise with a bright square of class 1 or 2 in each image."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        label = 1 + i % 2
        image = rng.integers(0, 100, (60, 80, 3), np.uint8)
        mask = np.zeros((60, 80), np.uint8)
        top, left = rng.integers(30, size=2)
        image[top : top + 30, left : left + 30, label] = 255
        mask[top : top + 30, left : left + 30] = label
        Image.fromarray(image).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")


def test_a_folder_without_images_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    run = _run(tmp_path / "output", "--data", str(tmp_path))

    assert run.returncode == 2
    assert run.stderr == f"run.py: {tmp_path / 'images'}: expected a folder, got none\n"
