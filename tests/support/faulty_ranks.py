# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the faults of tests/python/test_faults.py.

A function that takes a rank, as its last argument, lets one of them differ from the others.
"""

from __future__ import annotations

import copy
import io
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch_device
from faults import Part
from noisy_network import noise_batches, small_network
from torch import distributed, nn

import normscope

X = torch.randn(6, 3, 5)


def named(name: str = "stem", channels: int = 3, **settings: Any) -> normscope.BatchNorm1d:
    layer = normscope.BatchNorm1d(channels, **settings)
    layer.layer_name = name
    return layer


def converted() -> nn.Module:
    return normscope.convert(nn.Sequential(nn.BatchNorm1d(3)))


def run(layer: nn.Module) -> Any:
    """Return the layer after a step that all ranks make."""
    layer(X).sum().backward()
    return layer


def forward(layer: nn.Module, x: Any = X, block: Any = None) -> Part:
    def call() -> None:
        with block or nullcontext():
            layer(x)

    return layer, call


def backward(layer: nn.Module, dy: torch.Tensor = X) -> Part:
    y = layer(X.clone().requires_grad_())
    return layer, lambda: y.backward(dy)


def double_backward(layer: nn.Module, dy: torch.Tensor) -> Part:
    x = nn.Parameter(X.clone())
    [dx] = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    return nn.ModuleList([layer, nn.ParameterList([x])]), lambda: dx.backward(dy)


def nothing(layer: nn.Module) -> Part:
    return layer, lambda: None


# ---- Other calls than those of the peers ---------------------------------------------------------


def another_number_of_channels(name: str, rank: int) -> Part:
    return forward(named(name, 3 + rank), torch.randn(6, 3 + rank))


def another_layer_of_two(rank: int) -> Part:
    for _ in range(rank):
        normscope.BatchNorm1d(3)  # construction alone does not number layers
    layers = [run(layer) for layer in (normscope.BatchNorm1d(3), normscope.BatchNorm1d(3))]
    return forward(layers[rank])


def another_direction(rank: int) -> Part:
    layer = named()
    y = layer(X).sum()
    return layer, (lambda: layer(X)) if rank == 1 else y.backward


def another_scope(scopes: list[str], rank: int) -> Part:
    return forward(named(scope=scopes[rank]))


def another_degree(rank: int) -> Part:
    """Differentiate the gradients on rank 0 only."""
    layer = named()
    part = double_backward(layer, X)
    return part if rank == 0 else forward(layer)


def another_setting(settings: Any, compiled: str, rank: int) -> Part:
    return step(named(**settings[rank]), compiled)


def another_dtype(dtypes: list[torch.dtype], compiled: str, rank: int) -> Part:
    return step(named(), compiled, dtypes[rank])


def another_dtype_on_a_device(
    dtypes: list[torch.dtype], earlier: list[torch.dtype], compiled: str, rank: int
) -> Part:
    torch_device.load()
    layer = named(process_group=distributed.new_group(backend=torch_device.BACKENDS))
    layer.to(torch_device.NAME)
    for dtype in earlier:
        layer(X.to(torch_device.NAME, dtype))
    return step(layer, compiled, dtypes[rank])


def step(layer: nn.Module, compiled: str, dtype: torch.dtype = X.dtype) -> Part:
    call: Any = torch.compile(layer, backend="aot_eager") if compiled else layer
    x = X.to(next(layer.parameters()).device, dtype).requires_grad_()
    return layer, lambda: call(x).sum().backward()


# ---- Models with equal names ---------------------------------------------------------------------

Pair = tuple[nn.Module, nn.Module]


def conversions() -> Pair:
    return converted(), converted()


def a_deepcopy() -> Pair:
    student = converted()
    return student, copy.deepcopy(student)


def unpickled() -> Pair:
    file = io.BytesIO()
    torch.save(conversions(), file)
    file.seek(0)
    pair: Pair = torch.load(file, weights_only=False)
    return pair


def layers_by_hand() -> Pair:
    return named("0"), named("0")


def in_order(make: Callable[[], Pair], orders: tuple[tuple[int, ...], ...], rank: int) -> Part:
    """Run models of a pair in the order of the rank; the call runs the last one."""
    pair = make()
    *before, last = orders[rank]
    for index in before:
        run(pair[index])
    return forward(pair[last])


# ---- Errors --------------------------------------------------------------------------------------


def with_momentum(layer: nn.Module) -> None:
    layer.momentum = "much"  # type: ignore[assignment]
    layer(X)


def with_damaged_scope(layer: nn.Module) -> None:
    object.__setattr__(layer.scope, "text", "wrld")
    layer(X)


def without_weight(layer: nn.Module) -> None:
    del layer.weight
    layer(X)


def mapped(layer: nn.Module, *, buffers: bool) -> None:
    """Call an ensemble, as torch's recipe does."""
    parameters, stacked = torch.func.stack_module_state([layer, copy.deepcopy(layer)])
    state = (parameters, stacked) if buffers else (parameters,)

    def call(state: Any, x: torch.Tensor) -> Any:
        return torch.func.functional_call(layer, state, (x,))

    torch.func.vmap(call, in_dims=(0, None))(state, X)


def nested(layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.nested_tensor([X[0], X[0]], layout=layout)


BAD_CALLS: dict[str, Callable[[nn.Module], object]] = {
    "sparse input": lambda layer: layer(X.to_sparse()),
    "no input": lambda layer: layer(None),
    "a list": lambda layer: layer([1.0]),
    "a damaged scope": with_damaged_scope,
    "a bad momentum": with_momentum,
    "no weight": without_weight,
    "nested input": lambda layer: layer(nested()),
    "mapped input": lambda layer: torch.func.vmap(layer)(torch.stack([X, X])),
    "mapped parameters": lambda layer: mapped(layer, buffers=False),
    "mapped parameters and buffers": lambda layer: mapped(layer, buffers=True),
    "a wrong mask": lambda layer: layer(X, mask=torch.ones(6, 3, 5, dtype=torch.bool)),
    "a residual that is a list": lambda layer: layer(X, [1.0]),
    "a residual of another shape": lambda layer: layer(X, torch.ones(7)),
    "a nested residual": lambda layer: layer(X, nested(torch.strided)),
    "nested input with a residual": lambda layer: layer(nested(torch.strided), X),
}


def bad_call(what: str, met: str, scope: str, rank: int) -> Part:
    layer = normscope.BatchNormAct1d(3, scope=scope)
    if met:
        run(layer)
    if what == "sparse gradient":
        return backward(layer, X if rank else X.to_sparse())
    if rank == 0:
        return layer, lambda: BAD_CALLS[what](layer)
    # A residual is added after the exchange: peers find out in the next one.
    return (nn.Identity(), lambda: run(layer)) if "residual" in what else forward(layer)


# The text of the error, for calls that could also fail with another one.
TEXTS = {
    "a wrong mask": "ValueError: mask: expected shape [6, 1, 5], as x [N, 1, *], got [6, 3, 5]"
}


def bad_call_of_a_local_layer(rank: int) -> Part:
    layer = run(named())
    return layer, lambda: named(scope="local")(X if rank else None)


def another_momentum_in_a_block(rank: int) -> Part:
    layer = named()

    def call() -> None:
        with normscope.accumulate(layer):
            layer(X)
            layer.momentum = 0.1 + 0.1 * rank
            layer(X)

    return layer, call


def pooled_lazy_layer(pool: Any, *batches_and_rank: Any) -> Part:
    *batches, rank = batches_and_rank
    model = converted() if rank else nn.Sequential(nn.LazyBatchNorm2d())
    return model if rank else nn.Identity(), lambda: pool(model, *batches)


def error_in_own_code(
    block: Callable[[], AbstractContextManager[None]], met: str, scope: str, rank: int
) -> Part:
    """Raise an error on rank 0 while its peers run a layer."""
    layer = named(scope=scope)
    if met == "first exchange of a group":
        layer.process_group = distributed.new_group()
    elif met:
        run(layer)

    def call() -> None:
        with block():
            if rank == 0:
                raise LookupError("no such file")
            layer(X)

    return layer, call


def interrupted(where: str, rank: int) -> Part:
    """Send rank 0 a Ctrl-C half a second after it starts to wait."""
    net = nn.Sequential(named("stem"), named("head"))
    y = X if where == "the first exchange" else net(X)
    wait: Callable[[], object] = y.sum().backward if where == "backward" else lambda: net(X)
    main = threading.main_thread().ident
    assert main is not None

    def call() -> None:
        # Jobs that a shell starts in the background ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        try:
            wait()
        finally:
            signal.signal(signal.SIGINT, before)

    # Over Gloo, the exchange in which rank 0 waited ends: its peer finds out in the next one.
    return (net, call) if rank == 0 else (net[0 if where == "backward" else 1], wait)


# ---- Loops of joined batches ---------------------------------------------------------------------


def loop(batches: Iterable[torch.Tensor], steps: int = 0) -> Part:
    """Take steps of joined batches; the call takes the next one."""
    layer, joined = named(), normscope.joined(batches)
    for _ in range(steps):
        layer(next(joined)[0]).sum().backward()
    return layer, lambda: next(joined)


def broken_batches(before: int, rank: int) -> Part:
    def batches() -> Iterator[torch.Tensor]:
        yield from [X] * before
        raise OSError("the disk is full of holes")

    return loop(batches() if rank == 1 else [X] * 3, before)


def left_loop(instead: Callable[[nn.Module], Part], rank: int) -> Part:
    part = loop([X] * 3, steps=2)
    return instead(named("head")) if rank == 1 else part


# ---- Ranks that do not arrive --------------------------------------------------------------------


def after_a_step(scope: str, _rank: int) -> Part:
    return forward(run(named(scope=scope)))


def between_layers(_rank: int) -> Part:
    named()(X)
    return forward(named("head"))


def one_step_more(rank: int) -> Part:
    layer = run(named())
    return forward(layer) if rank == 2 else nothing(layer)


def no_need_of_peers(rank: int) -> Part:
    layer = run(named())
    if rank == 1:
        layer.scope = normscope.Scope("local")
    return forward(layer)


def changed_scope(rank: int) -> Part:
    stem, head = named(scope="group:2"), named("head")
    head(stem(X))
    if rank == 0:
        stem.scope = normscope.Scope("world")
    # The last two ranks pass the stem.
    return stem if rank < 2 else head, lambda: head(stem(X))


# ---- Functions of whole models -------------------------------------------------------------------


def pooled_other_layers(rank: int) -> Part:
    model = normscope.convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3 + rank // 2)))
    return model, lambda: normscope.sync_running_stats(model)


def estimated(rank: int) -> Part:
    """Estimate from one batch more on each rank."""
    model = converted()
    return model, lambda: normscope.estimate_running_stats(model, [X] * (1 + rank))


class WrongLength(list[torch.Tensor]):
    def __len__(self) -> int:
        return 2


LENGTHS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "known": list,
    "unknown": iter,
    "wrong": WrongLength,
}


def recommended(what: str, rank: int) -> Part:
    model, batches, noise = small_network(), noise_batches(4), 0.5
    if what == "failing batches" and rank == 0:
        batches = failing(batches)
    elif what == "no number" and rank == 0:
        noise = math.nan
    elif what == "other numbers":
        noise += rank
    elif what == "replicas" and rank == 0:
        parallel = nn.DataParallel(nn.Identity())
        parallel.device_ids = [0, 1]
        model = nn.Sequential(*model, parallel)
    elif what == "a NaN in a batch" and rank == 1:
        batches[0][0, 0, 0, 0] = math.nan
    elif what == "a sparse output" and rank == 1:
        model.register_forward_hook(lambda *call: call[-1].to_sparse())
    elif what == "other layers":  # which have no names yet
        model = nn.Sequential(normscope.BatchNorm2d(3), normscope.BatchNorm2d(3))
        vars(model)["forward"] = model[rank]
    elif what == "too few samples":
        model = normscope.convert(nn.Sequential(nn.BatchNorm1d(3)))
        batches = [X[:, :, 0]] * 3
    elif what in LENGTHS:
        batches = LENGTHS[what](batches[: 1 + rank])
    return model, lambda: normscope.recommend_scopes(model, batches, noise)


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def failing(batches: list[torch.Tensor]) -> Any:
    yield from batches
    raise OSError("no such image")


# ---- Values --------------------------------------------------------------------------------------


def few_samples(sizes: tuple[int, ...], compiled: str, rank: int) -> Part:
    layer: Any = named(scope="group:2")
    call = torch.compile(layer, backend="aot_eager", dynamic=True) if compiled else layer
    x = torch.randn(sizes[rank], 3)
    return layer, lambda: call(x)


def bad_values(part: Any, value: float, scope: str, rank: int) -> Part:
    """Give a part x or the gradient of y, in which rank 1 has two bad values of one channel."""
    x = X.clone()
    if rank == 1:
        x[1:3, 0, 0] = value
    made: Part = part(named(scope=scope), x)
    return made
