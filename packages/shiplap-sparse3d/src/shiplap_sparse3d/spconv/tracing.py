"""Support for ``torch.fx``, which traces networks of spconv's layers: a sparse tensor is a proxy, a layer is one node.

``symbolic_trace`` passes proxies to layers. A proxy has no voxels, so a layer becomes a ``call_module``, like torch's
own layers, and making a ``SparseConvTensor`` of proxies becomes a ``call_function``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.fx import Proxy

__all__ = ["is_proxy", "one_node", "proxy_among"]


def is_proxy(value: object) -> bool:
    """Return whether ``value`` is a proxy of ``torch.fx``, which a tracer passes in place of a tensor."""
    return isinstance(value, Proxy)


def proxy_among(values: Any) -> Proxy | None:
    """Return the first ``torch.fx`` proxy in ``values`` or in lists and tuples inside it, or None if there is none.
    While a graph is compiled, return None.
    """
    return None if is_compiling() else _proxy_in(values)


def _proxy_in(values: Any) -> Proxy | None:
    """Return the first ``torch.fx`` proxy in ``values`` or, recursively, in lists and tuples inside it. Return None if
    there is none.
    """
    for value in values:
        if isinstance(value, Proxy):
            return value
        if isinstance(value, (list, tuple)) and (inner := _proxy_in(value)) is not None:
            return inner
    return None


def one_node(forward: Callable[..., Any], in_graph: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a method in place of ``forward``, the method of a layer, for which ``torch.fx`` records one node instead
    of tracing into it. While Dynamo compiles, the method calls ``in_graph`` instead of ``forward``, unless ``in_graph``
    is None.

    If a subclass calls this method from its own ``forward``, the tracer enters the subclass, and the node is a call of
    this one method.
    """
    compiled = forward if in_graph is None else in_graph

    @functools.wraps(forward)
    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``forward`` for the layer ``self`` and these arguments. While a graph is compiled,
        return that of ``in_graph`` instead, unless ``in_graph`` is None. Both functions are arguments of the enclosing
        function.

        If an argument is a proxy of ``torch.fx``, return a new node of its graph instead.
        """
        if is_compiling():
            return compiled(self, *args, **kwargs)
        if (proxy := _proxy_in((*args, *kwargs.values()))) is None:
            return forward(self, *args, **kwargs)
        tracer: Any = proxy.tracer
        path = tracer.path_of_module(self)
        # The method of the layer's own class, so the node can be a call of the module.
        if getattr(type(self).forward, "__wrapped__", None) is forward:
            return tracer.create_proxy("call_module", path, args, kwargs)
        # ``call_module`` would call the subclass's own ``forward`` again.
        layer = tracer.create_proxy("get_attr", path, (), {})
        return tracer.create_proxy("call_function", traced, (layer, *args), kwargs)

    return traced
