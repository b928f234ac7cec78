# SPDX-License-Identifier: Apache-2.0
"""The graph of a model, by torch.fx, where it is sure that it computes what the model does.

torch.fx runs forward once, with proxies, and keeps what they meet. What Python does besides is lost
without a word: the mode that a module is in, a no_grad, the in-place half of ``+=``. Here either
the graph has it, or the model is refused.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from normscope.modules import BatchNorm

_ADVICE = "fuse the parts that can be, as in model.backbone = normscope.fuse(model.backbone)"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def traced(model: torch.nn.Module) -> fx.Graph:
    """The graph of a model's forward, whose calls of modules are those of torch.nn and normscope.

    The model stays as it is.

    Raises:
        RuntimeError: If forward cannot be traced, or the graph would not compute what it does.
    """
    if has_hooks(model):
        raise RuntimeError(_hooks_lost(model, ""))
    if "forward" in model.__dict__:
        raise RuntimeError(
            "model: expected a model whose forward is its class's, got one with a forward of its "
            "own, which torch.fx does not trace; fuse it before forward is replaced"
        )
    graph = _trace(model, training=True)
    in_evaluation = _trace(model, training=False)
    for node, other in zip(graph.nodes, in_evaluation.nodes, strict=False):
        if _form(node) != _form(other):
            raise RuntimeError(
                f"{_named(module_of(node))}: expected a forward that does the same in training and "
                f"in evaluation, got {_described(node)} in training and {_described(other)} in "
                "evaluation, of which a graph would keep one; use modules, as torch.nn.Dropout in "
                f"place of functional.dropout, or {_ADVICE}"
            )
    return graph


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something looks at the module's calls, or changes them."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def module_of(node: fx.Node) -> str:
    """The qualified name of the module in whose forward a node stands."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack", {})
    names = ["", *(name for name, _ in stack.values())]
    return names[-2 if node.op == "call_module" else -1]


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The operator as a function: torch.fx writes the operator itself as a statement.

    That would give a number's other users the new value.
    """

    def call(left: Any, right: Any) -> Any:  # noqa: ANN401 - as the operator
        return operation(left, right)

    call.__name__ = call.__qualname__ = operation.__name__
    return call


iadd = _in_place(operator.iadd)
isub = _in_place(operator.isub)
imul = _in_place(operator.imul)
itruediv = _in_place(operator.itruediv)
ifloordiv = _in_place(operator.ifloordiv)
imod = _in_place(operator.imod)
ipow = _in_place(operator.ipow)
iand = _in_place(operator.iand)
ior = _in_place(operator.ior)
ixor = _in_place(operator.ixor)
ilshift = _in_place(operator.ilshift)
irshift = _in_place(operator.irshift)
imatmul = _in_place(operator.imatmul)
IN_PLACE = (
    *(iadd, isub, imul, itruediv, ifloordiv, imod, ipow),
    *(iand, ior, ixor, ilshift, irshift, imatmul),
)


def expect_none(argument: Any, name: str) -> None:  # noqa: ANN401 - whatever was given
    """Raise if an argument is given that is None in the graph."""
    if isinstance(argument, fx.Proxy):
        argument.tracer.create_proxy("call_function", expect_none, (argument, name), {})
    elif argument is not None:
        raise ValueError(
            f"{name}: expected None, for which the model was fused, got a "
            f"{type(argument).__qualname__}"
        )


class _Proxy(fx.Proxy):
    """A proxy that keeps in-place operators what they are; torch's own makes them out of place."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("tracer", "node"):
            raise fx.proxy.TraceError(f"an assignment to .{name} of a tensor")
        super().__setattr__(name, value)


def _recorded(function: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], Any]:
    def method(self: _Proxy, other: Any) -> Any:  # noqa: ANN401 - as the operator
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _function in IN_PLACE:
    setattr(_Proxy, f"__{_function.__name__}__", _recorded(_function))


class _RefusalError(Exception):
    """Ends a trace with a message of its own."""


class Tracer(fx.Tracer):
    """Traces through all but the modules of torch.nn and normscope."""

    proxy_buffer_attributes = True  # what is computed from buffers is no constant

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()

    def place(self, depth: int = 1) -> str:
        """The qualified name of the innermost module that is called, or of one that calls it."""
        names = ["", *(name for name, _ in self.module_stack.values())]
        return names[max(-depth, -len(names))]

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether the graph calls the module as a whole."""
        return isinstance(m, BatchNorm) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Trace a call, or keep it as a node."""
        name = self.path_of_module(m)
        if has_hooks(m) and not self.is_leaf_module(m, name):
            raise _RefusalError(_hooks_lost(m, name))
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401 - torch's
        """Add a node, which is to run in the modes that the whole graph runs in."""
        if _modes() != self._modes:
            caller = self.place(2 if kind == "call_module" else 1)
            raise _RefusalError(
                f"{_named(caller)}: expected a forward that leaves gradients, autocast and saved "
                "tensors as they are, got one that runs a part of itself under no_grad, autocast, "
                f"checkpoint or the like, which a graph would drop; {_ADVICE}"
            )
        return super().create_node(kind, *args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Stand for what a node computes."""
        return _Proxy(node, self)


def _modes() -> tuple[object, ...]:
    """What of the surroundings changes what an operation does, or what it keeps."""
    autocast = (
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),  # noqa: FBT003 - torch's
        *autocast,
    )


def _trace(model: torch.nn.Module, *, training: bool) -> fx.Graph:
    """Trace a model all of whose modules are in one mode; it is restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.__dict__["training"] = training
    before = [state for name, module in model.named_modules() for state in _states(name, module)]
    tracer = Tracer()
    specialized = _arguments_that_may_be_none(model)
    try:
        graph = tracer.trace(model, dict.fromkeys(specialized) or None)
        _check_tensors(model, graph)
        _check_assignments(before)
    except _RefusalError as refusal:
        raise RuntimeError(str(refusal)) from None
    except Exception as error:
        raise RuntimeError(
            f"{_named(tracer.place())}: expected a forward that torch.fx can trace, without "
            f"control flow that depends on its input, got {type(error).__name__}: {error}; "
            f"{_ADVICE}"
        ) from error
    finally:
        for state in before:
            state.restore()
        for module, mode in modes.items():
            module.__dict__["training"] = mode
    for node in graph.nodes:
        node.type = None  # an annotation, which may be text, and text cannot be pickled
    for node in graph.find_nodes(op="placeholder"):
        name = node.target.removesuffix("_1")
        if name in specialized:
            node.target = name  # as callers have it
            [check] = node.users
            check.target, check.args = expect_none, (node, name)  # torch's cannot be pickled twice
    return graph


def _arguments_that_may_be_none(model: torch.nn.Module) -> list[str]:
    """They are None in the graph, which checks it: a proxy would never be ``None`` for an if."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is None]


def _check_tensors(model: torch.nn.Module, graph: fx.Graph) -> None:
    known = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in known:
            raise _RefusalError(
                f"{_named(module_of(node))}: expected a forward whose tensors are inputs, "
                "parameters and buffers, got one that it makes itself or finds in an attribute, "
                f"which a graph would keep as it is now; register it as a buffer, or {_ADVICE}"
            )


@dataclass(frozen=True)
class _State:
    """What a dict or a list held: a module's attributes, or one of them, as its buffers."""

    name: str
    holder: dict[Any, Any] | list[Any]
    items: list[tuple[Any, Any]]

    def changed(self) -> list[Any]:
        """The keys of what is no longer what it was."""
        now, before = dict(_items(self.holder)), dict(self.items)
        keys = [*before, *(key for key in now if key not in before)]
        return [key for key in keys if now.get(key, now) is not before.get(key, before)]

    def restore(self) -> None:
        if not self.changed():
            return
        self.holder.clear()
        if isinstance(self.holder, dict):
            self.holder.update(self.items)
        else:
            self.holder.extend(value for _, value in self.items)


def _items(holder: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def _states(name: str, module: torch.nn.Module) -> Iterator[_State]:
    """Of the module's attributes, and of those that hold others."""
    yield _State(name, module.__dict__, _items(module.__dict__))
    for attribute in module.__dict__.values():
        if isinstance(attribute, dict | list):
            yield _State(name, attribute, _items(attribute))


def _check_assignments(before: list[_State]) -> None:
    for state in before:
        for key in state.changed():
            raise _RefusalError(
                f"{_named(state.name)}: expected a forward that assigns to nothing of its module, "
                f"got one that assigns to {key!r}, which a graph would not; {_ADVICE}"
            )


def _hooks_lost(module: torch.nn.Module, name: str) -> str:
    return (
        f"{_named(name)}: expected a module without forward or backward hooks, got a "
        f"{type(module).__qualname__} with hooks, which a graph would not call; remove them, "
        f"or {_ADVICE}"
    )


def _form(node: fx.Node) -> tuple[object, ...]:
    """What a node does, in words that another trace has too."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda other: f"%{other.name}")
    return node.name, node.op, node.target, arguments


def _described(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"{name}({', '.join(arguments)})"


def _named(name: str) -> str:
    return name or "model"
