# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing without a second synchronization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from normscope._binding import ops
from normscope._binding.torch_private import TorchDispatchMode, argument_names, without_modes


def checkpoint_context() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A ``context_fn`` that lets recomputed layers reuse the statistics of their forward.

    Activation checkpointing runs a part of the model again during backward. Layers never update
    their running statistics there. Without this context they synchronize again, in the same order
    on every rank. With it they compute the same y, to the bit, from the saved statistics of their
    first forward, 24 bytes per channel, and send nothing.

    It works with ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, the variant that
    takes a context_fn. Either all ranks of a scope use it, or none. To combine it with another
    context_fn, such as torch's selective checkpointing, write one that enters the contexts of both,
    these last.

    Returns:
        The context of the forward, and the context of its recomputation.

    Raises:
        RuntimeError: During backward, if the recomputation runs other layers than the forward did.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> from normscope import BatchNorm1d
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 3), BatchNorm1d(3), torch.nn.ReLU())
        >>> x = torch.randn(8, 4)
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context)
        >>> y.sum().backward()
        >>> block[1].num_batches_tracked
        tensor(1)
    """
    calls: list[_Call] = []
    return _Recording(calls), _Replay(calls)


@dataclass(frozen=True)
class _Call:
    """A training forward of a layer."""

    layer: str
    shape: torch.Size
    statistics: list[torch.Tensor | None]  # the outputs after y


_Outputs = tuple[Any, ...]
_Run = Callable[[], _Outputs]


class _OverForwards(TorchDispatchMode):
    """Passes every training forward to ``_forward``; everything else runs unchanged."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is not ops.batch_norm_forward:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(argument_names(func), args, strict=False)), **(kwargs or {})}
        return self._forward(given, lambda: func(*args, **(kwargs or {})))

    def _forward(self, given: dict[str, Any], run: _Run) -> _Outputs:
        """Return the outputs of the op, which ``run`` runs, for the arguments ``given`` by name."""
        raise NotImplementedError


class _Recording(_OverForwards):
    """Appends every training forward to ``calls``."""

    def _forward(self, given: dict[str, Any], run: _Run) -> _Outputs:
        y, *statistics = run()
        self._calls.append(_Call(given["layer"], given["x"].shape, statistics))
        return y, *statistics


class _Replay(_OverForwards):
    """Answers training forwards from ``calls``, starting over each time it is entered."""

    _remaining: Iterator[_Call] = iter(())

    def __enter__(self) -> _Replay:
        self._remaining = iter(self._calls)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def _forward(self, given: dict[str, Any], run: _Run) -> _Outputs:
        x, layer = given["x"], given["layer"]
        call = next(self._remaining, None)
        # A layer without a name may have got a number since.
        if call is None or call.layer not in ("", layer) or call.shape != x.shape:
            raise RuntimeError(
                f"checkpoint_context: expected the recomputation to run {_described(call)} next, "
                f"as the forward did, got {layer or 'a layer without a name'} on {[*x.shape]}"
            )
        # Modes that were entered earlier have not seen this op in the forward: torch's selective
        # checkpointing would miss it.
        with without_modes():
            return _with_statistics(given, call.statistics), *call.statistics


# The additional arguments of a layer with an activation.
_ACTIVATION = ("activation", "negative_slope", "residual")


def _with_statistics(given: dict[str, Any], statistics: list[torch.Tensor | None]) -> torch.Tensor:
    ending = {name: given[name] for name in _ACTIVATION if name in given}
    first, spread, counts = statistics
    return ops.batch_norm_with_statistics(
        given["x"], given["weight"], given["bias"], first, spread=spread, counts=counts, **ending
    )


def _described(call: _Call | None) -> str:
    if call is None:
        return "no further layer"
    return f"{call.layer or 'a layer without a name'} on {[*call.shape]}"
