"""The C++ source of a tvm-ffi function for an ``OpSpec``. It has the native binding's checks around one C ABI call.

The function works on DLPack views. There is no Python fallback, so a call that the kernel does not support is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from shiplap.codegen.environment import render_source
from shiplap.codegen.native import SCALAR, NativeOp, describe_op
from shiplap.codegen.plan import step_statements
from shiplap.declare.cpp_expression import quote_cpp
from shiplap.declare.schema import schema_text
from shiplap.declare.spec import OpSpec
from shiplap.plan import CallPlan
from shiplap.plan.build import dtype_step, steps_around
from shiplap.plan.expression import TensorPlace
from shiplap.plan.rules import dtype_is_among, is_aligned, is_contiguous, is_on_cpu
from shiplap.plan.steps import CheckStep, Step


def tvm_ffi_source(op: NativeOp, library: Path) -> str:
    """Return the C++ source code of a file that exports ``op`` and ``set_num_threads`` as tvm-ffi functions. Its code
    calls the kernel in the shared library ``library``. Raise ``SL404`` if C++ cannot express the checks.
    """
    signature = schema_text(op.spec)
    return render_source(
        "tvm_ffi.cpp.jinja",
        op=describe_op(op, "op"),
        scalar_types=SCALAR,
        library_path=quote_cpp(str(library)),
        signature=signature,
        quoted_signature=quote_cpp(signature),
        narrowed=step_statements(
            narrowed_steps(op.spec, op.symbol, dtypes=op.dtypes, strided=op.strided, align=op.align)
        ),
        disjoint=step_statements(CallPlan(op.spec).outputs.disjoint_outputs),
    )


def narrowed_steps(
    spec: OpSpec, symbol: str, *, dtypes: tuple[str, ...], strided: Collection[str], align: int
) -> Iterable[Step]:
    """Yield the steps that check in a call what the C kernel ``symbol`` requires in addition to the declaration
    ``spec``.

    If ``dtypes`` is not empty, the dtypes of dtype classes must be among them. Arguments that are not in ``strided``
    must be contiguous. Addresses must be multiples of ``align`` bytes, and tensors must be on the CPU.
    """
    for arg in spec.tensors:
        assert arg.tensor is not None
        at, steps = TensorPlace(spec.name, arg.name), list[Step]()
        if dtypes and not arg.tensor.concrete:
            steps.append(CheckStep(dtype_is_among(at, f"kernel {symbol}", dtypes)))
        # The native binding copies such a tensor. A tvm-ffi function makes no copies, so it refuses the call.
        if arg.name not in strided and not arg.contiguous:
            steps.append(CheckStep(is_contiguous(at)))
        if align > 1:
            steps.append(CheckStep(is_aligned(at, align)))
        yield from steps_around(arg, at, (dtype_step(at), *steps)) if arg.optional else steps
    for out in spec.outputs if align > 1 else ():
        yield CheckStep(is_aligned(TensorPlace(spec.name, out.name, role="output"), align, output=True))
    yield CheckStep(is_on_cpu(spec.name))
