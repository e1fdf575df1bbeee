"""The reader of jaxtyping annotations and plain scalars. It returns ``TensorType`` and ``Arg`` objects."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Sequence
from operator import getitem
from typing import TypeGuard

import numpy as np
import torch
from jaxtyping import AbstractArray

from shiplap.declare.choices import read_choices
from shiplap.declare.dim_expression import Expr
from shiplap.declare.opaque import opaque_schema_name
from shiplap.declare.spec import Arg, Dim, ScalarKind, TensorType
from shiplap.declare.values import Opaque
from shiplap.errors import error

# The scalar types for which torch's schemas have a name.
SCALAR_ANNOTATIONS: dict[object, ScalarKind] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    complex: "complex",
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.Generator: "Generator",
}
# The element types of lists that torch's schemas have.
LIST_ANNOTATIONS: dict[object, ScalarKind] = {
    int: "list[int]",
    float: "list[float]",
    bool: "list[bool]",
    str: "list[str]",
}
_NUMBER = ({int, float}, {int, float, complex}, {int, float, bool}, {int, float, bool, complex})  # torch's Scalar


def is_tensor(annotation: object) -> TypeGuard[type[AbstractArray]]:
    """Return whether ``annotation`` is a jaxtyping annotation of a torch tensor, such as ``Float[Tensor, "n"]``."""
    if not (isinstance(annotation, type) and issubclass(annotation, AbstractArray)):
        return False
    return annotation.array_type is torch.Tensor


def read_tensor(annotation: type[AbstractArray], where: str) -> TensorType:
    """Return the dtypes and dims of an annotation such as ``Float[Tensor, "n ci"]`` as a ``TensorType``. Raise
    ``SL105`` if the dims cannot be read.
    """
    tokens = annotation.dim_str.split()
    # jaxtyping separates dims by blanks, so that "n + 1" arrives as three tokens.
    if len(tokens) > 1 and any(not t.isidentifier() and _is_expression_part(t) for t in tokens):
        fix = f"write each dim without blanks, such as {''.join(tokens)!r} for one dim"
        expected = "dims that are separated by blanks, each a name, a number or an expression"
        raise error("SL105", where=where, got=repr(annotation.dim_str), expected=expected, fix=fix)
    dims = tuple(_read_dim_token(token, where) for token in tokens)
    if sum(d.kind == "variadic" for d in dims) > 1:
        raise error("SL105", where=where, got=annotation.dim_str, expected="at most one variadic dim")
    kind = annotation.dtype if isinstance(annotation.dtype, type) else type(annotation.dtype)
    return TensorType(kind.__name__, tensor_dtypes(annotation), dims)


def _is_expression_part(token: str) -> bool:
    """Return whether ``token`` is a fragment of an expression that was written with blanks, such as ``+`` of ``n + 1``.
    A fragment begins or ends with an operator or a bracket, or has unbalanced brackets.

    ``token`` is one of the strings that blanks separate in a jaxtyping annotation. A prefix such as ``*`` of ``*batch``
    is no operator.
    """
    if token in ("...", "_") or (token[0] in "#?*_" and token[1:].isidentifier()):
        return False
    return token[0] in "+-/%*,)" or token[-1] in "+-/%*,(" or token.count("(") != token.count(")")


def tensor_dtypes(annotation: type[AbstractArray]) -> tuple[str, ...]:
    """Return the names of the torch dtypes that a jaxtyping annotation admits, in the order of the annotation. The
    tuple is empty for an annotation that admits every dtype (``Shaped``).
    """
    names = annotation.dtypes if isinstance(annotation.dtypes, (tuple, list)) else ()
    return tuple(n for n in names if isinstance(n, str) and isinstance(getattr(torch, n, None), torch.dtype))


def read_tensors(annotation: object, where: str) -> TensorType | None:
    """Return one ``TensorType`` for a tensor annotation or for a union such as ``Float[Tensor, "n"] | Int32[Tensor,
    "n"]``. It has the dtypes of all members of the union. Return None for any other annotation.

    Raise ``SL105`` if the members of a union have different dims.
    """
    if is_tensor(annotation):
        return read_tensor(annotation, where)
    members = typing.get_args(annotation) if _is_union_annotation(annotation) else ()
    if not members or not all(map(is_tensor, members)):
        return None
    kinds = [read_tensor(m, where) for m in members]
    if len({k.dims for k in kinds}) > 1:
        got = ", ".join(map(str, kinds))
        raise error("SL105", where=where, got=got, expected="one shape for all dtypes", fix="give each the same dims")
    # No dtypes stand for all, so a union with such a type admits all as well.
    names = dict.fromkeys(n for k in kinds for n in k.dtypes) if all(k.dtypes for k in kinds) else {}
    return TensorType("_or_".join(k.dtype_class for k in kinds), tuple(names), kinds[0].dims)


def _is_union_annotation(annotation: object) -> bool:
    """Return whether ``annotation`` is a union, written as ``A | B``, ``Union[A, B]`` or ``Optional[A]``."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _read_dim_token(token: str, where: str) -> Dim:
    """Return one dim of a jaxtyping annotation as a ``Dim``. It may be a name, a number, ``*name`` or ``...`` (any
    number of dims), ``#name`` (1 or the size ``name``), an expression, or ``_`` for any size. Raise ``SL105``, with
    ``where`` as the place, for any other string.
    """
    if token == "...":
        return Dim("variadic", token)
    if token.startswith("*_"):
        return Dim("variadic", "...")
    if token.startswith("*") and token[1:].isidentifier():
        return Dim("variadic", token[1:])
    if token.startswith("_"):
        return Dim("any", token)
    name, equals, value = token.partition("=")
    if equals and name.isidentifier() and value.isdigit():  # jaxtyping's documented size, "rows=4"
        token = value
    if token.isdigit():
        return Dim("fixed", token, int(token))
    if token.isidentifier():
        return Dim("name", token)
    if token[0] == "#" and token[1:].isidentifier() and token[1] != "_":
        return Dim("name", token, of=token[1:])
    if "#" in token:
        fix = "give the size a name, #n; expand what broadcasts over several dims before the call"
        raise error("SL105", where=where, got=token, expected="# and the name of one dim", fix=fix)
    if token[0] in "?{":
        raise error("SL105", where=where, got=token, expected="a name, a number, _, ..., *name or an expression")
    return Dim("expr", token, expr=Expr.parse(token, where))


def read_argument(name: str, annotation: object, where: str) -> Arg:
    """Return the parameter ``name`` of a declared function as an ``Arg``, which is read from its ``annotation``. Raise
    ``SL103``, with ``where`` as the place, for a type that no torch schema has. Raise ``SL105`` for invalid dims of a
    tensor.
    """
    inner, optional = _strip_optional(annotation)
    if (single := read_tensors(inner, where)) is not None:
        return Arg(name, tensor=_with_own_broadcast_dims(name, single), optional=optional)
    element, length = _sequence_element(inner)
    member, absent = _strip_optional(element)
    if (listed := read_tensors(member, where)) is not None:
        if repeated := next((d for d in listed.dims if d.of), None):
            fix = "pass the tensors expanded, or as arguments of their own"
            raise error("SL105", where=where, got=f"{repeated} in a list", expected="one size for all", fix=fix)
        return Arg(name, tensor=listed, many=True, optional=optional, length=length, absent=absent)
    if isinstance(inner, type) and issubclass(inner, Opaque):
        opaque_schema_name(inner, where)
        return Arg(name, scalar="object", optional=optional, cls=inner)
    if (chosen := read_choices(inner)) is not None:
        optional, whole = optional or chosen.optional, chosen.scalar == "int"  # a choice is no size: never a symbol
        arg = Arg(name, scalar=chosen.scalar, optional=optional, specialized=whole)
        return dataclasses.replace(arg, choices=chosen.values, members=chosen.members)
    scalar = _read_scalar_kind(inner, element)
    if scalar is not None:
        return Arg(name, scalar=scalar, optional=optional, length=length)
    fix = _split_advice(inner, optional=optional)
    raise error("SL103", where=where, got=_annotation_text(annotation), expected=_EXPECTED, fix=fix)


def _with_own_broadcast_dims(name: str, kind: TensorType) -> TensorType:
    """Return ``kind``, the type of the argument ``name``, with another name for each dim ``#n`` (of size 1 or ``n``).
    For an argument ``x`` that name is ``x_n``, and ``x_n_2`` for a second dim ``#n``. A type without such dims is
    returned unchanged.
    """
    met: list[str] = []
    dims = []
    for dim in kind.dims:
        met += [dim.of] if dim.of else []
        number = f"_{met.count(dim.of)}" if met.count(dim.of) > 1 else ""
        dims.append(dataclasses.replace(dim, text=f"{name}_{dim.of}{number}") if dim.of else dim)
    return dataclasses.replace(kind, dims=tuple(dims)) if met else kind


def _read_scalar_kind(inner: object, element: object) -> ScalarKind | None:
    """Return the kind of a scalar argument, a string such as ``int`` or ``list[float]``, from its annotation ``inner``.
    If ``inner`` is a list, ``element`` is the annotation of its elements. Return None if ``inner`` is no annotation of
    a scalar.
    """
    if isinstance(inner, type):
        return SCALAR_ANNOTATIONS.get(inner)
    if _is_number_annotation(inner):
        return "Scalar"
    if _is_number_annotation(element):
        return "list[Scalar]"
    return LIST_ANNOTATIONS.get(element) if isinstance(element, type) else None


def _is_number_annotation(annotation: object) -> bool:
    """Return whether ``annotation`` is a union of number types, such as ``int | float``. torch's schemas call the type
    of such an argument ``Scalar``.
    """
    return _is_union_annotation(annotation) and set(typing.get_args(annotation)) in _NUMBER


def _sequence_element(annotation: object) -> tuple[object, int]:
    """Return ``(element type, length)`` of a list, sequence or tuple annotation.

    For any other annotation, the element type is None. The length is 0 unless an annotation such as ``tuple[T, T]``
    fixes it.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if (origin in (list, Sequence) and len(args) == 1) or (origin is tuple and len(args) == 2 and args[1] is ...):
        return args[0], 0
    if origin is tuple and args and all(a == args[0] for a in args):
        return args[0], len(args)
    return None, 0


_EXPECTED = (
    "a jaxtyping tensor or a list of them, int, float, bool, str, complex, int | float, a list of one of these, "
    "torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, a Literal or an Enum of texts or "
    "of ints, a class derived from sl.Opaque, or one of these | None"
)


def _strip_optional(annotation: object) -> tuple[object, bool]:
    """Return ``(annotation, optional)``. For a union of None and other types, return the union without None, and True.
    For any other annotation, return it unchanged, and False.
    """
    if _is_union_annotation(annotation):
        given = typing.get_args(annotation)
        rest = [a for a in given if a is not type(None)]
        if rest and len(rest) + 1 == len(given):
            return getitem(typing.Union, tuple(rest)), True  # a class since Python 3.14
    return annotation, False


def _annotation_text(annotation: object) -> str:
    """Return an annotation as its author writes it, such as ``list[str]``, for the text of an error."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation)


def _split_advice(annotation: object, *, optional: bool) -> str:
    """Return advice on what to write in place of an annotation that cannot be read. Return an empty string if there is
    none. If ``optional`` is true, ``annotation`` stood in a union with None.
    """
    # The order matters, since most cases would also fit the general one at the end.
    if annotation is torch.Tensor:
        return f'say the dtype and dims: Float[Tensor, "n c"]{" | None" * optional}'
    if _sequence_element(annotation)[0] is torch.Tensor:
        return f'say the dtype and dims of the members: list[Float[Tensor, "n c"]]{" | None" * optional}'
    if isinstance(annotation, (bool, int, float, str)):
        kind = type(annotation).__name__
        return f"write the type, and a default behind =, as in {kind} = {annotation!r}"
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        kind, dims = annotation.__name__.partition("[")[0], annotation.dim_str
        return f'write Tensor for the array type: {kind}[Tensor, "{dims}"], and pass torch.from_numpy(array)'
    if annotation in (np.ndarray, list, tuple):
        return 'annotate Float[Tensor, "n c"] and pass tensors, or list[int] / list[float] for numbers'
    if isinstance(annotation, type) and issubclass(annotation, enum.Flag):
        return f"annotate int and pass member.value; the reference may make {annotation.__name__} of it"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return f"give all members of {annotation.__name__} values of one type, str or int"
    if typing.get_origin(annotation) is typing.Literal:
        kinds = {type(value) for value in typing.get_args(annotation)}
        return "annotate bool" if kinds == {bool} else "list texts only, or ints only, in the Literal"
    if read_choices(element := _sequence_element(annotation)[0]) is not None:
        return f"take each {_annotation_text(element)} as an argument of its own, or annotate list[str] or list[int]"
    if fields := _class_field_names(annotation):
        return f"derive the class from sl.Opaque, or pass the fields as separate arguments: {', '.join(fields)}"
    if annotation in (Callable, typing.Callable) or typing.get_origin(annotation) is Callable:
        return "call the function outside the op and pass its result, or declare one op per function"
    if annotation is dict or typing.get_origin(annotation) is dict:
        return "pass the entries as separate arguments, or a list[int] / list[float] in a fixed order"
    if isinstance(annotation, type) and annotation.__module__ not in ("builtins", "typing"):
        return f"derive {annotation.__name__} from sl.Opaque, or pass an object that does and holds one"
    return ""


def _class_field_names(annotation: object) -> list[str]:
    """Return the field names of a dataclass or a named tuple. The list is empty for any other annotation."""
    if dataclasses.is_dataclass(annotation):
        return [field.name for field in dataclasses.fields(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        return list(vars(annotation).get("_fields", ()))
    return []
