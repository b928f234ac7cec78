# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of costs show what the library predicts."""

from pathlib import Path

import pytest
from noisy_network import noise_batches, small_network
from rank_pool import RankPool

import normscope
import predicted_and_measured
import scaling
from normscope.costs import Costs

SHARED_MEMORY = Costs((1e-6, 1e-9))


@pytest.mark.slow
def test_a_plan_gives_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = normscope.recommend_scopes(
        small_network().eval(), noise_batches(12), 12, ranks=2, include="*"
    )
    plan.save(tmp_path / "plan.json")

    scaling.main(["--plan", str(tmp_path / "plan.json"), "--plot", str(tmp_path / "plot.svg")])

    output = capsys.readouterr().out
    for curve in scaling.CURVES:
        assert output.count(f"\n{curve.label} ") == 1
    assert "assumed: 25 Gbit/s Ethernet" in (tmp_path / "plot.svg").read_text()
    wide = [layer for layer in plan.layers if layer.chosen.ranks > 1]
    of_plan = scaling.layers_of(plan, None)
    assert sum(scope == "group:2" for _, _, scope in of_plan) == len(wide) > 0


@pytest.mark.slow
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
    return predicted_and_measured.compare(SHARED_MEMORY, ["local", "world"], rounds=2)


def test_predictions_within_the_goal_are_right() -> None:
    for measured, right in ((1.29, True), (1.31, False), (0.78, True), (0.76, False)):
        comparison = predicted_and_measured.Comparison("world", 1, 1.0, measured)
        assert comparison.is_right is right
