# SPDX-License-Identifier: Apache-2.0
"""Which layers need which scope, measured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from normscope import _library, _process_group
from normscope._layers import Patterns, named_layers
from normscope.counters import communication_counters
from normscope.independent_values import IndependentValues, PartMoments, independent_values
from normscope.modules import BatchNorm
from normscope.running_stats import batch_statistics, check_agreement, peers_told
from normscope.scope import Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NamedLayers = list[tuple[str, BatchNorm]]

# Of independent values; docs/recommending.md says what it was chosen from.
DEFAULT_INDEPENDENT_VALUES = 4.0

# A wider interval than this share of the value is warned of.
_WIDE_INTERVAL = 0.25 * 1.645


@dataclass(frozen=True)
class Candidate:
    """A scope that a layer may get, and what its statistics would be worth.

    Args:
        scope: As :class:`~normscope.Scope` spells it.
        ranks: That share.
        values: Of a norm batch; None where it could not be measured.
        extrapolated: Whether it follows from that of a narrower scope.
    """

    scope: str
    ranks: int
    values: IndependentValues | None
    extrapolated: bool


@dataclass(frozen=True)
class LayerPlan:
    """What was measured in a layer, and the scope that it gets.

    Args:
        layer: Qualified name.
        channels: Of its input.
        scope: The narrowest that reaches the wanted number.
        candidates: From the narrowest to the widest.
        exchange_bytes: That a rank sends in an exchange, if the layer makes any.
        exchange_seconds: That an exchange of all ranks took, waiting included; None where there
            was none.
    """

    layer: str
    channels: int
    scope: str
    candidates: tuple[Candidate, ...]
    exchange_bytes: int
    exchange_seconds: float | None

    @property
    def chosen(self) -> Candidate:
        """The candidate whose scope it gets."""
        return next(each for each in self.candidates if each.scope == self.scope)

    @property
    def spans_ranks(self) -> bool:
        """Whether it then synchronizes, twice a step."""
        return self.chosen.ranks > 1


@dataclass(frozen=True)
class ScopePlan:
    """A scope for each layer, and what it was chosen from; :func:`recommend_scopes` makes it.

    ``print(plan)`` shows a table.

    Args:
        layers: In the model's order; those that had no input are not among them.
        independent_values: That were wanted.
        ranks: That were there, or stood for.
        batches: That were looked at.
    """

    layers: tuple[LayerPlan, ...]
    independent_values: float
    ranks: int
    batches: int

    @property
    def scopes(self) -> dict[str, Scope]:
        """The scope of each layer, by its qualified name."""
        return {plan.layer: Scope(plan.scope) for plan in self.layers}

    @property
    def exchanges_per_step(self) -> int:
        """Forward and backward."""
        return 2 * sum(plan.spans_ranks for plan in self.layers)

    @property
    def bytes_per_step(self) -> int:
        """That a rank sends, forward and backward."""
        return 2 * sum(plan.exchange_bytes for plan in self.layers if plan.spans_ranks)

    def apply(self, model: torch.nn.Module) -> None:
        """Give each layer its scope; others stay as they are.

        Raises:
            ValueError: If the model has no layer of normscope of a name of the plan. Nothing has
                changed then.
        """
        layers = dict(named_layers(model, BatchNorm, None, None))
        missing = [plan.layer for plan in self.layers if plan.layer not in layers]
        if missing:
            raise ValueError(
                f"model: expected layers of normscope called {', '.join(missing)}, got none"
            )
        for name, scope in self.scopes.items():
            layers[name].scope = scope

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ScopePlan:
        """Read what ``save`` wrote.

        Raises:
            ValueError: If the file holds no plan.
        """
        try:
            fields = json.loads(Path(path).read_text())
            return cls(**{**fields, "layers": tuple(map(_layer_of_json, fields["layers"]))})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: expected a plan of recommend_scopes, got {error}") from error

    def __str__(self) -> str:
        """A table of the layers, with totals beside those of scope ``world``."""
        headings = ("layer", "channels", "local", "scope", "worth", "90 % interval", "")
        rows = [headings, *(self._row(plan) for plan in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i in (0, 3) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        world_bytes = 2 * sum(plan.exchange_bytes for plan in self.layers)
        world_exchanges = 2 * len(self.layers)
        return "\n".join(
            [
                f"independent values of a norm batch; wanted {self.independent_values:g}, "
                f"{self.ranks} ranks, {self.batches} batches",
                *lines,
                f"per step {self.exchanges_per_step} exchanges and {self.bytes_per_step:,} bytes "
                f"of a rank; world in every layer: {world_exchanges} and {world_bytes:,}",
            ]
        )

    def _row(self, plan: LayerPlan) -> tuple[str, ...]:
        local, chosen = plan.candidates[0], plan.chosen
        values = chosen.values
        notes = [] if values is None else _notes(values, self.independent_values)
        return (
            plan.layer or "model",
            str(plan.channels),
            "?" if local.values is None else f"{local.values.value:.1f}",
            plan.scope,
            "?" if values is None else f"{values.value:.1f}",
            "" if values is None or math.isnan(values.lower) else
            f"{values.lower:.1f} to {values.upper:.1f}",
            ", ".join([*notes, *(["extrapolated"] if chosen.extrapolated else [])]),
        )  # fmt: skip


def _notes(values: IndependentValues, wanted: float) -> list[str]:
    if values.value < wanted:
        return ["not reached"]
    half = (values.upper - values.lower) / 2
    return ["uncertain"] if half > _WIDE_INTERVAL * values.value else []


def recommend_scopes(
    model: torch.nn.Module,
    batches: Iterable[Any],
    independent_values: float = DEFAULT_INDEPENDENT_VALUES,
    *,
    ranks: int | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    process_group: ProcessGroup | None = None,
) -> ScopePlan:
    """Measure which scope each layer needs, so that few layers have to synchronize.

    The model runs forward over a few batches on all ranks, every layer under scope ``world`` and
    without gradients. From the moments of the ranks it is estimated how many independent values a
    channel's statistics are worth under each scope; a layer gets the narrowest scope that reaches
    the wanted number: ``local``, ``group:K`` where K divides the ranks (``node`` where that is
    what each host holds), or ``world``. Where the 90 % interval of a scope reaches below the wanted
    number the next wider one is taken. All ranks get the same plan.

    Nothing of the model changes: parameters, buffers, modes, scopes, ``elements_seen`` and the
    state of random number generators stay as they are, also where it raises. Layers of normscope
    run with the statistics of the batch, everything else in the mode that it is in.

    Args:
        model: A model with layers of normscope (of DistributedDataParallel, its ``module``), as it
            is at the start of the training or later.
        batches: Inputs of the model, as many on every rank; four to sixteen, as the training has
            them. A tuple holds its arguments. For a progress bar, wrap them in tqdm.
        independent_values: That a norm batch should be worth, at least 2.
        ranks: Where there is one process, the number of ranks that parts of each batch stand for:
            what would they need?
        include: Patterns of qualified names, as for :func:`set_scope`.
        exclude: As for :func:`set_scope`.
        process_group: The ranks; None for the default group, or for this process alone where there
            is none.

    Raises:
        ValueError: If the wanted number is below 2 or NaN, there is no batch, the model has no
            layer of normscope, the ranks differ in layers or in the number of batches, or a batch
            has fewer samples than it is cut into parts. Nothing hangs then.

    Example:
        >>> from normscope import BatchNorm1d
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), BatchNorm1d(8))
        >>> batches = [torch.randn(64, 4) for _ in range(8)]
        >>> plan = recommend_scopes(model, batches, independent_values=8, ranks=2)
        >>> plan.apply(model)
        >>> str(model[1].scope)
        'local'
    """
    if not independent_values >= 2:
        raise ValueError(f"independent_values: expected at least 2, got {independent_values}")
    group = _process_group.in_use(process_group)
    parts = _parts(ranks, group)
    with peers_told(group):
        layers = named_layers(model, BatchNorm, include, exclude)
        if not layers:
            raise ValueError(
                "model: expected layers of normscope (normscope.convert makes them), got "
                f"{type(model).__qualname__}, which has none"
            )
        batches = list(batches)
    if group is not None:
        check_agreement("recommend_scopes", layers, group, len(batches))
    if not batches:
        raise ValueError("batches: expected at least one, got none")
    with peers_told(group):
        seen = _run(model, layers, batches, parts)
    if group is not None and group.size() > 1:
        seen = _gathered(seen, group)
    hosts = _ranks_of_a_host(group)
    plans = [_plan(watch, independent_values, hosts) for watch in seen if watch.moments is not None]
    count = parts if group is None or group.size() == 1 else group.size()
    return ScopePlan(tuple(plans), float(independent_values), count, len(batches))


@dataclass
class _Watch:
    """What was seen of a layer while the model ran."""

    name: str
    layer: BatchNorm
    moments: PartMoments | None = None
    seconds: float = 0.0
    exchanges: int = 0


def _parts(ranks: int | None, group: ProcessGroup | None) -> int:
    if ranks is None:
        return 1
    if group is not None and group.size() > 1:
        raise ValueError(
            f"ranks: expected None, since the process group has {group.size()}, got {ranks}"
        )
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    return ranks


def _run(
    model: torch.nn.Module, layers: NamedLayers, batches: list[Any], parts: int
) -> list[_Watch]:
    """Run the model over the batches, and watch the layers."""
    watches = [_Watch(name, layer) for name, layer in layers]
    with ExitStack() as stack:
        stack.enter_context(_left_as_it_is(model))
        for watch in watches:
            watch.layer.scope = Scope.world()
            stack.enter_context(_watched(watch, parts))
        # A graph that was compiled before would not call the hooks.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        for batch in batches:
            model(*batch) if isinstance(batch, tuple) else model(batch)
    return watches


@contextmanager
def _watched(watch: _Watch, parts: int) -> Iterator[None]:
    """Take moments of what the layer is given, and the cost of its exchanges."""
    before = communication_counters()

    def look(_layer: BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal before
        x = args[0] if args else kwargs["input"]
        if x.shape[0] < parts:
            raise ValueError(
                f"batches: expected at least {parts} samples, one for each rank, got "
                f"{x.shape[0]} in {watch.name or 'model'}"
            )
        moments = PartMoments.of(x, parts)
        watch.moments = moments if watch.moments is None else watch.moments.followed_by(moments)
        before = communication_counters()

    def count(*_: object) -> None:
        after = communication_counters()
        watch.exchanges += after.calls - before.calls
        watch.seconds += after.seconds - before.seconds

    hooks = [
        watch.layer.register_forward_pre_hook(look, with_kwargs=True),
        watch.layer.register_forward_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _left_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Restore what running a model changes; its batch normalization uses the batch's statistics."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    kept = [(norm.scope, norm.layer_name) for norm in norms]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [index for index in {p.get_device() for p in model.parameters()} if index >= 0]
    try:
        with torch.random.fork_rng(devices), batch_statistics(model):
            yield
    finally:
        for norm, (scope, layer_name) in zip(norms, kept, strict=True):
            norm.scope, norm.layer_name = scope, layer_name
        for buffer, value in buffers:
            buffer.copy_(value)


def _gathered(watches: list[_Watch], group: ProcessGroup) -> list[_Watch]:
    """With the moments of all ranks as parts, the same on every rank."""
    for watch in watches:
        moments = watch.moments
        calls = 0 if moments is None else len(moments.counts)
        label = f"recommend_scopes, {watch.name or 'model'}"
        own = torch.tensor([calls, watch.seconds], dtype=torch.float64)
        all_calls, seconds = _library.gather(own, group.group_name, label).T
        if len(set(all_calls.tolist())) > 1:
            raise ValueError(
                f"model: expected {watch.name or 'the layer'} to run as often on every rank, got "
                f"{[int(calls) for calls in all_calls]} times"
            )
        watch.seconds = float(seconds.mean())
        if moments is None:
            continue
        message = torch.cat([moments.counts[..., None], moments.means, moments.variances], dim=2)
        of_ranks = _library.gather(message.flatten(), group.group_name, label)
        channels = moments.means.shape[2]
        parts = of_ranks.view(-1, calls, 1 + 2 * channels).transpose(0, 1)
        counts, means, variances = parts.split([1, channels, channels], dim=2)
        watch.moments = PartMoments(counts.squeeze(2), means, variances)
    return watches


def _ranks_of_a_host(group: ProcessGroup | None) -> int | None:
    """Consecutive ranks that each host holds; None where hosts differ or there is one."""
    if group is None or group.size() == 1:
        return None
    own = torch.tensor([_library.host_identity()], dtype=torch.float64)  # of 52 bits
    hosts = _library.gather(own, group.group_name, "recommend_scopes, hosts").flatten().tolist()
    size = hosts.count(hosts[0])
    blocks = [hosts[i : i + size] for i in range(0, len(hosts), size)]
    same = all(len(set(block)) == 1 and len(block) == size for block in blocks)
    return size if same and len(set(hosts)) == len(blocks) > 1 else None


def _plan(watch: _Watch, wanted: float, ranks_of_a_host: int | None) -> LayerPlan:
    assert watch.moments is not None
    moments, eps = watch.moments, watch.layer.eps
    ranks = moments.counts.shape[1]
    candidates: list[Candidate] = []
    for size in (size for size in range(1, ranks + 1) if ranks % size == 0):
        values = independent_values(moments.joined(size), eps)
        extrapolated = values is None
        if extrapolated and candidates and candidates[0].values is not None:
            values = candidates[0].values.times(size)
        name = _scope_name(size, ranks, ranks_of_a_host)
        candidates.append(Candidate(name, size, values, extrapolated))
    enough = (each for each in candidates if _is_enough(each.values, wanted))
    chosen = next(enough, candidates[-1])
    exchanges = watch.exchanges
    return LayerPlan(
        watch.name,
        watch.layer.num_features,
        chosen.scope,
        tuple(candidates),
        _library.message_bytes(watch.layer.num_features),
        watch.seconds / exchanges if exchanges else None,
    )


def _scope_name(size: int, ranks: int, ranks_of_a_host: int | None) -> str:
    if size == 1:
        return "local"
    if size == ranks:
        return "world"
    return "node" if size == ranks_of_a_host else f"group:{size}"


def _is_enough(values: IndependentValues | None, wanted: float) -> bool:
    if values is None:
        return False
    return (values.value if math.isnan(values.lower) else values.lower) >= wanted


def _layer_of_json(fields: dict[str, Any]) -> LayerPlan:
    candidates = tuple(
        Candidate(
            **{**each, "values": None if each["values"] is None
               else IndependentValues(**each["values"])}
        )
        for each in fields["candidates"]
    )  # fmt: skip
    return LayerPlan(**{**fields, "candidates": candidates})
