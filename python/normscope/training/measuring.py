# SPDX-License-Identifier: Apache-2.0
"""Forwards of a model that measure the inputs of its layers and leave it as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.parameter import is_lazy

from normscope._binding.ops import ForwardArguments
from normscope._binding.torch_private import TorchBatchNorm, buffers_of
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.count import Counter
from normscope.layers.ending import Ending
from normscope.layers.forward import train


@contextmanager
def measuring(model: torch.nn.Module, layers: Iterable[TorchBatchNorm]) -> Iterator[None]:
    """Run the layers with batch statistics, eagerly and without gradients.

    Afterwards the layers have their modes again, and all modules of the model their buffers.
    """
    modes = [(layer, layer.training) for layer in layers]
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    counts = [norm.elements_seen for norm in norms]
    # A module may replace its buffer by another tensor.
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
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for layer, mode in modes:
            layer.training = mode
        for module, name, buffer, value in buffers:
            buffer.copy_(value)
            buffers_of(module)[name] = buffer
        for norm, count in zip(norms, counts, strict=True):
            norm.elements_seen = count


class Watch:
    """The route of a layer that is measured: the layer updates nothing."""

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize ``x``, then look at it."""
        y = train(None, x, mask, arguments.without_running(), ending)
        self.look(x, mask, tracks=arguments.running_mean is not None)
        return y

    def look(self, x: torch.Tensor, mask: torch.Tensor | None, *, tracks: bool) -> None:
        """Measure an input; ``tracks`` says whether running statistics would be updated."""
        raise NotImplementedError

    def add(
        self, counter: Counter, moments: torch.Tensor, elements: int, arguments: ForwardArguments
    ) -> None:
        """Refuse the moments of replicas."""
        raise RuntimeError("model: expected the module of a torch.nn.DataParallel, got the wrapper")
