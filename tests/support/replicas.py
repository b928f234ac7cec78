# SPDX-License-Identifier: Apache-2.0
"""The forward of torch.nn.DataParallel on any device: replicas, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def replicas_of(model: nn.Module, number: int) -> list[nn.Module]:
    """Make replicas like torch.nn.parallel.replicate(), all on the device of the model.

    Their parameters are views of the model's parameters, so gradients reach the model. The first
    replica has the model's buffers, the others have copies.
    """
    modules = list(model.modules())
    copies = {m: [m._replicate_for_data_parallel() for _ in range(number)] for m in modules}
    for module, replicas in copies.items():
        for i, replica in enumerate(replicas):
            for name, child in module._modules.items():
                setattr(replica, name, None if child is None else copies[child][i])
            for name, parameter in module._parameters.items():
                if parameter is None:
                    replica._parameters[name] = None
                else:
                    setattr(replica, name, parameter.view_as(parameter))
            for name, buffer in module._buffers.items():
                if buffer is not None and i > 0:
                    setattr(replica, name, buffer.clone())
    found: list[nn.Module] = copies[model]
    return found


def run_replicas(replicas: Sequence[Callable[[Any], Any]], parts: Sequence[Any]) -> list[Any]:
    """Run each replica on its part in its own thread, and return the results or the errors."""
    results: list[Any] = [None] * len(replicas)
    with_gradients = torch.is_grad_enabled()

    def run(i: int) -> None:
        torch.set_grad_enabled(with_gradients)
        try:
            results[i] = replicas[i](parts[i])
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
