"""What Shiplap adds to the keys under which torch caches compiled graphs (FxGraphCache, AOTAutogradCache).

Torch pickles an object with all that a key is about, the graph among it, and hashes the bytes. ``copyreg``, Python's
public register of how classes are pickled, lets the text of a graph's ops be part of that. A graph without ops has the
key that it has without Shiplap.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

# Namespaces of torch's own operators: nobody else may declare one there, and these call no operator of others.
TORCHS_OWN = frozenset(("_c10d_functional", "aten", "c10d", "higher_order", "inductor", "prim", "prims", "quantized"))
SAFE = ("_operator", "builtins", "einops", "math", "operator", "torch")  # modules whose functions call none


@dataclass(frozen=True)
class GraphOperators:
    """Operators in a graph, as ``namespace::name``.

    Attributes:
        names: the operators that are in the graph.
        traced_later: whether the graph is one of Dynamo's, ahead of autograd, so that operators which it does not name
            may come into the compiled code.
        others: whether tensor subclasses or functions in such a graph may call operators.
    """

    names: frozenset[str]
    traced_later: bool
    others: bool


Key: TypeAlias = Callable[[GraphOperators], str]
_keys: list[Key] = []


def install(key: Key) -> None:
    """Make ``key(operators)`` part of the key of every graph, from now on and in all threads. Empty adds nothing.

    Called before compile caches are asked, at each trace of an op. Torch has the modules loaded by then.
    """
    if _keys:
        return
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
    from torch._inductor.codecache import FxGraphHashDetails

    _keys.append(key)
    copyreg.pickle(AOTAutogradCacheDetails, _reduce)
    copyreg.pickle(FxGraphHashDetails, _reduce)


def _reduce(details: Any) -> Any:
    """How torch's object with the details of a key is pickled."""
    try:
        text = _keys[0](operators_of(details))
    except Exception as e:  # torch compiles without its caches then, and logs why
        raise pickle.PicklingError(f"Shiplap cannot identify the ops of a graph: {e}") from e
    return (_with_text, (text, vars(details))) if text else object.__reduce_ex__(details, 4)


def _with_text(text: str, details: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return text, details  # only its name is in a key: nobody unpickles one


def operators_of(details: Any) -> GraphOperators:
    """The operators of the graph of a key."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    before_autograd = isinstance(details, AOTAutogradCacheDetails)
    names: set[str] = set()
    others = before_autograd and any(map(_is_subclass, details.example_inputs))
    graphs = [m for m in details.gm.modules() if isinstance(m, GraphModule)] if details.gm is not None else []
    for graph in graphs:
        for target in _targets(graph):
            if isinstance(target, torch._ops.OpOverload):
                names.add(target.name())
            elif isinstance(target, torch._ops.OpOverloadPacket):
                names.add(target._qualified_op_name)
            else:
                others = others or (before_autograd and not _is_safe(target))
    return GraphOperators(frozenset(names), before_autograd, others)


def foreign(names: Collection[str]) -> list[str]:
    """Those of ``names`` that are operators of other libraries than torch."""
    return sorted(name for name in names if name.partition("::")[0] not in TORCHS_OWN)


def _targets(graph: GraphModule) -> Iterator[Any]:
    """What nodes call, and operators that are arguments of higher-order ones."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            yield node.target
            arguments: list[Any] = []
            torch.fx.node.map_aggregate((node.args, node.kwargs), arguments.append)
            yield from (v for v in arguments if isinstance(v, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)))
        elif node.op == "call_module":
            yield type(graph.get_submodule(node.target))


def _is_subclass(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _is_safe(target: Any) -> bool:
    """Whether a function of a graph cannot call operators of others: it is Python's or torch's, or is a graph too."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, type) and issubclass(target, GraphModule):
        return True
    module = getattr(target, "__module__", None) or ""  # methods of torch that are built in have none
    return not module or (module.partition(".")[0] in SAFE and not module.startswith("torch.distributed"))
