"""The calls of a function of tensors, recorded as Dynamo writes them ahead of autograd: functions and methods of torch.

``make_fx`` records every program, and takes 10 ms and more for a few calls, because of proxies and of operators that
are decomposed for their shapes. This module records simple programs, and reports the others.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from shiplap.torch_private.pytree import leaves

FACTS = frozenset({"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"})
FACTS |= {"is_contiguous", "is_floating_point", "is_complex"}
FACTORIES = frozenset({"full", "zeros", "ones", "empty", "arange"})
VIEWS = frozenset({"T", "mT"})  # attributes that are tensors
OPERATORS = {"__eq__": operator.eq, "__ne__": operator.ne, "__or__": operator.or_, "__and__": operator.and_}
REFLECTED = {"__rsub__": operator.sub, "__rtruediv__": operator.truediv, "__rdiv__": operator.truediv}
PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Unusual(Exception):
    """Raised for a call that is not recorded."""


def record_graph(fn: Callable[..., Any], values: Sequence[Any]) -> Graph | None:
    """Return ``fn`` of fake tensors of fixed sizes as a graph, whose output is a list of the results.

    None if a call writes to a tensor, switches a mode, makes a tensor of constants, or is unknown. Raises the errors of
    ``fn``.
    """
    if not all(isinstance(v, Tensor) and all(type(n) is int for n in v.shape) for v in values):
        return None
    held = _Recorder(values)
    try:
        with held:
            results = leaves(fn(*values))
        if held.switched:
            return None
        held.graph.output([held.node(r) for r in results])
    except _Unusual:
        return None
    return held.graph


class _Recorder(TorchFunctionMode):
    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.switched = False  # whether something else than tensors came of a call, as of one that switches a mode
        self.nodes: dict[int, tuple[Tensor, Node]] = {}  # by identity, which lasts while the tensor is held
        for number, given in enumerate(values):
            self._hold(given, self.graph.placeholder(f"arg{number}_1"))

    def _hold(self, made: Tensor, node: Node) -> None:
        node.meta["val"] = made
        self.nodes[id(made)] = made, node

    def node(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            if id(given) not in self.nodes:
                raise _Unusual("a tensor from elsewhere")
            return self.nodes[id(given)][1]
        if not isinstance(given, PLAIN) and given is not Ellipsis:
            raise _Unusual(f"{type(given).__name__} as an argument")
        return given

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        # Recorded graphs are functional. A write would need the aliases of the tensor, which are not tracked here.
        writes = (name.endswith("_") and not name.endswith("__")) or "out" in named or named.get("inplace")
        if writes:
            raise _Unusual(f"{name} writes")
        result = func(*args, **named)
        if isinstance(result, Tensor):
            self._hold(result, self._call(func, name, args, named))
        elif isinstance(result, (tuple, list)) and result and all(isinstance(r, Tensor) for r in result):
            whole = self._call(func, name, args, named)
            whole.meta["val"] = result
            for number, part in enumerate(result):
                self._hold(part, self.graph.call_function(operator.getitem, (whole, number)))
        elif name != "__get__" and name not in FACTS:
            self.switched = True  # nothing is raised: a mode that a statement has entered would stay in force
        return result

    def _call(self, func: Any, name: str, args: Sequence[Any], named: dict[str, Any]) -> Node:
        given = map_aggregate((tuple(args), dict(named)), self.node)
        assert isinstance(given, tuple)
        passed, named = given
        if name == "__get__" and (attribute := str(func.__self__.__name__)) in VIEWS:
            return self.graph.call_function(getattr, (passed[0], attribute))
        if name == "__getitem__":
            return self.graph.call_function(operator.getitem, passed)
        if name in OPERATORS:
            return self.graph.call_function(OPERATORS[name], passed)
        if name in REFLECTED and len(passed) == 2:
            return self.graph.call_function(REFLECTED[name], (passed[1], passed[0]))
        if name.startswith("__"):
            raise _Unusual(name)
        if isinstance(func, types.MethodDescriptorType) or getattr(Tensor, name, None) is func:
            return self.graph.call_method(name, passed, named)
        if any(func is f for f in _public_functions(name)) and (name in FACTORIES or _has_nodes(passed, named)):
            return self.graph.call_function(func, passed, named)
        raise _Unusual(name)


def _public_functions(name: str) -> Iterator[Any]:
    for module in (torch, torch.nn.functional, torch.special, torch.linalg):
        yield getattr(module, name, None)


def _has_nodes(passed: Any, named: Any) -> bool:
    nodes: list[Node] = []
    map_aggregate((passed, named), lambda n: nodes.append(n) if isinstance(n, Node) else None)
    return bool(nodes)
