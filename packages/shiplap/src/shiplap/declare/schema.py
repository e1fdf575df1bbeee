"""The printer of torch schemas and tags from an ``OpSpec``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import EllipsisType

import torch

from shiplap.declare.opaque import opaque_schema_name
from shiplap.declare.spec import Arg, OpSpec, Return
from shiplap.declare.values import Value
from shiplap.dtypes import DTYPES

BELOW_AUTOGRAD = "raw"  # the overload below autograd
_NUMBERS: dict[object, int] = {  # which torch's schemas write
    torch.strided: 0,
    torch.sparse_coo: 1,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
WRITES = "writes"  # the overload that writes, of an op that returns what it wrote to

_TYPES = {
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "list[int]": "SymInt[]",
    "list[float]": "float[]",
    "list[bool]": "bool[]",
    "complex": "complex",
    "Scalar": "Scalar",
    "dtype": "ScalarType",
    "device": "Device",
    "layout": "Layout",
    "memory_format": "MemoryFormat",
    "Generator": "Generator",
    "list[str]": "str[]",
    "list[Scalar]": "Scalar[]",
}


def overload_below_autograd(name: str, part: str = BELOW_AUTOGRAD) -> str:
    """Return the torch name of an internal overload of the op ``name``, such as ``mylib::f.raw`` for ``part="raw"``. If
    ``name`` ends in an overload, it is ``mylib::f.double_raw``. By default, it is the overload that runs kernels
    without recording gradients.
    """
    return f"{name}_{part}" if "." in name else f"{name}.{part}"


def schema_text(spec: OpSpec, name: str = "") -> str:
    """Return the torch schema that kernels of the op ``spec`` implement, such as ``name(Tensor x, Tensor(a!) table,
    SymInt k=3, *, float eps=1e-05) -> (Tensor, Tensor)``.

    ``name`` is the text before the parentheses. If it is empty, it is the op's name without the namespace. An op that
    returns arguments has two schemas. This one is for the op that writes to the arguments. It returns only the results
    that are no arguments.
    """
    made = [_result_schema(r, {}) for r in spec.made] if spec.traced else ["Tensor"] * len(spec.outputs)
    return _format_schema(spec, name, _alias_letters(spec, spec.mutated), made)


def public_schema(spec: OpSpec, name: str = "") -> str:
    """Return the torch schema of the op ``spec`` with all its results. Results that are arguments are among them, as in
    ``name(Tensor(a!) x) -> Tensor(a!)``.

    ``name`` is the text before the parentheses. If it is empty, it is the op's name without the namespace.
    """
    if not spec.returns:
        return schema_text(spec, name)
    letters = _alias_letters(spec, {*spec.mutated, *(r.alias for r in spec.returns)})
    return _format_schema(spec, name, letters, [_result_schema(r, letters) for r in spec.returns])


def gradient_schema(spec: OpSpec, name: str) -> str:
    """Return the torch schema of the helper op ``name`` that computes the gradients of one recorded call. It takes the
    arguments, then the results, their gradients, a flag for each argument that needs a gradient, and shapes. It returns
    an optional gradient for each tensor argument.
    """
    optional = {True: "?", False: ""}
    args = [
        f"{_schema_type(a, 'Tensor')}{optional[a.optional or a.tensor is not None]} a{i}"
        for i, a in enumerate(spec.args)
    ]
    returns = ", ".join(["Tensor?"] * len(spec.tensors))
    rest = "Tensor?[] results, Tensor[] gradients, bool[] needs, int[] shapes"
    return f"{name}({', '.join([*args, rest])}) -> {f'({returns})' if len(spec.tensors) > 1 else returns}"


def _alias_letters(spec: OpSpec, shared: Collection[str]) -> dict[str, str]:
    """Return a dict from each argument in ``shared`` to its alias annotation in the schema. Such an argument is a
    result, or a result is a view of it. The annotation is ``a``, ``b!`` for an argument that is written to, or ``c ->
    *`` if a list of its views is returned.
    """
    lists = {r.alias for r in spec.returns if r.many}
    named = [a for a in spec.args if a.name in shared]
    spread = {a.name: " -> *" if a.name in lists and not (a.mutated or a.many) else "" for a in named}
    return {a.name: _alias_letter(i) + "!" * a.mutated + spread[a.name] for i, a in enumerate(named)}


def _alias_letter(index: int) -> str:
    """Return the name of the alias set number ``index``. The names are ``a`` to ``z``, then ``a26`` and so on."""
    return chr(ord("a") + index) if index < 26 else f"a{index}"


def _format_schema(spec: OpSpec, name: str, letters: Mapping[str, str], returns: Sequence[str]) -> str:
    """Return the text of a schema from the op's arguments and the types ``returns``. ``letters`` holds alias
    annotations, such as ``a!``, by argument name. If ``name`` is empty, the op's name without the namespace takes its
    place.
    """
    parts: list[str] = []
    for arg in spec.args:
        if arg.keyword_only and "*" not in parts:
            parts.append("*")
        parts.append(_argument_schema(arg, letters))
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"{name or spec.opname}({', '.join(parts)}) -> {result}"


def _result_schema(result: Return, letters: Mapping[str, str]) -> str:
    """Return the schema type of one result. ``letters`` holds the alias annotation, such as ``a!``, of each argument
    that a result is or views.
    """
    if result.alias:
        alias = letters[result.alias].partition(" ")[0]
        return f"Tensor({alias})" + "[]" * result.many
    return _schema_type(result.arg, "Tensor") + "?" * result.optional


def _schema_type(arg: Arg, tensor: str) -> str:
    """Return the schema type of an argument or a result, without the ``?`` of an optional one. ``tensor`` is the text
    for a tensor, such as ``Tensor`` or ``Tensor(a!)``.
    """
    size = str(arg.length or "")
    if arg.tensor is not None:
        return tensor + ("?" * arg.absent + f"[{size}]" if arg.many else "")
    kind = _TYPES[str(arg.scalar)] if arg.cls is None else opaque_schema_name(arg.cls, f"argument {arg.name!r}")
    kind = kind.replace("SymInt", "int") if arg.specialized else kind
    return kind.replace("[]", f"[{size}]")


def _argument_schema(arg: Arg, letters: Mapping[str, str]) -> str:
    """Return the schema text of one argument with its type, name and default. ``letters`` holds the alias annotations,
    such as ``a!``, by argument name.
    """
    kind = _schema_type(arg, f"Tensor({letters[arg.name]})" if arg.name in letters else "Tensor")
    optional = "?" if arg.optional else ""
    default = f"={_default_literal(arg.default)}" if arg.has_default else ""
    return f"{kind}{optional} {arg.name}{default}"


def _default_literal(value: Value | EllipsisType) -> str:
    """Return a default value in the syntax of torch's schemas, such as ``[1, 2]``. torch's own types, such as dtypes,
    are written as numbers.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_default_literal(v) for v in value)}]"
    if isinstance(value, torch.dtype):
        # The language of schemas writes a dtype as its number.
        return str(DTYPES[str(value).removeprefix("torch.")].number)
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(_NUMBERS[value])
    text = str(value) if isinstance(value, torch.device) else value
    return json.dumps(text, ensure_ascii=False) if isinstance(text, str) else repr(text)


def has_default_literal(value: object) -> bool:
    """Return whether torch's schema parser has a literal for this default, which is a dtype, device, layout or memory
    format.
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.") in DTYPES
    return isinstance(value, torch.device) or value in _NUMBERS


def dispatcher_tags(spec: OpSpec) -> tuple[torch.Tag, ...]:
    """Return the torch tags of the op. They are the declared ones, and those for strides that must be kept, for
    data-dependent sizes and for random results, where the op has these properties.
    """
    chosen = [torch.Tag.pt2_compliant_tag, *spec.tags]
    if any(a.contiguous or a.mutated for a in spec.args):
        chosen.append(torch.Tag.needs_exact_strides)
    if spec.dynamic:
        chosen += [torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe]
    if spec.draws:
        chosen.append(torch.Tag.nondeterministic_seeded)  # two calls are not one, and none is made again
    return tuple(dict.fromkeys(chosen))
