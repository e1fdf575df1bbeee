"""``OpSpec`` → C++ source of a tvm-ffi function: the native binding's checks around one C ABI call, on DLPack views.

There is no Python to hand a call over to: what the kernel does not take is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shiplap.codegen.environment import render
from shiplap.codegen.expression import quote
from shiplap.codegen.native import SCALAR, Native, describe, dtype_mask
from shiplap.op.schema import schema

__all__ = ["tvm_ffi_source"]


def tvm_ffi_source(op: Native, library: Path) -> str:
    """One translation unit that exports ``op`` and ``set_num_threads``; SL404 for what C++ cannot check."""
    signature = schema(op.spec)
    return render(
        "tvm_ffi.cpp.jinja",
        op=describe(op, "op"),
        scalar_types=SCALAR,
        library=quote(str(library)),
        signature=signature,
        quoted_signature=quote(signature),
        narrowed=list(_narrowed(op)),
    )


def _narrowed(op: Native) -> Iterable[str]:
    """Checks of what the kernel asks beyond the declaration: its own dtypes, tensors that lie contiguous, aligned."""
    for arg in op.spec.tensors:
        assert arg.tensor is not None
        given = f"if (t_{arg.name}) " if arg.optional else ""
        if op.dtypes and not arg.tensor.concrete:
            yield f"{given}about_{arg.name}.dtype(t_{arg.name}.dtype(), {dtype_mask(op.dtypes)});"
        if arg.name not in op.strided and not arg.contiguous:
            yield f"{given}about_{arg.name}.contiguous(t_{arg.name});"
        if op.align > 1:
            yield f"{given}about_{arg.name}.aligned(t_{arg.name}, {op.align});"
    for out in op.spec.outputs if op.align > 1 else ():
        yield f"about_out_{out.name}.aligned(o_{out.name}, {op.align});"
