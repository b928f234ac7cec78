# SPDX-License-Identifier: Apache-2.0
"""Running statistics over all ranks, for scopes narrower than the world."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from normscope._binding import groups, ops
from normscope._binding.ops import ForwardArguments
from normscope._binding.torch_private import TorchBatchNorm
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.count import Counter
from normscope.layers.ending import Ending
from normscope.layers.forward import routed, train
from normscope.layers.masks import unmasked_rows
from normscope.models.selection import Patterns, layers_in_training, named_layers
from normscope.training.measuring import Watch, call_model, measuring

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NamedLayers = list[tuple[str, TorchBatchNorm]]

_UNKNOWN = -1


def sync_running_stats(
    model: torch.nn.Module, process_group: ProcessGroup | DeviceMesh | None = None
) -> None:
    """Pool the running statistics over the ranks, by the law of total variance.

        mean = sum(w * running_mean) / sum(w)
        var = sum(w * (running_var + (running_mean - mean)^2)) / sum(w)

    If the scope is narrower than the world, each rank has its own statistics. After this call all
    ranks have the same bits. A model saved on any rank then evaluates the same way, in torch.nn
    too. All layers with running statistics take part, including those of torch.nn, with one
    exchange per layer, after a check that the ranks have the same layers.

    w is ``elements_seen`` of a layer of normscope: the number of elements that this rank has put
    into its statistics since anything else last set them, such as a pooling or ``load_state_dict``.
    All ranks have the same weight if the number is unknown on any of them (layers of torch.nn,
    layers that share statistics, compiled graphs) or zero on all.
    ``num_batches_tracked`` does not change. With one rank or no process group, nothing happens.

    By default, DistributedDataParallel overwrites the statistics of every rank with those of rank 0
    before each forward. Of the other ranks' statistics, only the share of the last step is then
    left to pool. Set ``parallel.broadcast_buffers = False`` if the scope is narrower than the
    world.

    Args:
        model: A model, the same on every rank.
        process_group: The ranks, or a mesh of one dimension; None for the default group.

    Raises:
        ValueError: If the ranks have different layers with running statistics, or one is lazy and
            has seen no input.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> sync_running_stats(model)  # at the end of an epoch, before it is evaluated or saved
    """
    group = groups.name_in_use(groups.name_of(process_group))
    if groups.size_of(process_group) == 1:
        return
    name = "sync_running_stats"
    with ops.notifying_peers("world", group, Exception):
        layers = _with_statistics(named_layers(model, TorchBatchNorm, None, None))
        messages = [moments.message() for moments in _running_moments(layers)]
    check_agreement(name, layers, group)
    rows = _gather(name, layers, messages, group)
    with ops.notifying_peers("world", group, Exception):
        pooled = [reduce(_Moments.merged, _weighted(ranks)) for ranks in _moments_in(rows)]
        values = [(moments.mean, moments.squares / moments.count) for moments in pooled]
        for (_, layer), (mean, var) in zip(layers, values, strict=True):
            _store(layer, mean, var)


def estimate_running_stats(
    model: torch.nn.Module,
    batches: Iterable[Any],
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
) -> None:
    """Recompute the running statistics from data, as if all of it were one batch.

    The model runs forward over the batches, without gradients. The layers with running statistics
    that are in training, of normscope or torch.nn, use batch statistics over their scope. Each then
    gets the mean and the unbiased variance of all its inputs, over all batches and all ranks, with
    the same bits on every rank. A layer without any input elements keeps its statistics.
    ``num_batches_tracked`` does not change. All other modules stay in their current mode, and keep
    their buffers. So do frozen layers, which are in evaluation, unless ``include`` names them.

    Layers whose scope is wider than a rank exchange once per batch: all ranks then need the same
    number of batches. This is checked if ``batches`` has a length on every rank. Otherwise, ranks
    that wait for one without further batches raise at the time limit of the process group. The
    forward of DistributedDataParallel exchanges once per batch too: pass ``model.module`` instead.

    Args:
        model: A model, the same on every rank.
        batches: Inputs of the model. A tuple holds the arguments of a forward, a mapping its
            keyword arguments.
        process_group: The ranks, or a mesh of one dimension; None for the default group, or for
            this process alone if there is none.
        include: Patterns of qualified names, as for :func:`convert`, also of layers in evaluation.
            None for all layers in training.
        exclude: As for :func:`convert`.

    Raises:
        ValueError: If the model has no layer to estimate, the ranks estimate different layers, one
            is lazy and has seen no input, a pattern matches none, the numbers of batches differ, or
            a DataParallel has several devices. Nothing has been changed then, nor if the model
            raises.

    Example:
        >>> layer = torch.nn.BatchNorm1d(1)
        >>> estimate_running_stats(layer, [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]] * 2)])
        >>> layer.running_mean, layer.running_var
        (tensor([3.7500]), tensor([6.9167]))
    """
    group = groups.name_in_use(groups.name_of(process_group))
    name = "estimate_running_stats"
    with ops.notifying_peers("world", group, Exception):
        layers = _with_statistics(layers_in_training(model, TorchBatchNorm, include, exclude))
        if not layers:
            raise ValueError(
                "model: expected layers with running statistics in training, got "
                f"{type(model).__qualname__} without; call model.train(), or pass include='*' for "
                "those in evaluation"
            )
    check_agreement(name, layers, group, batch_count=_batch_count(model, batches))
    with ops.notifying_peers("world", group, Exception):
        messages = [own.message() for own in _moments_of_inputs(model, layers, batches)]
    rows = _gather(name, layers, messages, group)
    with ops.notifying_peers("world", group, Exception):
        pooled = [reduce(_Moments.merged, ranks) for ranks in _moments_in(rows)]
        values = [(moments.mean, moments.squares / (moments.count - 1)) for moments in pooled]
        for (_, layer), moments, (mean, var) in zip(layers, pooled, values, strict=True):
            if moments.count > 0:
                _store(layer, mean, var)


@dataclass
class _Moments:
    """Count of elements per channel, mean [C] and sum of squares about the mean [C], in float64."""

    count: float
    mean: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> _Moments:
        """Compute the moments of x [N, C, *] in two passes."""
        channels = x.detach().double().transpose(0, 1).flatten(1)
        mean = channels.mean(1)
        return cls(channels.shape[1], mean, (channels - mean[:, None]).square().sum(1))

    @classmethod
    def of_message(cls, message: torch.Tensor) -> _Moments:
        """Return the moments in a message."""
        mean, squares = message[1:].chunk(2)
        return cls(message[0].item(), mean, squares)

    def message(self) -> torch.Tensor:
        """Return all numbers [1 + 2 C], on the host."""
        count = self.mean.new_tensor([self.count])
        return torch.cat([count, self.mean, self.squares]).cpu()

    def merged(self, other: _Moments) -> _Moments:
        """Return the moments of the elements of both (Chan et al. 1979); either may have none."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        return _Moments(
            count,
            self.mean + delta * (other.count / count),
            self.squares + other.squares + delta.square() * (self.count * other.count / count),
        )


def _with_statistics(layers: NamedLayers) -> NamedLayers:
    layers = [(name, layer) for name, layer in layers if layer.running_mean is not None]
    for name, layer in layers:
        if is_lazy(layer.running_mean):  # type: ignore[arg-type]
            raise ValueError(
                f"{name or 'model'}: expected a layer with running statistics, got a "
                f"{type(layer).__name__} without input; run the model once"
            )
    return layers


def check_agreement(
    name: str,
    layers: Sequence[tuple[str, TorchBatchNorm]],
    group: str,
    batch_count: int = _UNKNOWN,
) -> None:
    """Raise on all ranks if they have different layers or numbers of batches."""
    text = "".join(f"{layer_name} {layer.num_features}\n" for layer_name, layer in layers)
    # 48 bits, because a float64 represents them exactly.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    all_ranks = ops.gather_numbers([digest, batch_count], group, f"{name}, agreement")
    digests, counts = zip(*all_ranks, strict=True)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ValueError(
            "model: expected the same layers on every rank, got other names or channels on ranks "
            f"{others} than on rank 0"
        )
    if _UNKNOWN not in counts and len(set(counts)) > 1:
        raise ValueError(
            "batches: expected the same number on every rank, since layers synchronize, got "
            f"{[int(count) for count in counts]}"
        )


def _batch_count(model: torch.nn.Module, batches: Iterable[Any]) -> int:
    """Return the number of batches, if it is known and has to be the same on all ranks."""
    if not any(_spans_ranks(module) for module in model.modules()):
        return _UNKNOWN
    return length_of(batches)


def length_of(batches: Iterable[Any]) -> int:
    """Return the number of batches, as :func:`check_agreement` takes it."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return _UNKNOWN


def _spans_ranks(module: torch.nn.Module) -> bool:
    if isinstance(module, BatchNorm):
        return not module.scope.is_of_one_rank
    return isinstance(module, torch.nn.SyncBatchNorm)


def _gather(
    name: str, layers: NamedLayers, messages: list[torch.Tensor], group: str
) -> list[torch.Tensor]:
    """Return the messages of all ranks for each layer, in rank order."""
    return [
        ops.gather(message, group, f"{name}, {layer or 'model'}")
        for (layer, _), message in zip(layers, messages, strict=True)
    ]


def _moments_in(rows: list[torch.Tensor]) -> list[list[_Moments]]:
    """Return the moments of the ranks for each layer."""
    return [[_Moments.of_message(row) for row in of_ranks] for of_ranks in rows]


def _running_moments(layers: NamedLayers) -> list[_Moments]:
    """Return running statistics, with the variances in place of the sums of squares."""
    users = collections.Counter(layer.running_mean for _, layer in layers)
    moments = []
    for _, layer in layers:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        seen = None
        # A layer does not know what others have put into statistics that they share.
        if isinstance(layer, BatchNorm) and users[layer.running_mean] == 1:
            seen = layer.elements_seen
        mean, var = layer.running_mean.detach().double(), layer.running_var.detach().double()
        moments.append(_Moments(_UNKNOWN if seen is None else seen, mean, var))
    return moments


def _weighted(ranks: list[_Moments]) -> list[_Moments]:
    """Turn running statistics of ranks into moments that are weighted by the elements seen."""
    weights = [moments.count for moments in ranks]
    if _UNKNOWN in weights or not any(weights):
        weights = [1.0] * len(ranks)
    return [_Moments(w, m.mean, m.squares * w) for w, m in zip(weights, ranks, strict=True)]


def _store(layer: TorchBatchNorm, mean: torch.Tensor, var: torch.Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    if isinstance(layer, BatchNorm):
        layer.elements_seen = 0


class _Inputs(Watch):
    """The moments of a layer's inputs, so far."""

    def __init__(self, layer: TorchBatchNorm) -> None:
        assert layer.running_mean is not None
        zeros = torch.zeros_like(layer.running_mean.detach().double())
        self.moments = _Moments(0, zeros, zeros)
        self.is_given = False  # to a function of torch, in the current call of the layer

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize ``x``, and take its unmasked elements if the layer tracks statistics."""
        y = train(None, x, mask, arguments.without_running(), ending)
        if arguments.running_mean is not None:
            self.take(x if mask is None else unmasked_rows(x, mask))
        return y

    def take(self, x: torch.Tensor) -> None:
        """Add the moments of an input."""
        self.moments = self.moments.merged(_Moments.of(x))

    def take_argument(
        self, layer: TorchBatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], _y: object
    ) -> None:
        """Take the first argument of a call of torch's layer, unless a function was given x."""
        if layer.track_running_stats and not self.is_given:
            self.take(next(iter((*args, *kwargs.values()))))
        self.is_given = False


class _InputsOfTorch(TorchFunctionMode):
    """Sees what layers of torch give to torch.nn.functional.batch_norm, however they are called."""

    def __init__(self, inputs: dict[torch.Tensor, _Inputs]) -> None:
        super().__init__()
        self._inputs = inputs  # by running mean

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is torch.nn.functional.batch_norm and kwargs["training"] and args[1] is not None:
            inputs = self._inputs.get(args[1])
            if inputs is not None:
                inputs.take(args[0])
                inputs.is_given = True
        return func(*args, **kwargs)


def _moments_of_inputs(
    model: torch.nn.Module, layers: NamedLayers, batches: Iterable[Any]
) -> list[_Moments]:
    """Run the model over the batches, and return the moments of each layer's inputs."""
    # Layers with the same running statistics share them.
    of_mean: dict[torch.Tensor, _Inputs] = {}
    seen = {
        layer: of_mean.setdefault(layer.get_buffer("running_mean"), _Inputs(layer))
        for _, layer in layers
    }
    of_torch = {}
    with ExitStack() as stack:
        stack.enter_context(measuring(model, seen))
        stack.enter_context(torch.no_grad())
        for layer, inputs in seen.items():
            if isinstance(layer, BatchNorm):
                stack.enter_context(routed(layer, inputs))
            else:
                of_torch[layer.get_buffer("running_mean")] = inputs
                hook = layer.register_forward_hook(inputs.take_argument, with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(_InputsOfTorch(of_torch))
        for batch in batches:
            call_model(model, batch)
    return [inputs.moments for inputs in seen.values()]
