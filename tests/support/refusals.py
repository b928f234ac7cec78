# SPDX-License-Identifier: Apache-2.0
"""Refused calls with a model: what they raise, and that they change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

# A function that makes a model, a call with the model, and what the call raises.
Refusal = tuple[Callable[[], Any], Callable[[Any], object], type[Exception], str]

# Attributes of a layer that its first use makes.
MADE_LATER = {"_count", "_earlier_scopes"}


def assert_refused(refusal: Refusal) -> None:
    """Assert that a call raises, and leaves the model as it was."""
    make, call, error, message = refusal
    model = make()

    with unchanged(model), pytest.raises(error, match=message):
        call(model)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Assert that a block leaves a model as it was."""
    state, tensors = state_of(model), copy.deepcopy(tensors_of(model))
    yield
    assert state_of(model) == state
    assert tensors_of(model).keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in tensors_of(model).items())


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the class, attributes, mode, scope and number of elements of each module."""
    return {
        name: (
            type(module),
            set(vars(module)) - MADE_LATER,
            module.training,
            str(getattr(module, "scope", None)),
            getattr(module, "elements_seen", None),
        )
        for name, module in model.named_modules()
    }


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if not nn.parameter.is_lazy(tensor)
    }
