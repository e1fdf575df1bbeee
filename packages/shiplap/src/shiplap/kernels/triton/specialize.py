"""The key of a launch, as the generated C++ computes it, and the cubin for a key.

The key contains no names. ``form_of_key`` returns the signature, the constants and the attributes that Triton's own
binder would have found for it. Both therefore compile, and cache, the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shiplap import dtypes
from shiplap.codegen.launcher import Cubin, KernelLaunch, KernelParameter, parse_fact
from shiplap.declare.dim_expression import Expr
from shiplap.declare.values import EnvValue
from shiplap.errors import error
from shiplap.torch_private.triton_internals import triton_attributes, use_torch_assembler

Key: TypeAlias = tuple[int, ...]
Path: TypeAlias = tuple[int]
_TRITON = {
    "bool": "u1",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2fnuz": "fp8e5b16",
}


class LaunchNumbers(dict[str, Any]):
    """A dict from the names in a launch's expressions to their values. The names are sizes and scalars of a call,
    properties of its tensors such as strides, and compile-time values.
    """

    def __init__(self, env: Mapping[str, EnvValue], tensors: Mapping[str, Tensor | None]) -> None:
        """Set the sizes and scalars ``env`` of a call, and its tensors by name, from which facts are computed."""
        super().__init__(env)
        self.tensors = tensors

    def __missing__(self, name: str) -> int:
        """Return the fact ``name`` of a tensor, such as ``stride_x_1`` or ``numel_x``. It is 0 if the tensor or the
        axis is absent. Raise ``KeyError`` for any other name.
        """
        fact = parse_fact(name)
        if fact is None:
            raise KeyError(name)
        kind, tensor, axis = fact
        value = self.tensors[tensor]
        if value is None:
            return 0
        if kind == "numel":
            return value.numel()
        # A variadic tensor may have fewer axes than the expression names.
        if axis >= value.dim():
            return 0
        return value.shape[axis] if kind == "size" else kernel_strides(value)[axis]


def kernel_strides(tensor: Tensor) -> Sequence[int]:
    """Return the strides of a tensor as kernels get them. For a contiguous tensor they are computed from the shape,
    since torch leaves the strides of dims of size 0 or 1 arbitrary.
    """
    if not tensor.is_contiguous():
        return tensor.stride()
    steps = [1] * tensor.dim()
    for axis in range(tensor.dim() - 2, -1, -1):
        steps[axis] = steps[axis + 1] * max(1, tensor.shape[axis + 1])
    return steps


def with_constants(launch: KernelLaunch, numbers: LaunchNumbers, config: Mapping[str, Any]) -> LaunchNumbers:
    """Return a copy of ``numbers``, the sizes and scalars of a call by name, with the compile-time values of this
    launch added. These are the values of ``config``, fixed ones and ones computed from sizes.
    """
    own = LaunchNumbers({**numbers, **config}, numbers.tensors)
    for p in launch.parameters:
        if p.kind == "constant" and isinstance(p.value, int):
            own[p.name] = int(p.value)
    # Computed values may use the constants, so they come second.
    for p in launch.parameters:
        if p.kind == "computed":
            own[p.name] = _whole_number(p.expr, own)
    return own


def specialization_key(
    launch: KernelLaunch, numbers: LaunchNumbers, config: Mapping[str, Any], workspace: int = 0
) -> Key:
    """Return the key for which a launch is compiled, as integers. It consists of the values of ``config`` and, for each
    argument, the properties on which Triton specialises.

    ``workspace`` is the address of the scratch memory. By default it is 0, which counts as aligned.
    """
    own = with_constants(launch, numbers, config)
    return (*(int(v) for v in config.values()), *_key_entries(launch, own, workspace))


def _key_entries(launch: KernelLaunch, own: LaunchNumbers, workspace: int) -> Iterator[int]:
    """Yield the properties of each parameter on which Triton specialises a launch, as integers. They are values,
    alignments and dtypes. ``own`` has the numbers of the launch, and ``workspace`` is the address of the scratch
    memory.
    """
    for p in launch.parameters:
        match p.kind:
            case "computed":
                yield own[p.name]
            case "tensor":
                yield _tensor_key_entry(p, own.tensors[p.source])
            case "scratch":
                yield int(p.specialises and p.aligns and (workspace + _whole_number(p.expr, own)) % 16 == 0)
            case "integer":
                yield _integer_key_entry(p, _whole_number(p.expr, own))


def _tensor_key_entry(p: KernelParameter, tensor: Tensor | None) -> int:
    """Return the dtype of ``tensor`` and whether its address is a multiple of 16, packed into one integer. Return -1 if
    the tensor is None. Raise ``SL214`` if DLPack has no code for the dtype.
    """
    if tensor is None:
        return -1
    code, bits, lanes = dtypes.of(tensor.dtype, p.name).dlpack
    aligned = p.specialises and p.aligns and tensor.data_ptr() % 16 == 0
    # The same packing as in the generated C++, which computes the key of a call.
    return (code << 16 | bits << 8 | lanes) << 1 | int(aligned)


def _integer_key_entry(p: KernelParameter, value: int) -> int:
    """Return the properties of the integer ``value`` on which Triton specialises, packed into one integer. It is 1 if
    the value is 1, 16 if it is a multiple of 16, and otherwise 0. A value that needs 64 bits adds 32.
    """
    # An annotated type fixes the width.
    width = 0 if p.type or -(2**31) <= value < 2**31 else 32
    if p.specialises and value == 1:
        return 1 + width
    return (16 if p.specialises and p.aligns and value % 16 == 0 else 0) + width


def _whole_number(expr: Expr | None, numbers: LaunchNumbers) -> int:
    """Return the value of ``expr`` for the values ``numbers`` of its names, as an int."""
    assert expr is not None
    return int(expr(numbers))


# --- from a key to a cubin --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecializedForm:
    """The input of Triton's compiler.

    Attributes:
        signature: the type of each parameter by name.
        constants: the constant parameters by position.
        attributes: the attributes of parameters, such as divisibility by 16, by position.
        options: the options of the compiler.
    """

    signature: dict[str, str]
    constants: dict[Path, object]
    attributes: dict[Path, list[list[object]]]
    options: dict[str, object]


def form_of_key(
    launch: KernelLaunch, key: Sequence[int], configs: Sequence[str], options: Mapping[str, object]
) -> SpecializedForm:
    """Return the input of Triton's compiler for which ``key`` stands, namely types, constants, attributes and options.
    ``key`` holds the integers of :func:`specialization_key`. ``configs`` are the names whose values come first in the
    key.
    """
    entries = iter(key)
    config = {name: next(entries) for name in configs}
    form = SpecializedForm({}, {}, {}, {**options, **{k: v for k, v in config.items() if k in _OPTIONS}})
    for i, p in enumerate(launch.parameters):
        kind, value, aligned = _read_key_entry(p, entries, config)
        form.signature[p.name] = kind
        if kind == "constexpr":
            form.constants[(i,)] = value
        if aligned is not None:
            form.attributes[(i,)] = [["tt.divisibility", 16]] if aligned else []
    return form


_OPTIONS = ("num_warps", "num_stages", "maxnreg")


def _read_key_entry(
    p: KernelParameter, entries: Iterator[int], config: Mapping[str, int]
) -> tuple[str, object, bool | None]:
    """Return the Triton type of the parameter ``p``, its value, and whether it is a multiple of 16. The value is None
    unless the parameter is compiled as a constant. The last item is None if Triton does not specialise on it.
    ``entries`` iterates over the integers of a key and advances.
    """
    match p.kind:
        case "constant":
            return "constexpr", p.value, False
        case "config":
            return "constexpr", config[p.name], False
        case "computed":
            return "constexpr", next(entries), False
        case "tensor":
            entry = next(entries)
            # Triton compiles an absent tensor as the constant None.
            if entry < 0:
                return "constexpr", None, False
            return f"*{_packed_element(entry >> 1, p)}", None, bool(entry & 1) if p.specialises else None
        case "scratch":
            aligned = bool(next(entries))
            return f"*{_TRITON[p.source]}", None, aligned if p.specialises else None
        case "integer":
            entry = next(entries)
            # Triton compiles an integer that is 1 as a constant, unless the type of the parameter is fixed.
            if entry & 1:
                return (p.type, None, None) if p.type else ("constexpr", 1, False)
            type = p.type or ("i64" if entry & 32 else "i32")
            return type, None, bool(entry & 16) if p.specialises else None
        case "boolean":
            return p.type or "u1", None, None
    return p.type or "fp32", None, None


def _packed_element(packed: int, p: KernelParameter) -> str:
    """Return Triton's name of the dtype in the packed integer of a key, such as ``fp16``. Raise ``SL619`` if Triton
    lacks the dtype.
    """
    dlpack = packed >> 16, packed >> 8 & 255, packed & 255
    name = next((row.name for row in dtypes.DTYPES.values() if row.dlpack == dlpack), "")
    if name not in _TRITON:
        raise error("SL619", where=p.name, got=f"a tensor of {name or dlpack}", expected=f"one of {', '.join(_TRITON)}")
    return _TRITON[name]


def compile_form(kernel: Any, form: SpecializedForm, number: int, key: Key, architecture: int) -> Cubin:
    """Return the compiled GPU kernel (cubin) of ``form`` for this architecture, from Triton's compiler or its cache. A
    form holds the types, constants and options of a launch's arguments. The cubin is labelled with ``number``, that of
    the launch, and ``key``, the form as integers. No GPU is needed.

    Raise ``SL619`` if the kernel needs something that a launcher does not provide. Errors of Triton's compiler are
    passed on.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    use_torch_assembler()
    # A warp of a CUDA device has 32 threads, which is the last argument here and a factor below.
    target = GPUTarget("cuda", architecture, 32)
    told = triton_attributes(kernel, make_backend(target), form.signature, form.constants, form.attributes)
    source = ASTSource(kernel, form.signature, form.constants, told)
    compiled = triton.compile(source, target=target, options=compile_options(kernel, form))
    facts = compiled.metadata
    if needed := why_form_unfit(facts):
        raise error(
            "SL619",
            where=f"Triton kernel {facts.name}",
            got=f"it needs {needed}",
            expected="a kernel that one plain launch runs",
            fix="write a Python function that launches it as kernel[grid](...), and bind that function",
        )
    return Cubin(number, architecture, key, compiled.asm["cubin"], facts.name, 32 * facts.num_warps, facts.shared)


def compile_options(kernel: Any, form: SpecializedForm) -> dict[str, object]:
    """Return the options for Triton's compiler, which are ``form.options`` and ``debug``. The latter is true if the
    kernel or Triton's settings ask for assertions on the device.
    """
    import triton

    return {"debug": bool(kernel.debug or triton.knobs.runtime.debug), **form.options}


def why_form_unfit(metadata: Any) -> str:
    """Return the feature, such as clusters, that a compiled kernel needs and the generated launcher lacks. ``metadata``
    is Triton's description of the kernel. Return an empty string if there is none.
    """
    facts = metadata._asdict()
    if facts["num_ctas"] != 1:
        return "clusters of blocks"
    if facts.get("global_scratch_size") or facts.get("profile_scratch_size"):
        return "scratch memory of Triton's"
    if facts.get("launch_cooperative_grid") or facts.get("launch_pdl"):
        return "a cooperative or dependent launch"
    return ""


def device_architecture(device: torch.device) -> int:
    """Return the architecture of a CUDA device as an integer, such as 90 for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
