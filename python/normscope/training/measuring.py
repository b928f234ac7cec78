# SPDX-License-Identifier: Apache-2.0
"""Forwards of a model that measure the inputs of its layers and leave it as it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DataParallel
from torch.nn.parameter import is_lazy

from normscope._binding.ops import ForwardArguments
from normscope._binding.torch_private import DistError, TorchBatchNorm, buffers_of
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.count import Counter


@contextmanager
def measuring(model: torch.nn.Module, layers: Iterable[TorchBatchNorm]) -> Iterator[None]:
    """Run the layers with batch statistics, eagerly.

    Afterwards the layers have their modes again, and all modules of the model their buffers.

    Raises:
        ValueError: If the model runs in replicas, of which only the first has the layers' routes.
    """
    if any(isinstance(m, DataParallel) and len(m.device_ids) > 1 for m in model.modules()):
        raise ValueError(
            "model: expected the model in the DataParallel, got the wrapper; pass model.module"
        )
    modes = [(layer, layer.training) for layer in layers]
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    counts = [norm.elements_seen for norm in norms]
    # A module may replace its buffer, or resize it, as observers of quantization do at first.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and not is_lazy(buffer)
    ]
    try:
        for layer, _ in modes:
            layer.training = True
        # A graph that is already compiled would call no hooks, and its layers no routes.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for layer, mode in modes:
            layer.training = mode
        for module, name, buffer, value in buffers:
            if buffer.shape != value.shape:
                buffer.resize_(value.shape)
            buffer.copy_(value)
            buffers_of(module)[name] = buffer
        for norm, count in zip(norms, counts, strict=True):
            norm.elements_seen = count


def call_model(model: torch.nn.Module, batch: Any) -> Any:  # noqa: ANN401 - of the model
    """Run a model on a batch: a tuple of arguments, a mapping of keywords, or the only argument.

    Raises:
        ValueError: If the batch is a list, and the model cannot take it.
    """
    if isinstance(batch, tuple):
        return model(*batch)
    if isinstance(batch, Mapping) and _takes_keywords(model, batch):
        return model(**batch)
    try:
        return model(batch)
    except DistError:
        raise
    except Exception as error:
        if not isinstance(batch, list):
            raise
        raise ValueError(
            "batches: expected inputs of the model, got a list, as a DataLoader makes of pairs, "
            f"which the model cannot take ({type(error).__name__}: {error}); pass the inputs "
            "alone: (x for x, _ in loader), or tuples with the arguments of the model's forward"
        ) from error


def _takes_keywords(model: torch.nn.Module, batch: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(**batch)
    except (TypeError, ValueError):
        return False
    return True


class Watch:
    """The base of the routes of layers that are measured: these layers update nothing."""

    def add(
        self, counter: Counter, moments: torch.Tensor, elements: int, arguments: ForwardArguments
    ) -> None:
        """Refuse the moments of replicas."""
        raise RuntimeError("model: expected the module of a torch.nn.DataParallel, got the wrapper")
