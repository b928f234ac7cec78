# SPDX-License-Identifier: Apache-2.0
"""register_conversion lets convert handle a user's own class, and revert restores the class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import nn

import normscope


class Scaled(nn.BatchNorm2d):
    """A class that calls the forward of its base class."""

    def __init__(self, num_features: int, gain: float) -> None:
        super().__init__(num_features, dtype=torch.float64)
        self.gain = nn.Parameter(torch.tensor(gain, dtype=torch.float64))
        self.note = "mine"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.gain * super().forward(input)


class ScopedScaled(Scaled, normscope.BatchNorm2d):  # type: ignore[misc] # no masks
    pass


class Activated(nn.BatchNorm2d):
    """A class for which normscope has a layer with other attributes."""

    slope = 0.2

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(super().forward(input), self.slope)


def attributes_of(layer: Activated) -> dict[str, Any]:
    return {"activation": "leaky_relu", "negative_slope": layer.slope}


class Synced(nn.SyncBatchNorm):
    pass


class ScopedSynced(normscope.BatchNorm):
    pass


class Labelled(nn.BatchNorm2d):
    label = "plain"


class ScopedLabelled(normscope.BatchNorm2d):
    label: str


normscope.register_conversion(Scaled, ScopedScaled)
normscope.register_conversion(Activated, normscope.BatchNormAct2d, attributes=attributes_of)
normscope.register_conversion(Synced, ScopedSynced)
normscope.register_conversion(Labelled, ScopedLabelled, attributes=lambda _: {"label": "scoped"})


def batch() -> torch.Tensor:
    return torch.randn(6, 3, 4, 4, dtype=torch.float64)


def test_a_registered_class_trains_with_a_scope() -> None:
    model: Any = nn.Sequential(Scaled(3, 1.5))
    plain, x = copy.deepcopy(model), batch()

    normscope.convert(model, "slices:2")
    y = model(x)
    y.square().sum().backward()

    parts = [plain(part) for part in x.chunk(2)]
    torch.cat(parts).square().sum().backward()
    # Numbers of order one, each off by a few dozen roundings of 1e-16.
    torch.testing.assert_close(y, torch.cat(parts), rtol=0, atol=1e-13)
    torch.testing.assert_close(model[0].gain.grad, plain[0].gain.grad, rtol=1e-13, atol=0)
    assert type(model[0]) is ScopedScaled
    assert isinstance(model[0], Scaled)
    assert (str(model[0].scope), model[0].layer_name, model[0].note) == ("slices:2", "0", "mine")
    model.eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain.eval()(x))


def test_revert_restores_the_class_and_removes_the_attributes() -> None:
    model: Any = nn.Sequential(Scaled(3, 2.0), Activated(3), Synced(3))
    before = [dict(layer.__dict__) for layer in model]
    ids = [id(tensor) for tensor in model.parameters()]

    normscope.convert(model, "local")
    normscope.convert(model, "slices:3")
    model[:2](batch())
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(layer) for layer in other] == [
            ScopedScaled,
            normscope.BatchNormAct2d,
            ScopedSynced,
        ]
        normscope.revert(other)
        assert [type(layer) for layer in other] == [Scaled, Activated, Synced]
        assert [layer.__dict__.keys() for layer in other] == [b.keys() for b in before]

    assert [id(tensor) for tensor in model.parameters()] == ids


def test_the_scoped_class_uses_the_attributes() -> None:
    model: Any = nn.Sequential(Activated(3, dtype=torch.float64))
    model[0].negative_slope = "of the layer"
    plain, x = copy.deepcopy(model), batch()

    normscope.convert(model, "local")

    assert (model[0].activation, model[0].negative_slope) == ("leaky_relu", 0.2)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-13)
    normscope.revert(model)
    assert model[0].negative_slope == "of the layer"


def test_to_torch_restores_the_class_and_removes_the_attributes() -> None:
    layer: Any = normscope.convert(Labelled(3), "local")
    assert layer.label == "scoped"

    normscope.to_torch(layer)

    assert type(layer) is Labelled
    assert layer.label == "plain"
