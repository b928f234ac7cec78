# SPDX-License-Identifier: Apache-2.0
"""recommend_scopes: the noise that it measures in the outputs of a model."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from masked_network import Masked
from noisy_network import noise_batches, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import normscope

RANKS = 4


def noise_of(
    model: nn.Module, batches: list[Any] | Iterator[Any], ranks: int = RANKS
) -> dict[str, float]:
    """Return the noise of local statistics, by layer."""
    plan = normscope.recommend_scopes(trained(model), batches, ranks=ranks)
    return {layer.layer: layer.candidates[0].noise for layer in plan.layers}


class _Linear(nn.Module):
    """Outputs that are linear in those of a normalization, so that their noise is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNorm2d(6)
        nn.init.uniform_(self.norm.weight, -2, 2)
        self.head = nn.Conv2d(6, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(x))
        return y


def test_noise_is_the_mean_square_of_the_change_of_the_outputs() -> None:
    torch.manual_seed(0)
    model = _Linear()
    # Off-centre channels, and images that differ.
    batches = [5 + torch.randn(8, 6, 5, 5) + torch.randn(8, 6, 1, 1) for _ in range(200)]

    noise = noise_of(model, batches)["norm"]

    exact = []
    for batch in batches:
        outputs = []
        for scope in ("local", f"slices:{RANKS}"):
            model.norm.scope = normscope.Scope(scope)
            outputs.append(model(batch).detach().double())
        wide, narrow = outputs
        variance = wide.var((0, 2, 3), correction=0).mean()
        exact.append(float((narrow - wide).square().mean() / variance))
    # 800 squares of sums of random signs, each with a relative variance of about 2.
    assert noise == pytest.approx(sum(exact) / len(exact), rel=4 * math.sqrt(2 / 800))


class _Scattered(nn.Module):
    """Returns each number of a sample as an output of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y: tuple[torch.Tensor, ...] = self.model(x).flatten(1).split(1, dim=1)
        return y


def test_batches_have_different_signs_however_many_outputs_there_are() -> None:
    torch.manual_seed(0)
    [batch] = noise_batches(64, count=1)
    model = _Scattered(nn.Sequential(normscope.BatchNorm2d(3), nn.Conv2d(3, 4, 1)))
    assert len(model(batch)) == 256  # whose product with 2^24, the most ranks, is 2^32

    plan = normscope.recommend_scopes(trained(model), [batch, batch], noise=math.inf, ranks=2)

    assert plan.noise > 0
    assert plan.standard_error > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_measures_about_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), normscope.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)
    )
    expected = noise_of(model, noise_batches(8))

    with torch.autocast("cpu", dtype):
        measured = noise_of(model, noise_batches(8))

    # Differences of 2^-8 in each factor, and of a hundred signs in the projections.
    assert measured["1"] == pytest.approx(expected["1"], rel=0.05)


class _Scaled(nn.Module):
    """Multiplies the outputs of a model by a number."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.scale * self.model(x)
        return y


@pytest.mark.parametrize("scale", [2.0**-200, 2.0**200])
def test_the_scale_of_the_outputs_does_not_matter(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(normscope.BatchNorm2d(3), nn.Conv2d(3, 2, 3)).double()
    batches = [x.double() for x in noise_batches(4)]

    noise = noise_of(_Scaled(model, scale), batches)

    assert list(noise.values()) == list(noise_of(model, batches).values())


class _Twice(nn.Module):
    """Normalizes two inputs, with one layer or two."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x) + self.layers[-1](10 + x[:, :, ::2, ::2]).mean((2, 3), keepdim=True)
        result: torch.Tensor = y.square()
        return result


def test_the_noise_of_all_calls_of_a_layer_adds_up() -> None:
    one, two = (_Twice(*(normscope.BatchNorm2d(3) for _ in range(n))) for n in (1, 2))

    of_one, of_two = (noise_of(model, noise_batches(8)) for model in (one, two))

    assert of_one["layers.0"] == pytest.approx(of_two["layers.0"] + of_two["layers.1"])
    # The smaller of the two norm batches: two images of 4 x 4 positions.
    plan = normscope.recommend_scopes(one, noise_batches(8), ranks=4)
    assert plan.layers[0].candidates[0].elements == 32


class _Routed(nn.Module):
    """Uses two layers in turn, and none for batches after the sixth; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.never = (normscope.BatchNorm1d(4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= 6:
            x = (self.odd if self.calls % 2 else self.even)(x)
        return x * self.scale


def test_a_layer_adds_no_noise_to_batches_that_do_not_reach_it() -> None:
    batches = [torch.randn(32, 4) for _ in range(6)]
    alone = noise_of(normscope.BatchNorm1d(4), batches)[""]

    noise = noise_of(_Routed(), [*batches, *batches[:3]])

    assert set(noise) == {"even", "odd"}
    assert noise["even"] + noise["odd"] == pytest.approx(alone * 6 / 9)


@dataclass
class _Output:
    logits: torch.Tensor
    name: str = "output"


class _Returns(nn.Module):
    """Returns its output in something."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.make = normscope.BatchNorm2d(3), make

    def forward(self, x: torch.Tensor) -> object:
        return self.make(self.norm(x).square())


def test_outputs_weigh_the_same_whatever_their_scale() -> None:
    batches = noise_batches(8, count=50)
    one = noise_of(_Returns(lambda y: y), batches)["norm"]

    of_two = noise_of(_Returns(lambda y: (y, 1e4 * y)), batches)["norm"]

    assert of_two == pytest.approx(one, rel=0.3)  # other signs; 200 squares


def test_outputs_without_elements_count_nothing() -> None:
    expected = noise_of(_Returns(lambda y: y), noise_batches(8))["norm"]

    of_two = noise_of(_Returns(lambda y: (y, y[:0])), noise_batches(8))["norm"]
    of_none = noise_of(_Returns(lambda y: y[:0]), noise_batches(8))["norm"]

    assert of_two == pytest.approx(expected, rel=0.3)  # other signs
    assert of_none == math.inf  # unknown


def test_a_scalar_counts_relative_to_its_value() -> None:
    batches = noise_batches(8, count=50)

    small = noise_of(_Returns(lambda y: y.square().mean()), batches)["norm"]
    large = noise_of(_Returns(lambda y: (64 * y.square()).mean()), batches)["norm"]

    assert small == pytest.approx(large)
    assert small > 0


class _WithoutGradients(nn.Module):
    """A part whose noise reaches the outputs, but not by gradients, as in a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.online = normscope.BatchNorm2d(3), normscope.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.target(x)
        y: torch.Tensor = self.online(x).square() - target
        return y


def test_noise_that_cannot_be_measured_is_too_much() -> None:
    plan = normscope.recommend_scopes(trained(_WithoutGradients()), noise_batches(8), 1e9, ranks=4)
    constant = noise_of(_Returns(lambda y: 0 * y), noise_batches(8))

    assert {name: str(scope) for name, scope in plan.scopes.items()} == {
        "target": "world",
        "online": "local",
    }
    assert "?" in str(plan)
    assert constant == {"norm": math.inf}


def test_only_the_unmasked_values_of_a_layer_are_measured() -> None:
    clean = [(torch.randn(8, 3, 5, 4) + 2, torch.rand(8, 1, 5, 4) > 0.5) for _ in range(3)]
    batches = [(torch.where(mask, x, torch.tensor(math.nan)), mask) for x, mask in clean]
    model = trained(Masked(normscope.BatchNorm2d(3, scope="local")))

    by_name, on_clean, by_position = (
        normscope.recommend_scopes(net, given, ranks=2).layers[0].candidates
        for net, given in ((model, batches), (model, clean), (model.layer, batches))
    )

    assert by_name == on_clean
    assert [each.elements for each in by_name] == [each.elements for each in by_position]
    fewest = min(int(mask[part].sum()) for _, mask in clean for part in (slice(4), slice(4, 8)))
    assert by_name[0].elements == fewest
    assert by_name[0].noise > 0


class _Takes(nn.Module):
    """Normalizes what it takes from a batch, and from keywords."""

    def __init__(self, take: Callable[[Any], torch.Tensor] = lambda pixels: pixels) -> None:
        super().__init__()
        self.norm, self.take = normscope.BatchNorm2d(3), take

    def forward(self, pixels: Any, scale: float = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.norm(scale * self.take(pixels)).square()
        return y


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def network(
    norm: nn.Module, act: nn.Module, differentiated: Callable[[str], bool] = lambda _: True
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(norm, act, nn.Conv2d(3, 2, 3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(differentiated(name))
    return model


def plain(act: nn.Module) -> nn.Module:
    return network(normscope.BatchNorm2d(3), act)


IMAGES = noise_batches(8)

# Models of one layer, their batches, and a model of the images with the same noise.
EQUAL: dict[str, tuple[nn.Module, list[Any], nn.Module]] = {
    "an activation in the layer": (
        network(normscope.BatchNormAct2d(3, activation="silu"), nn.Identity()),
        IMAGES,
        plain(nn.SiLU()),
    ),
    "an operation in place": (plain(nn.ReLU(inplace=True)), IMAGES, plain(nn.ReLU())),
    "an operation in place after a frozen layer": (
        network(normscope.BatchNorm2d(3), nn.ReLU(inplace=True), lambda name: name == "2.weight"),
        IMAGES,
        plain(nn.ReLU()),
    ),
    "checkpoints": (_Checkpointed(plain(nn.ReLU())), IMAGES, plain(nn.ReLU())),
    **{
        f"outputs in a {type(make(IMAGES[0])).__name__}": (
            _Returns(make),
            IMAGES,
            _Returns(lambda y: y),
        )
        for make in (
            lambda y: {"logits": y, "classes": y.detach().argmax(1)},
            lambda y: UserDict(logits=y),
            lambda y: [None, (y,)],
            _Output,
        )
    },
    "complex outputs": (
        _Returns(lambda y: torch.complex(y, y.sin())),
        IMAGES,
        _Returns(lambda y: (y, y.sin())),
    ),
    "arguments": (_Takes(), [(x, 1.0) for x in IMAGES], _Takes()),
    "keywords": (_Takes(), [{"pixels": x, "scale": 1.0} for x in IMAGES], _Takes()),
    "keywords in a UserDict": (_Takes(), [UserDict(pixels=x) for x in IMAGES], _Takes()),
    "a list": (_Takes(lambda batch: batch[0]), [[x, 0] for x in IMAGES], _Takes()),
    "a dict": (_Takes(lambda batch: batch["x"]), [{"x": x, "y": 0} for x in IMAGES], _Takes()),
}


@pytest.mark.parametrize("what", EQUAL)
def test_the_noise_is_that_of_an_equal_model(what: str) -> None:
    model, batches, equal = EQUAL[what]

    [noise] = noise_of(model, batches).values()
    [expected] = noise_of(equal, IMAGES).values()

    is_near = what == "an activation in the layer"  # has other bits than torch's
    assert noise == (pytest.approx(expected) if is_near else expected)
    assert noise > 0
