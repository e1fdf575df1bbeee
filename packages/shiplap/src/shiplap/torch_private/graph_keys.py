"""Shiplap's part of the keys under which torch caches compiled graphs (FxGraphCache, AOTAutogradCache).

Torch pickles an object with all parts of a key, including the graph, and hashes the bytes. ``copyreg``, Python's public
register of pickling functions by class, adds the text of a graph's ops to that object. A graph without ops has the same
key as without Shiplap.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

# Namespaces of torch's own operators, which call no operators of other libraries.
# What torch 2.13 registers when it and its parts are imported, and the namespaces that scripts and modes use.
TORCHS_OWN = frozenset(
    (
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "_native",
        "_quantized",
        "_test",
        "aten",
        "c10d",
        "debug_mode_ops",
        "debugprims",
        "export",
        "fsdp",
        "higher_order",
        "inductor",
        "inductor_prims",
        "mkl",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "prim",
        "prims",
        "profiler",
        "quantization",
        "quantized",
        "quantized_decomposed",
        "rngprims",
        "sparse",
        "static_runtime",
        "streams",
        "symm_mem",
        "torch",
        "xnnpack",
    )
)
SAFE = ("_operator", "builtins", "einops", "math", "operator", "torch")  # modules whose functions call none


@dataclass(frozen=True)
class GraphOperators:
    """The operators in a graph, named ``namespace::name``.

    Attributes:
        names: the operators that are in the graph.
        traced_later: whether the graph is one of Dynamo's, from before autograd. The compiled code may then contain
            further operators.
        others: whether the graph is from before autograd and has tensor subclasses or functions that may call further
            operators.
    """

    names: frozenset[str]
    traced_later: bool
    others: bool


Key: TypeAlias = Callable[[GraphOperators], str]
_keys: list[Key] = []


def install_graph_key(key: Key) -> None:
    """Make the string ``key(operators)`` a part of the cache key of every graph that torch compiles from now on.

    ``operators`` has the names of the operators in the graph (:class:`GraphOperators`). An empty string leaves the
    cache key as torch computes it. The call holds for all threads, and only the first call has an effect. Call this
    function before compile caches are read. It is therefore called at each trace of an op after torch has loaded the
    modules of its caches.
    """
    # copyreg holds one function a class, so a second registration would replace the first.
    if _keys:
        return
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
    from torch._inductor.codecache import FxGraphHashDetails

    _keys.append(key)
    # Both caches are keyed separately, and a graph may be found in either of them.
    copyreg.pickle(AOTAutogradCacheDetails, _reduce_key_details)
    copyreg.pickle(FxGraphHashDetails, _reduce_key_details)


def _reduce_key_details(details: Any) -> Any:
    """Return how to pickle ``details``, torch's object from which the key of a cached graph is computed. The result has
    the form of ``__reduce__``.

    It includes the string that the function given to ``install_graph_key`` returns for the graph. If that string is
    empty, ``details`` is pickled as usual. Raise ``PicklingError`` if the function fails, so that torch compiles
    without its caches.
    """
    try:
        text = _keys[0](operators_of(details))
    except Exception as e:  # torch compiles without its caches then, and logs why
        raise pickle.PicklingError(f"Shiplap cannot identify the ops of a graph: {e}") from e
    return (_with_text, (text, vars(details))) if text else object.__reduce_ex__(details, 4)


def _with_text(text: str, details: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return ``(text, details)``.

    Pickled cache keys of graphs with Shiplap's ops refer to this function by name, as the one that would rebuild them.
    They are never unpickled.
    """
    return text, details  # only its name is in a key, which is never unpickled


def operators_of(details: Any) -> GraphOperators:
    """Return the operators in the graph of ``details``, torch's object from which a cache key is computed. The result
    also says whether the graph was captured before autograd, and whether it calls unknown functions.
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails

    before_autograd = isinstance(details, AOTAutogradCacheDetails)
    names: set[str] = set()
    others = before_autograd and any(map(_is_subclass, details.example_inputs))
    graphs = [m for m in details.gm.modules() if isinstance(m, GraphModule)] if details.gm is not None else []
    for graph in graphs:
        for target in _called_targets(graph):
            if isinstance(target, torch._ops.OpOverload):
                names.add(target.name())
            elif isinstance(target, torch._ops.OpOverloadPacket):
                names.add(target._qualified_op_name)
            else:
                others = others or (before_autograd and not _is_safe(target))
    return GraphOperators(frozenset(names), before_autograd, others)


def foreign_operators(names: Collection[str]) -> list[str]:
    """Return those operator ``names`` (``namespace::name``) that belong to libraries other than torch, sorted."""
    return sorted(name for name in names if name.partition("::")[0] not in TORCHS_OWN)


def _called_targets(graph: GraphModule) -> Iterator[Any]:
    """Yield the objects that the nodes of a graph call. They are functions, operators among the arguments of a
    function, and the classes of submodules.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function":
            yield node.target
            arguments: list[Any] = []
            torch.fx.node.map_aggregate((node.args, node.kwargs), arguments.append)
            yield from (v for v in arguments if isinstance(v, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)))
        elif node.op == "call_module":
            yield type(graph.get_submodule(node.target))


def _is_subclass(value: Any) -> bool:
    """Return whether a value is a tensor subclass other than a parameter or a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _is_safe(target: Any) -> bool:
    """Return whether a function that a graph calls belongs to Python, torch or another library in ``SAFE``, or is a
    graph itself. Such a function cannot call operators of other libraries.
    """
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, type) and issubclass(target, GraphModule):
        return True
    module = getattr(target, "__module__", None) or ""  # methods of torch that are built in have none
    return not module or (module.partition(".")[0] in SAFE and not module.startswith("torch.distributed"))
