# SPDX-License-Identifier: Apache-2.0
r"""Statistics over the replicas of torch.nn.DataParallel, which are threads of one process.

In forward, the threads wait for each other. Backward need not have a thread per replica. There the
replicas are combined by the autograd graph:

    x ---> _Moments ---> _Sum ---> _Normalize ---> y        one per replica, but a single _Sum
     \__________________________/

Forward passes the moments of x along the arrows, and backward passes gradient sums against them:
the backward of _Normalize computes a replica's sums of dy, that of _Sum adds them, and that of
_Moments computes dx. Sums of moments are exact in any order.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.constants import default_pg_timeout

from normscope._binding import groups, ops
from normscope._binding.ops import ForwardArguments
from normscope._binding.torch_private import current_graph_task_id
from normscope.layers.count import Counter
from normscope.layers.ending import Ending
from normscope.layers.forward import DIRECT, Route, check_dimensions
from normscope.layers.masks import Rows
from normscope.layers.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

_COUNT = -4  # index of the element count in moments: the first of the four numbers after the sums

_POLL = 0.05  # seconds
_POLLS_ALONE = 20  # after which the missing replicas are given up


@dataclass
class _Call:
    """The state of one replica's forward that its backward nodes share."""

    statistics: torch.Tensor | None = None
    dy: torch.Tensor | None = None


class _Moments(torch.autograd.Function):
    """The moments of a replica's x."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        weight: torch.Tensor | None,
        call: _Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return ops.batch_norm_moments(x)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy, ctx.call.dy = ctx.call.dy, None
        if not ctx.needs_input_grad[0]:
            return None, None, None
        if dy is None:  # the loss does not depend on this replica's y
            dy = torch.zeros_like(x)
        statistics = ctx.call.statistics
        dx = ops.batch_norm_part_input_gradient(dy, x, weight, statistics, sums)
        return dx, None, None


class _Sum(torch.autograd.Function):
    """The moments of all replicas, on the device of each."""

    @staticmethod
    def forward(ctx: Any, *moments: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        total = _sum(moments, moments[0].device)
        ctx.set_materialize_grads(False)
        ctx.devices = [of_replica.device for of_replica in moments]
        ctx.count = total[_COUNT].clone()
        return _on_devices(total, ctx.devices)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        *sums: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        total = _sum([s for s in sums if s is not None], ctx.count.device)
        total[_COUNT] = ctx.count  # also of replicas whose y the loss does not depend on
        return _on_devices(total, ctx.devices)


class _Normalize(torch.autograd.Function):
    """A replica's y, from the statistics of all replicas."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        y = ops.batch_norm_with_statistics(x, weight, bias, call.statistics)
        ctx.save_for_backward(x)
        ctx.call = call
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        sums, dweight, dbias = ops.batch_norm_part_gradient_sums(dy, x, ctx.call.statistics)
        ctx.call.dy = dy
        wants = ctx.needs_input_grad
        return None, dweight if wants[1] else None, dbias if wants[2] else None, sums, None


def _sum(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = parts[0].to(device, copy=True)
    for part in parts[1:]:
        total += part.to(device)
    return total


def _on_devices(total: torch.Tensor, devices: list[torch.device]) -> tuple[torch.Tensor, ...]:
    return tuple(total.to(device, copy=True) for device in devices)


@dataclass
class _Arrival:
    """The part of a replica in a round."""

    moments: torch.Tensor
    x: torch.Tensor
    arguments: ForwardArguments
    call: _Call


@dataclass
class _Round:
    """One call of a layer by all of its replicas."""

    arrivals: dict[int, _Arrival] = field(default_factory=dict)  # by replica
    totals: tuple[torch.Tensor, ...] | None = None  # by replica, once all have arrived
    error: str = ""


class _Original(Counter, Protocol):
    """The layer that replicas were made from."""

    layer_name: str
    _route: Route


class _ReplicaSet:
    """The replicas of a layer that torch.nn.parallel.replicate() has made for one forward."""

    def __init__(self, layer: _Original) -> None:
        self._layer = weakref.ref(layer)
        self.is_open = True  # more replicas can join until one of them is called
        self._replicas: list[weakref.ref[_RouteOfReplica]] = []
        self._rounds: dict[int, _Round] = {}
        self._calls: dict[int, int] = {}  # by replica
        self._error = ""
        self._condition = threading.Condition()

    def join(self, route: Route) -> _RouteOfReplica:
        """Add a replica. If it is the first, it uses the given route whenever it runs alone."""
        joined = _RouteOfReplica(self, DIRECT if self._replicas else route)
        self._replicas.append(weakref.ref(joined))
        return joined

    def close(self) -> None:
        """Let no more replicas join; forget those that are gone without a call."""
        with self._condition:
            if self.is_open:
                self.is_open = False
                self._replicas = [ref for ref in self._replicas if ref() is not None]

    def train(
        self,
        replica: _RouteOfReplica,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize one replica's part of the joint batch, without its masked elements."""
        weight, bias, part, call = arguments.weight, arguments.bias, x, _Call()
        try:
            check_dimensions(x, arguments.dims)
            _check_scope(arguments.scope, arguments.group)
            if mask is not None:
                rows = Rows.of(x, mask)
                part, ending = rows.take(x), ending.with_residual(x, rows.take)
            ending.check_shapes(part)  # before the buffers are updated
            moments: torch.Tensor = _Moments.apply(part, weight, call)  # type: ignore[no-untyped-call]
            with self._condition:
                total = self._wait_for_all(replica, _Arrival(moments, part, arguments, call))
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        y: torch.Tensor = _Normalize.apply(part, weight, bias, total, call)  # type: ignore[no-untyped-call]
        y = ending.finish(y)
        return y if mask is None else rows.put(y, x)

    def _wait_for_all(self, replica: _RouteOfReplica, arrival: _Arrival) -> torch.Tensor:
        """Return the moments of all replicas, on the device of this one."""
        self.close()
        index = next(i for i, ref in enumerate(self._replicas) if ref() is replica)
        number = self._calls.get(index, 0)
        self._calls[index] = number + 1
        this_round = self._rounds.setdefault(number, _Round(error=self._error))
        this_round.arrivals[index] = arrival
        if len(this_round.arrivals) == len(self._replicas) and not this_round.error:
            self._finish(this_round)
            del self._rounds[number]
            self._condition.notify_all()
        else:
            self._wait(this_round)
        assert this_round.totals is not None
        return this_round.totals[index]

    def _finish(self, this_round: _Round) -> None:
        """Combine the moments and update the running statistics, once all replicas have arrived."""
        arrivals = [this_round.arrivals[i] for i in range(len(self._replicas))]
        for i, arrival in enumerate(arrivals):
            if (arrival.x.dtype, arrival.x.shape[1]) != (
                arrivals[0].x.dtype,
                arrivals[0].x.shape[1],
            ):
                raise RuntimeError(
                    f"x: expected {arrivals[0].x.shape[1]} channels of {arrivals[0].x.dtype}, as "
                    f"replica 0 has, got {arrival.x.shape[1]} of {arrival.x.dtype} in replica {i}"
                )
        if sum(a.x.numel() for a in arrivals) == arrivals[0].x.shape[1]:
            name = arrivals[0].arguments.layer
            raise ValueError(
                "Expected more than 1 value per channel when training, got input sizes "
                f"{', '.join(str(arrival.x.shape) for arrival in arrivals)}"
                f"{' in ' if name else ''}{name}"
            )
        layer = self._layer()
        assert layer is not None  # replicas do not outlive the forward of their layer
        totals = _Sum.apply(*(arrival.moments for arrival in arrivals))  # type: ignore[no-untyped-call]
        for arrival, total in zip(arrivals, totals, strict=True):
            arrival.call.statistics = ops.batch_norm_finalize(
                total.detach(), None, None, None, None, arrival.arguments.eps, arrival.x.dtype
            )
        elements = sum(arrival.x.numel() for arrival in arrivals)
        # As in torch, the buffers of replica 0 are the layer's.
        layer._route.add(layer, totals[0].detach(), elements, arrivals[0].arguments)
        this_round.totals = totals

    def _wait(self, this_round: _Round) -> None:
        deadline = time.monotonic() + _time_limit()
        polls_alone = 0
        while this_round.totals is None and not this_round.error:
            if self._condition.wait(_POLL):
                continue
            polls_alone = polls_alone + 1 if _no_thread_works() else 0
            if polls_alone >= _POLLS_ALONE or time.monotonic() > deadline:
                missing = set(range(len(self._replicas))) - this_round.arrivals.keys()
                this_round.error = (
                    f"replicas {', '.join(map(str, sorted(missing)))} did not call it: they "
                    "have failed, or leave it out"
                )
        if this_round.error:
            layer = self._layer()
            raise RuntimeError(
                f"{getattr(layer, 'layer_name', '') or type(layer).__name__}: expected all "
                f"{len(self._replicas)} replicas of torch.nn.DataParallel in a forward; "
                f"{this_round.error}"
            )

    def _fail(self, reason: str) -> None:
        with self._condition:
            self._error = self._error or f"another has failed: {reason}"
            for waiting in self._rounds.values():
                waiting.error = waiting.error or self._error
            self._condition.notify_all()


def _check_scope(scope: str, group_name: str) -> None:
    if scope not in ("world", "node"):
        raise RuntimeError(
            f"scope: expected world, node, local or slices under torch.nn.DataParallel, got {scope}"
        )
    ranks = groups.size_of(groups.named(group_name)) if group_name else 1
    if ranks > 1:
        raise RuntimeError(
            f"process_group: expected one rank under torch.nn.DataParallel, got {ranks}; use "
            "DistributedDataParallel with a process for each device"
        )
    if current_graph_task_id() >= 0:
        raise RuntimeError(
            "scope: expected local or slices for a layer that is recomputed under "
            f"torch.nn.DataParallel, got {scope}: backward has no thread for each replica"
        )


def _time_limit() -> float:
    return ops.settings().time_limit or default_pg_timeout.total_seconds()


def _no_thread_works() -> bool:
    """Return whether every thread of the process is waiting, so that no other will arrive."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.daemon or thread is threading.current_thread():
            continue
        frame = frames.get(thread.ident or 0)
        if frame is None or frame.f_code.co_filename != threading.__file__:
            return False
    return True


class _RouteOfReplica:
    """The route of a replica: to the others if they share statistics, otherwise its route alone."""

    def __init__(self, replicas: _ReplicaSet, alone: Route) -> None:
        self._replicas = replicas
        self._alone = alone

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize the replica's part of the batch."""
        if Scope(arguments.scope).is_of_one_rank:
            self._replicas.close()
            return self._alone.train(counter, x, mask, arguments, ending)
        return self._replicas.train(self, x, mask, arguments, ending)

    def add(
        self, counter: Counter, moments: torch.Tensor, elements: int, arguments: ForwardArguments
    ) -> None:
        """Add moments as if the replica was alone."""
        self._alone.add(counter, moments, elements, arguments)


_open_sets: weakref.WeakKeyDictionary[_Original, _ReplicaSet] = weakref.WeakKeyDictionary()


def route_of_replica(layer: _Original) -> Route:
    """Return the route of a new replica of a layer.

    Only the first replica adds moments to the layer's route: the buffers of the others are lost.
    """
    replicas = _open_sets.get(layer)
    if replicas is None or not replicas.is_open:
        replicas = _open_sets[layer] = _ReplicaSet(layer)
    return replicas.join(layer._route)
