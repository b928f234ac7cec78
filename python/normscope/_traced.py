# SPDX-License-Identifier: Apache-2.0
"""Traces a model with torch.fx, and refuses it if the graph might compute something else.

torch.fx runs forward once with proxies, and records the operations on them. Everything else that
Python does is lost silently: the mode of a module, a no_grad, the in-place half of ``+=``. Here,
either the graph contains it or the model is refused.
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
    """Return the graph of a model's forward, with modules of torch.nn and normscope as calls.

    The model is not changed.

    Raises:
        RuntimeError: If forward cannot be traced, or the graph would compute something else.
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
                "evaluation, of which a graph would keep one; use modules, such as "
                f"torch.nn.Dropout instead of functional.dropout, or {_ADVICE}"
            )
    return graph


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on the module."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def module_of(node: fx.Node) -> str:
    """Return the qualified name of the module whose forward contains the node."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack", {})
    names = ["", *(name for name, _ in stack.values())]
    return names[-2 if node.op == "call_module" else -1]


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap an in-place operator in a function.

    torch.fx would write the operator itself as a statement like ``a += b``. If ``a`` is a number,
    all other users of the variable would then see the new value.
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
    """Raise if an argument is given that was None when the graph was traced."""
    if isinstance(argument, fx.Proxy):
        argument.tracer.create_proxy("call_function", expect_none, (argument, name), {})
    elif argument is not None:
        raise ValueError(
            f"{name}: expected None, for which the model was fused, got a "
            f"{type(argument).__qualname__}"
        )


class _Proxy(fx.Proxy):
    """A proxy that keeps in-place operators in place; torch's own proxy does not."""

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
    """Ends a trace with the final text of the error."""


class Tracer(fx.Tracer):
    """Traces into all modules except those of torch.nn and normscope."""

    proxy_buffer_attributes = True  # values that are computed from buffers are not constants

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()

    def place(self, depth: int = 1) -> str:
        """Return the name of the innermost module on the stack, or of one ``depth - 1`` above."""
        names = ["", *(name for name, _ in self.module_stack.values())]
        return names[max(-depth, -len(names))]

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether the graph calls the module as a whole."""
        return isinstance(m, BatchNorm) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Trace into a call, or record it as a node."""
        name = self.path_of_module(m)
        if has_hooks(m) and not self.is_leaf_module(m, name):
            raise _RefusalError(_hooks_lost(m, name))
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401 - torch's
        """Add a node, after checking that it runs in the same modes as the whole graph."""
        if _modes() != self._modes:
            caller = self.place(2 if kind == "call_module" else 1)
            raise _RefusalError(
                f"{_named(caller)}: expected a forward that leaves gradients, autocast and saved "
                "tensors as they are, got one that runs a part of itself under no_grad, autocast, "
                f"checkpoint or the like, which a graph would drop; {_ADVICE}"
            )
        return super().create_node(kind, *args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node."""
        return _Proxy(node, self)


def _modes() -> tuple[object, ...]:
    """Return the global modes that change what an operation computes or saves."""
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
    """Trace a model with all modules in one mode, and restore the model afterwards."""
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
        node.type = None  # an annotation may be a string, which cannot be pickled here
    for node in graph.find_nodes(op="placeholder"):
        name = node.target.removesuffix("_1")
        if name in specialized:
            node.target = name  # the name that callers use
            [check] = node.users
            check.target, check.args = expect_none, (node, name)  # torch's cannot be pickled twice
    return graph


def _arguments_that_may_be_none(model: torch.nn.Module) -> list[str]:
    """Return the arguments of forward that are None by default.

    They are traced as None, and the graph checks that they stay so: a proxy would never compare
    equal to ``None`` in an if.
    """
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
    """The contents of a dict or list: a module's attributes, or one attribute such as _buffers."""

    name: str
    holder: dict[Any, Any] | list[Any]
    items: list[tuple[Any, Any]]

    def changed(self) -> list[Any]:
        """Return the keys whose values have changed."""
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
    """Yield the states of the module's attribute dict, and of the dicts and lists in it."""
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
    """Return a description of a node that can be compared between traces."""
    arguments = fx.map_arg((node.args, node.kwargs), lambda other: f"%{other.name}")
    return node.name, node.op, node.target, arguments


def _described(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"{name}({', '.join(arguments)})"


def _named(name: str) -> str:
    return name or "model"
