# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of costs show what the library predicts and simulates."""

from pathlib import Path

import pytest
from noisy_network import noise_batches, small_network
from rank_pool import RankPool

import normscope
import predicted_and_measured
import scaling
import stragglers
from normscope import Costs, HostCosts
from normscope.stragglers import expected_maximum

SHARED_MEMORY = Costs((HostCosts(2, 1e-6, 1e-9),))


def test_layers_with_a_scope_are_evenly_spaced_in_the_model() -> None:
    setting = stragglers.Setting(layers=4, ranks=3)

    assert stragglers.groups_of("local", setting) == [None] * 8
    assert stragglers.groups_of("group:2", setting) == [[0, 0, 2]] * 8
    world = [0, 0, 0]
    assert stragglers.groups_of("2 x world", setting) == [
        *[world, None, world, None],
        *[None, world, None, world],
    ]


@pytest.mark.parametrize("scopes", ["town", "group:0", "group:x", "5 x world", "0 x world"])
def test_unknown_scopes_are_refused(scopes: str) -> None:
    with pytest.raises(ValueError, match=r"^scopes: expected .*, got "):
        stragglers.groups_of(scopes, stragglers.Setting(layers=4, ranks=3))


def test_with_world_in_all_layers_each_pass_takes_the_maximum() -> None:
    longer, waits = stragglers.row("world", stragglers.Setting(10, 200, 0.1, steps=50))

    # The maximum of 200 times has a deviation of about 0.04; the result is the mean of a thousand.
    assert longer == pytest.approx(expected_maximum(200, 0.1) - 1, abs=5 * 0.04 / 1000**0.5)
    assert waits == pytest.approx(longer / (1 + longer))


def test_the_table_of_stragglers_has_a_row_per_scope(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stragglers.main(["--layers", "2", "--ranks", "4", "--spread", "0.1", "--scopes", "node"])

    *_, row, theory = capsys.readouterr().out.splitlines()
    assert row.startswith("node ")
    assert theory.startswith("world, in theory ")


def test_a_plan_gives_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = normscope.recommend_scopes(small_network().eval(), noise_batches(12), 12, ranks=2)
    plan.save(tmp_path / "plan.json")

    scaling.main(["--plan", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plot.svg")])

    output = capsys.readouterr().out
    for curve in scaling.CURVES:
        assert output.count(f"\n{curve.label} ") == 2
    assert "assumed: 25 Gbit/s Ethernet" in (tmp_path / "plot.svg").read_text()
    wide = [layer for layer in plan.layers if layer.chosen.ranks > 1]
    of_plan = scaling.layers_of(plan, None)
    assert sum(layer.scope == "group:2" for layer in of_plan) == len(wide) > 0


def test_predictions_are_compared_with_measured_times(ranks: RankPool) -> None:
    for comparisons in ranks.run(2, _compared):
        assert [each.channels for each in comparisons] == list(predicted_and_measured.CHANNELS)
        for each in comparisons:
            message = 80 * each.channels + 32
            assert each.predicted == pytest.approx(-(-message // 65536) * 1e-6 + message * 1e-9)
            assert each.measured > 0
        text = predicted_and_measured.table(comparisons)
        right = sum(each.is_right for each in comparisons)
        assert text.endswith(f"\n{right} of 5 within 30 %")


def _compared() -> list[predicted_and_measured.Comparison]:
    return predicted_and_measured.compare(SHARED_MEMORY, ["local", "world"], None, rounds=2)


def test_predictions_within_the_goal_are_right() -> None:
    for measured, right in ((1.29, True), (1.31, False), (0.78, True), (0.76, False)):
        comparison = predicted_and_measured.Comparison("world", 1, 1.0, measured)
        assert comparison.is_right is right
