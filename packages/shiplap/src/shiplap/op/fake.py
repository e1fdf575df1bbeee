"""The fake implementation, derived: same checks, same shapes, no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.compat import packages, sizes
from shiplap.errors import error
from shiplap.op import registry
from shiplap.op.binding import Binding, shape_of
from shiplap.op.check import Checker
from shiplap.op.launch import PythonKernel

__all__ = ["make_fake"]


def make_fake(checker: Checker) -> Callable[..., Any]:
    """The function for ``torch.library.register_fake``: outputs are contiguous tensors of the declared sizes.

    A data-dependent dim becomes an unbacked size with its bound asserted in the graph.
    """
    spec = checker.spec

    def fake(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...] | None:
        registry.ensure()
        call = checker.bind(_positional(checker, args, kwargs))
        if packages.packaging():
            _refuse_python(checker.spec.name, call)
        for dim, bound in spec.bounds:
            size = sizes.new_size()
            call.env[dim] = size
            limit = bound(call.env)
            torch._check(
                size <= limit, lambda dim=dim, bound=bound: f"SL302: {spec.name}: {dim} <= {bound} does not hold"
            )
        outs = tuple(
            torch.empty(shape_of(o, call.env), dtype=call.dtype_of(o.tensor), device=call.device) for o in spec.outputs
        )
        return outs[0] if len(outs) == 1 else outs or None

    return fake


def _refuse_python(name: str, call: Binding) -> None:
    """SL307 where the package of a GPU would have to call Python: templates become part of it, native code goes along.

    On a CPU a package may be loaded into this process, where Python serves it.
    """
    op, device = registry.find(name), call.device.type if call.device is not None else ""
    if op is None or device != "cuda" or op.templates.get(device):
        return
    if all(isinstance(k.run, PythonKernel) for k in op.kernels.get(device, ())):
        names = ", ".join(k.name for k in op.kernels.get(device, ())) or "the reference"
        raise error(
            "SL307", where=name, got=f"{names}, launched by Python on {device}", expected="a template or a C ABI kernel"
        )


def _positional(checker: Checker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Schema order from what the dispatcher passes: defaults may be stripped, keyword-only arguments come by name."""
    if not kwargs:
        return args
    rest = checker.spec.args[len(args) :]
    return (*args, *(kwargs.get(a.name, a.default) for a in rest))
