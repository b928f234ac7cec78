# SPDX-License-Identifier: Apache-2.0
"""The benchmark that compares rules for choosing scopes implements these rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool
from torch import nn

import normscope
import recommended_scopes
import scope_rules
from scope_layers import layer_table
from scope_results import Result, append, read, table
from scope_tasks import RANKS, Task, make_task
from scopes_on_ranks import train_as_rank

LAYERS_OF_DIGITS = 13
STEPS = 3


class TwoBranches(Task):
    """Two layers with one feature each: the input of `same` is not noisy, that of `other` is.

    The first feature has the same values in each part of two samples.
    """

    steps = STEPS

    def __init__(self) -> None:
        self.model = normscope.convert(
            nn.ModuleDict({"same": nn.BatchNorm1d(1), "other": nn.BatchNorm1d(1)}), "local"
        )

    def images(self, step: int) -> torch.Tensor:
        """Return 4 parts of 2 samples."""
        noise = torch.randn(8, generator=torch.Generator().manual_seed(step))
        return torch.stack([torch.tensor([-1.0, 1.0] * 4), noise], dim=1)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return how far the layers are from preserving the order of a feature's values."""
        x = self.images(step)
        assert isinstance(model, nn.ModuleDict)
        same, other = model["same"](x[:, :1]), model["other"](x[:, 1:])
        whole = (x - x.mean(0)) / x.std(0, correction=0)
        return (torch.cat([same, other], dim=1) - whole).square().mean()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("budget", "bought"),
    [(0, set()), (3, {"b"}), (4, {"b", "d"}), (6, {"a", "b"}), (9, {"a", "b", "d"})],
)
def test_layers_beyond_the_remaining_budget_are_skipped(budget: float, bought: set[str]) -> None:
    prices = {"a": 3, "b": 3, "c": 4, "d": 1}

    assert scope_rules.affordable(["b", "a", "c", "d"], prices, budget) == bought


@pytest.mark.parametrize("scopes", ["", "wide", "noise", "noise=", "4%", "loss@=4", "only:"])
def test_misspelled_scopes_are_refused(scopes: str) -> None:
    with pytest.raises(ValueError, match=r"^scopes: expected local, .*, got '"):
        scope_rules.schedule_of(scopes, STEPS)


def test_an_unknown_layer_is_refused() -> None:
    (choose,) = scope_rules.schedule_of("only:nothing", STEPS).values()

    with pytest.raises(ValueError, match=r"expected one of 1, .* after only:, got nothing"):
        choose(make_task("digits", 0))


@pytest.mark.slow
def test_the_loss_changes_if_a_narrow_layer_is_noisy() -> None:
    task = TwoBranches()
    before = {name: value.clone() for name, value in task.model.state_dict().items()}

    changes = scope_rules.loss_changes(task)

    # Equal parts have the moments of the whole batch, because the sums are exact.
    assert changes["same"] == 0
    assert changes["other"] > 0.1
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert all(str(layer.scope) == "local" for layer in task.model.children())


@pytest.mark.slow
def test_a_single_layer_can_be_wide_or_narrow() -> None:
    task = make_task("digits", 0)

    (only,) = (choose(task) for choose in scope_rules.schedule_of("only:10", STEPS).values())
    (but,) = (choose(task) for choose in scope_rules.schedule_of("all-but:10", STEPS).values())

    assert [layer for layer, scope in only.items() if scope == "world"] == ["10"]
    assert [layer for layer, scope in but.items() if scope == "local"] == ["10"]
    assert len(only) == len(but) == LAYERS_OF_DIGITS


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["noise", "noise-per-byte", "loss", "loss-size", "random"])
@pytest.mark.parametrize("budget", ["4", "50%"])
def test_rules_keep_to_their_budget(rule: str, budget: str) -> None:
    task = make_task("digits", 0)
    plan = scope_rules.plan_of(task, 4)
    (choose,) = scope_rules.schedule_of(f"{rule}={budget}", STEPS).values()

    wide = {layer for layer, scope in choose(task).items() if scope == "world"}

    if rule == "noise-per-byte":
        sent = 2 * sum(layer.exchange_bytes for layer in plan.layers if layer.layer in wide)
        world = 2 * sum(layer.exchange_bytes for layer in plan.layers)
        assert 0 < sent <= (plan.bytes_per_step if budget == "4" else world / 2)
    else:
        planned = plan.exchanges_per_step // 2
        assert len(wide) == (planned if budget == "4" else LAYERS_OF_DIGITS // 2)


@pytest.mark.slow
def test_with_the_budget_of_a_plan_the_noisiest_layers_get_the_scopes_of_the_plan() -> None:
    task = make_task("digits", 0)
    (choose,) = scope_rules.schedule_of("noise=4", STEPS).values()

    scopes = choose(task)

    assert scopes == {layer.layer: layer.scope for layer in scope_rules.plan_of(task, 4).layers}


def test_a_random_choice_depends_on_the_seed() -> None:
    task = make_task("digits", 0)

    first, again, other = (scope_rules.rank(task, "random", seed) for seed in (0, 0, 1))

    assert first == again != other


def test_a_rule_can_be_applied_later() -> None:
    schedule = scope_rules.schedule_of("loss@2=4", STEPS)

    assert list(schedule) == [0, 2]
    assert set(schedule[0](make_task("digits", 0)).values()) == {"world"}
    assert not scope_rules.never_changes("loss@2=4")
    assert scope_rules.never_changes("loss=4")


def test_sent_bytes_are_counted_for_each_step() -> None:
    result = recommended_scopes.train("digits", "only:10", 0, STEPS)
    later = recommended_scopes.train("digits", "noise@1=4", 0, 4)

    assert result.exchanges == pytest.approx(1 / LAYERS_OF_DIGITS)
    assert later.exchanges == pytest.approx((1 + 3 * 4 / LAYERS_OF_DIGITS) / 4)


@pytest.mark.slow
def test_the_same_scopes_are_not_trained_twice() -> None:
    plan = recommended_scopes.train("digits", "4", 0, STEPS)
    marked = Result(**{**vars(plan), "quality": -1.0})

    same = recommended_scopes.train("digits", "noise=4", 0, STEPS, [marked])
    other = recommended_scopes.train("digits", "noise=4", 1, STEPS, [marked])

    assert (same.scopes, same.quality) == ("noise=4", -1.0)
    assert other.quality >= 0


def test_results_can_be_written_and_read(tmp_path: Path) -> None:
    results = [Result("digits", "4", seed, 0.5, 0.25, 0.125, {"1": "world"}) for seed in (0, 1)]
    for result in results:
        append(tmp_path / "results", result)

    assert read(tmp_path / "results") == results
    assert read(tmp_path / "none") == []


def test_quality_is_compared_seed_by_seed() -> None:
    results = [
        Result("digits", scopes, seed, quality, 1.0, 1.0, {})
        for seed, scopes, quality in (
            (0, "world", 0.5), (1, "world", 1.0), (0, "4", 0.25), (1, "4", 0.75), (2, "4", 0.8)
        )
    ]  # fmt: skip

    *_, row = table(results).splitlines()

    # The ratios are 0.5 and 0.75; with one degree of freedom the quantile is 6.314.
    numbers = "digits 1 4 3 0.600 ± 0.304 0.625 -0.164 to 1.414 100% 100%"
    assert " ".join(row.split()) == numbers


@pytest.mark.slow
def test_existing_results_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results"
    for scopes in ("world", "4"):
        append(path, Result("digits", scopes, 0, 0.5, 1.0, 1.0, {}))
    given = ["--tasks", "digits", "--scopes", "world", "4", "--seeds", "0", "1"]
    monkeypatch.setattr("sys.argv", ["recommended_scopes.py", *given, "--results", str(path)])
    monkeypatch.setattr(recommended_scopes, "train", lambda *_, **__: pytest.fail("trained"))

    recommended_scopes.main()

    assert len(read(path)) == 2
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_table_lists_the_criteria_of_the_rules_and_the_loss() -> None:
    qualities = (("world", 0.8), ("all-but:10", 0.4), ("only:10", 0.1))
    known = [Result("digits", scopes, 0, quality, 1.0, 1.0, {}) for scopes, quality in qualities]

    _, *rows = layer_table("digits", [0], known, steps=[0, 1]).splitlines()

    task = make_task("digits", 0)
    change = scope_rules.loss_changes(task)["10"]
    assert [row.split()[0] for row in rows] == list(scope_rules.plan_of(task).scopes)
    worth, of_first_weights, of_world = (rows[-1].split()[i] for i in (1, 2, -1))
    assert float(worth) == pytest.approx(2 / scope_rules.rank(task, "noise", 0)["10"], abs=0.05)
    assert float(of_first_weights) == pytest.approx(change, abs=5e-5)
    assert of_world == "0.500"
    assert rows[0].split()[-1] == "?"


@pytest.mark.slow
@pytest.mark.parametrize("scopes", ["world", "local", "progressive", "4"])
def test_ranks_train_like_one_process(ranks: RankPool, scopes: str) -> None:
    results = ranks.run(RANKS, train_as_rank, "digits", scopes, 0, STEPS)

    alone = recommended_scopes.train("digits", scopes, 0, STEPS)
    assert results == [results[0]] * RANKS
    assert results[0].processes == RANKS
    assert results[0].bytes >= alone.bytes
    assert results[0].wide_layers == alone.wide_layers
    # When a scope is first used, the ranks agree on it in an exchange.
    extra = results[0].exchanges - alone.exchanges
    assert 0 <= extra <= 2 / (2 * LAYERS_OF_DIGITS * STEPS)
