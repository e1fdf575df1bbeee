"""Packing of arguments for C kernels. A copy replaces a tensor that is not contiguous or not aligned as needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

from torch import Tensor

from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args
from shiplap.plan.build import steps_around
from shiplap.plan.expression import TensorPlace, argument_variable
from shiplap.plan.python_source import PythonWriter, compile_function
from shiplap.plan.steps import Block, PackStep, Step

Packed = tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]


def packing_steps(spec: OpSpec, strided: Collection[str], align: int, *, native: bool) -> Block:
    """Return the steps that replace tensor arguments by contiguous copies where a kernel needs that.

    A tensor that is not in ``strided`` is replaced if it is not contiguous. Any tensor is replaced if its address is
    not a multiple of ``align`` bytes. If ``native`` is true, the steps are for generated C++. Otherwise they are for
    generated Python, where a further step skips an optional tensor that is None.
    """
    steps: list[Step] = []
    for arg in spec.tensors:
        at = TensorPlace(spec.name, arg.name)
        step = PackStep(at, arg.name in strided, align, arg.mutated)
        # A kernel that takes any strides at any address never needs a copy.
        if align > 1 or not step.strided:
            steps += [step] if native else steps_around(arg, at, (step,))
    return tuple(steps)


def compile_packing(spec: OpSpec, strided: Collection[str], align: int) -> Callable[[Args], Packed]:
    """Return a generated function ``pack(args)``, which returns ``(tensors, copies)``. ``tensors`` is a list of the
    tensor arguments in order, copied where the kernel needs that. ``copies`` holds a pair (original, copy) for each
    copied tensor that is written to.

    A tensor is copied if it is not contiguous and not in ``strided``, or if its address is not a multiple of ``align``
    bytes.
    """
    writer = PythonWriter(careful=False)
    writer.write(packing_steps(spec, strided, align, native=False))
    head = f"def pack(args):\n    {''.join(f'{argument_variable(a)}, ' for a in spec.args)}= args\n    copies = []"
    result = f"    return [{', '.join(map(argument_variable, spec.tensors))}], copies"
    made = compile_function(f"pack {spec.name}", head, [result], writer, {})
    return cast("Callable[[Args], Packed]", made)
