# SPDX-License-Identifier: Apache-2.0
"""What recommend_scopes and estimate_running_stats measure: which layers, and which inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from noisy_network import trained
from torch import nn
from torch.nn import functional

import normscope


class Conditional(nn.BatchNorm1d):
    """Conditional batch normalization (Dumoulin et al. 2017)."""

    def __init__(self, features: int) -> None:
        super().__init__(features, affine=False)
        self.gain = nn.Embedding(10, features)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = super().forward(x) * self.gain(label)[:, :, None]
        return y


class ScopedConditional(Conditional, normscope.BatchNorm1d):  # type: ignore[misc]
    pass


class ChannelsLast(nn.BatchNorm1d):
    """Normalizes x [N, L, C]."""

    def forward(self, *, scale: float, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return scale * super().forward(x.mT).mT


class ScopedChannelsLast(ChannelsLast, normscope.BatchNorm1d):  # type: ignore[misc]
    pass


class Functional(nn.BatchNorm1d):
    """Does not call the forward of its base, like some layers of timm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(
            2 * x, self.running_mean, self.running_var, training=self.training
        )


class Handmade(nn.BatchNorm1d):
    """Calls no function of torch that updates running statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, (0, 2), keepdim=True)
        return (x - mean) / (var + self.eps).sqrt()


class Twice(nn.BatchNorm1d):
    """The second call is not in the running statistics (virtual adversarial training)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.track_running_stats = False
        super().forward(x + 100)
        self.track_running_stats = True
        return y


class ScopedTwice(Twice, normscope.BatchNorm1d):  # type: ignore[misc]
    pass


for _torchs, _scoped in (
    (Conditional, ScopedConditional),
    (ChannelsLast, ScopedChannelsLast),
    (Twice, ScopedTwice),
):
    normscope.register_conversion(_torchs, _scoped)

FEATURES = 3
LABELS = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])

Call = Callable[[Any, torch.Tensor], torch.Tensor]

CALLS: dict[type[nn.BatchNorm1d], Call] = {
    nn.BatchNorm1d: lambda layer, x: layer(input=x),
    Conditional: lambda layer, x: layer(x, LABELS),
    ChannelsLast: lambda layer, x: layer(scale=2.0, x=x.mT).mT,
    Functional: lambda layer, x: layer(x / 2),
    Handmade: lambda layer, x: layer(x=x),
    Twice: lambda layer, x: layer(x),
}
SCOPED = [nn.BatchNorm1d, Conditional, ChannelsLast, Twice]


class Network(nn.Module):
    def __init__(self, layer: nn.Module, call: Call) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def batches() -> list[torch.Tensor]:
    # As many positions as channels: dimensions in the wrong order would not be noticed.
    return [torch.randn(8, FEATURES, FEATURES) + torch.arange(3.0)[:, None] for _ in range(6)]


@pytest.mark.parametrize(
    ("layer_class", "converts"),
    [*((each, False) for each in CALLS), *((each, True) for each in SCOPED)],
)
def test_estimates_are_those_of_the_input_where_the_layer_takes_it(
    layer_class: type[nn.BatchNorm1d], *, converts: bool
) -> None:
    model = Network(layer_class(FEATURES), CALLS[layer_class])
    if converts:
        normscope.convert(model, "local")
    given = batches()

    normscope.estimate_running_stats(model, given)

    x = torch.cat(given)
    # The mean and variance of numbers of order one, rounded to float32 once.
    layer: Any = model.layer
    torch.testing.assert_close(layer.running_mean, x.mean((0, 2)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var, x.var((0, 2)), rtol=1e-6, atol=1e-6)
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("layer_class", SCOPED[:-1])
def test_scopes_are_recommended_for_the_input_where_the_layer_takes_it(
    layer_class: type[nn.BatchNorm1d],
) -> None:
    model = normscope.convert(Network(layer_class(FEATURES), CALLS[layer_class]))
    plain = normscope.convert(nn.Sequential(nn.BatchNorm1d(FEATURES)))
    given = batches()

    of_model, of_plain = (
        normscope.recommend_scopes(trained(each), given, ranks=2).layers[0]
        for each in (model, plain)
    )

    # Four of the samples with three positions. Outputs that are scaled have the same noise.
    assert of_model.candidates[0].elements == of_plain.candidates[0].elements == 12
    if layer_class is not Conditional:  # scales each sample by another factor
        assert of_model.candidates[0].noise == pytest.approx(of_plain.candidates[0].noise)


def frozen_network(*, converts_frozen: bool) -> nn.Sequential:
    """Return two layers; the first is in evaluation, with mean 5 and variance 100."""
    frozen = nn.BatchNorm1d(FEATURES)
    frozen.get_buffer("running_mean").fill_(5.0)
    frozen.get_buffer("running_var").fill_(100.0)
    model = nn.Sequential(frozen, nn.BatchNorm1d(FEATURES)).double()
    normscope.convert(model, "local", exclude=None if converts_frozen else "0")
    frozen.eval()
    return model


def unchanged(model: nn.Module, state: dict[str, torch.Tensor], prefix: str = "") -> bool:
    return all(
        torch.equal(value, state[name])
        for name, value in model.state_dict().items()
        if name.startswith(prefix)
    )


@pytest.mark.parametrize("converts_frozen", [True, False])
def test_recommending_leaves_layers_in_evaluation_there(*, converts_frozen: bool) -> None:
    model = trained(frozen_network(converts_frozen=converts_frozen))
    model(torch.randn(8, FEATURES, dtype=torch.float64))
    state, seen = copy.deepcopy(model.state_dict()), []
    model[1].register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    given = [torch.randn(8, FEATURES, dtype=torch.float64) for _ in range(4)]

    plan = normscope.recommend_scopes(model, given, ranks=2)

    assert list(plan.scopes) == ["1"]
    # eps = 1e-5 is added to the variance of 100.
    torch.testing.assert_close(torch.cat(seen), (torch.cat(given) - 5) / 10, rtol=1e-6, atol=1e-6)
    assert unchanged(model, state)
    assert [layer.training for layer in model] == [False, True]
    assert model[1].elements_seen == 8 * FEATURES
    if converts_frozen:
        named = normscope.recommend_scopes(model, given, ranks=2, include=["0", "1"])
        assert list(named.scopes) == ["0", "1"]
        assert [layer.training for layer in model] == [False, True]


@pytest.mark.parametrize("converts_frozen", [True, False])
@pytest.mark.parametrize(
    ("patterns", "estimated"),
    [
        ({}, ["1"]),
        ({"include": "0"}, ["0"]),
        ({"include": "*"}, ["0", "1"]),
        ({"include": "*", "exclude": "1"}, ["0"]),
        ({"exclude": "0"}, ["1"]),
    ],
)
def test_only_layers_in_training_or_by_name_are_estimated(
    patterns: dict[str, Any], estimated: list[str], *, converts_frozen: bool
) -> None:
    model = frozen_network(converts_frozen=converts_frozen)
    x = torch.randn(16, FEATURES, dtype=torch.float64) + 3
    model(x)
    state, count = copy.deepcopy(model.state_dict()), model[1].elements_seen

    normscope.estimate_running_stats(model, [x], **patterns)

    assert count == x.numel()
    for name in ("0", "1"):
        assert unchanged(model, state, name) == (name not in estimated)
    assert model[1].elements_seen == (0 if "1" in estimated else count)
    assert [layer.training for layer in model] == [False, True]
    if "0" in estimated:
        # Sums of 16 numbers of order one in float64.
        torch.testing.assert_close(model[0].running_mean, x.mean(0), rtol=1e-14, atol=0)
