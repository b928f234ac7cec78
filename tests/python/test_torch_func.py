# SPDX-License-Identifier: Apache-2.0
"""torch.func and forward mode: torch's results in evaluation, errors with advice in training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from refusals import unchanged
from torch import func, nn
from torch.autograd import forward_ad

import normscope

# A warning of torch, caused by its imports for transforms.
pytestmark = [
    pytest.mark.portable,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

# For a few dozen entries of order one in float64: eps 2e-16 times some hundred roundings.
ROUNDING = 1e-12


def batch(*more: int) -> torch.Tensor:
    return torch.randn(*more, 4, 3, 2, 2, dtype=torch.float64)


def pair(**keywords: Any) -> tuple[nn.Module, normscope.BatchNorm2d]:
    """Return torch's layer and normscope's with the same, non-initial state."""
    theirs = nn.BatchNorm2d(3, dtype=torch.float64, **keywords)
    theirs(batch() * 2 + 1)
    nn.init.normal_(theirs.weight)
    ours = normscope.convert(copy.deepcopy(theirs), "local")
    assert isinstance(ours, normscope.BatchNorm2d)
    return theirs, ours


def loss_of(layer: nn.Module) -> Callable[..., torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = func.functional_call(layer, parameters, (x,))
        return y.square().sum()

    return loss


def per_sample(layer: nn.Module, x: torch.Tensor) -> Any:
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    of_one = func.vmap(func.grad(loss_of(layer)), in_dims=(None, 0))
    return of_one(parameters, x[:, None])["weight"]


def ensemble(layer: nn.Module, x: torch.Tensor) -> Any:
    """Map over stacked parameters and buffers, as torch's recipe for ensembles does."""
    other = copy.deepcopy(layer)
    for tensor in other.state_dict().values():
        tensor += 1
    state = func.stack_module_state([layer, other])

    def call(state: Any, x: torch.Tensor) -> Any:
        return func.functional_call(layer, state, (x,))

    of_each, of_all = (func.vmap(call, in_dims=(0, dim)) for dim in (0, None))
    return torch.cat([of_each(state, torch.stack([x, x + 1])), of_all(state, x)])


def tracing(layer: nn.Module, x: torch.Tensor) -> Any:
    return func.functionalize(layer)(x)


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda layer, x: func.grad(lambda t: layer(t).sin().sum())(x),
    "vjp": lambda layer, x: func.vjp(layer, x)[1](x)[0],
    "jacrev": lambda layer, x: func.jacrev(layer)(x),
    "vmap": lambda layer, x: func.vmap(layer)(torch.stack([x, x + 1])),
    "vmap, grad": per_sample,
    "ensemble": ensemble,
    "functionalize": tracing,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("tracked", [True, False])
def test_in_evaluation_transforms_give_torch_s_results(name: str, *, tracked: bool) -> None:
    theirs, ours = pair(track_running_stats=tracked)
    x = batch()

    got, expected = (TRANSFORMS[name](layer.eval(), x) for layer in (ours, theirs))

    assert torch.equal(got, expected)


@pytest.mark.own_kernels
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("activated", [True, False])
def test_in_training_the_error_names_the_transform_and_the_remedy(
    name: str, *, tracked: bool, activated: bool
) -> None:
    layer_class = normscope.BatchNormAct2d if activated else normscope.BatchNorm2d
    layer = layer_class(3, dtype=torch.float64, track_running_stats=tracked, scope="local")
    words = "expected no transform of torch.func around a layer in training, got"
    # torch uses the name grad for three of them.
    given = {"vjp": "grad", "jacrev": "grad", "ensemble": "vmap"}.get(name, name)

    message = rf"{words} {given}; use .*, or eval\(\)$"
    with unchanged(layer), pytest.raises(RuntimeError, match=message):
        TRANSFORMS[name](layer, batch())


def test_layers_that_a_transform_does_not_reach_run_in_training() -> None:
    layer = normscope.BatchNorm2d(3, dtype=torch.float64, scope="local")
    x, ones = batch(), torch.ones(2, dtype=torch.float64)
    y = copy.deepcopy(layer)(x).square().sum()

    scaled = func.vmap(lambda t: t * layer(x).square().sum())(ones)

    assert torch.equal(scaled, torch.stack([y, y]))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("momentum", [0.3, None])
def test_functional_call_trains_with_the_given_state(momentum: float | None) -> None:
    theirs, ours = pair(momentum=momentum)
    x, state = batch(), {name: value + 1 for name, value in theirs.state_dict().items()}
    own = copy.deepcopy(ours.state_dict())
    answers = []
    for layer in (theirs, ours):
        given = {name: value.clone() for name, value in state.items()}
        weight = given["weight"].requires_grad_()
        y = func.functional_call(layer, given, (x,))
        [dweight] = torch.autograd.grad(y.sin().sum(), weight)
        answers.append([y, dweight, *given.values()])

    for expected, got in zip(*answers, strict=True):
        torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=ROUNDING)
    assert all(map(torch.equal, ours.state_dict().values(), own.values()))


def test_derivatives_of_torch_autograd_work_in_training() -> None:
    theirs, ours = pair()
    x = batch()
    jacobian: Any = torch.autograd.functional.jacobian
    hessian: Any = torch.autograd.functional.hessian

    for vectorize in (False, True):
        got, expected = (jacobian(layer, x, vectorize=vectorize) for layer in (ours, theirs))
        torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=ROUNDING)
        got, expected = (
            hessian(lambda t, f=layer: f(t).sin().sum(), x, vectorize=vectorize)
            for layer in (ours, theirs)
        )
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)  # second sums of sums


def masks(x: torch.Tensor) -> torch.Tensor:
    return x[..., :1, :, :] > 0


@pytest.mark.parametrize("training", [True, False])
def test_a_mask_under_a_transform(*, training: bool) -> None:
    _, layer = pair()
    _, alone = pair(track_running_stats=False)
    layer.train(training)
    alone.train(training)
    xs, mask = batch(2), masks(batch())

    def call(f: nn.Module = layer) -> Any:
        return func.vmap(lambda x: f(x, mask=mask))(xs)

    if training:
        with pytest.raises(RuntimeError, match=r"expected no transform of torch.func .* got vmap;"):
            call()
    else:
        for f in (layer, alone):
            expected = torch.stack([f(x, mask=mask) for x in xs])
            torch.testing.assert_close(call(f), expected, rtol=ROUNDING, atol=ROUNDING)
    with pytest.raises(ValueError, match=r"mask: expected one that torch.func.vmap does not map"):
        func.vmap(lambda x, m: alone(x, mask=m))(xs, masks(xs))


def by_dual_numbers(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent: torch.Tensor = forward_ad.unpack_dual(y).tangent.clone()
        return tangent


def of_the_weight(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def call(weight: torch.Tensor) -> Any:
        return func.functional_call(layer, {"weight": weight}, (x,))

    weight = torch.ones(3, dtype=x.dtype)
    tangent: torch.Tensor = func.jvp(call, (weight,), (weight,))[1]
    return tangent


def of_the_residual(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor = func.jvp(lambda r: layer(x, r), (x,), (x,))[1]
    return tangent


Derivative = Callable[[Any, torch.Tensor], torch.Tensor]
FORWARD_MODE: list[Derivative] = [
    lambda layer, x: func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    lambda layer, x: func.jacfwd(layer)(x),
    by_dual_numbers,
    of_the_weight,
]


LAYERS: list[Callable[[], normscope.BatchNorm2d]] = [
    lambda: normscope.BatchNorm2d(3, scope="local", dtype=torch.float64),
    lambda: normscope.BatchNormAct2d(3, scope="slices:2", dtype=torch.float64),
]


@pytest.mark.parametrize(
    ("make", "derivative"),
    [*product(LAYERS, FORWARD_MODE), (LAYERS[1], of_the_residual)],
)
def test_forward_mode_in_training_raises_and_updates_nothing(
    make: Callable[[], normscope.BatchNorm2d], derivative: Derivative
) -> None:
    layer, message = make(), r"forward-mode .* use reverse mode"

    with unchanged(layer), pytest.raises(NotImplementedError, match=message):
        derivative(layer, batch())


@pytest.mark.parametrize("derivative", FORWARD_MODE)
def test_forward_mode_in_evaluation_is_that_of_torch(derivative: Derivative) -> None:
    theirs = nn.BatchNorm2d(3, dtype=torch.float64).eval()
    ours = LAYERS[0]().eval()
    x = batch()

    assert torch.equal(derivative(ours, x), derivative(theirs, x))


def test_forward_mode_in_evaluation_has_masks() -> None:
    theirs, ours = (
        layer(3, track_running_stats=False, dtype=torch.float64).eval()
        for layer in (nn.BatchNorm1d, normscope.BatchNorm2d)
    )
    x = batch()
    mask = x[:, :1] > 0
    rows = x.movedim(1, -1)[mask.squeeze(1)]

    tangent = func.jvp(lambda x: ours(x, mask), (x,), (x,))[1]

    assert torch.equal(
        tangent.movedim(1, -1)[mask.squeeze(1)], func.jvp(theirs, (rows,), (rows,))[1]
    )
    assert not tangent[~mask.expand_as(x)].any()
