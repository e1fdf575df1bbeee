"""The reader of the return annotation of a declaration. It returns the outputs and results of the op.

Most ops return new tensors whose sizes the declaration determines. These are their ``outputs``. Results of any other
kind are ``Return`` values. They are arguments that were written to, views, lists of tensors, tensors that may be
absent, and scalars.
"""

from __future__ import annotations

import inspect
import keyword
import typing
from collections.abc import Iterable, Sequence

from shiplap.declare.annotation import read_argument
from shiplap.declare.spec import Arg, Output, Return
from shiplap.errors import ShiplapError, error


def is_schema_name(name: str) -> bool:
    """Return whether ``name`` can be used in a torch schema and in generated code. It must be an ASCII identifier that
    is no keyword of Python.
    """
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def read_results(
    name: str,
    args: Sequence[Arg],
    annotation: object,
    names: Sequence[str],
    aliases: str | Iterable[str | None],
    fake: str,
) -> tuple[tuple[Output, ...], tuple[Return, ...], bool]:
    """Return ``(outputs, returns, traced)`` of an op's declaration from its return annotation.

    ``outputs`` are the new tensors of declared sizes. ``returns`` holds all results if one of them is no such tensor,
    and otherwise it is empty. ``traced`` is true if only a run of the reference determines the results. ``aliases``
    names, for each result, the argument that the result is or views, or None. ``names`` are the names of the results.
    ``fake`` is ``"declared"`` or ``"reference"``. Raise ``SL109`` or ``SL130`` for results that cannot be returned.
    """
    where = f"{name}, return"
    if fake not in ("declared", "reference"):
        fix = "write fake='declared' or fake='reference'"
        raise error("SL109", where=name, got=f"fake={fake!r}", expected="'declared' or 'reference'", fix=fix)
    parts = _result_annotations(where, annotation, any(a.mutated for a in args))
    shared = _read_aliases(where, args, aliases, len(parts))
    returns = _read_returns(where, parts, shared, _result_names(where, args, names, shared))
    made = [r for r in returns if not r.alias]
    # Without a required tensor, no argument decides the device of the outputs.
    placed = any(a.tensor is not None and not a.optional for a in args)
    special = any(r.tensor is None or r.many or r.optional for r in made)
    traced = fake == "reference" or special or not placed
    outputs = () if traced else tuple(Output(r.name, r.tensor) for r in made if r.tensor is not None)
    return outputs, returns if traced or any(shared) else (), traced


def is_single_tuple(annotation: object) -> bool:
    """Return whether a return annotation is a tuple of one element, such as ``tuple[A]``."""
    args = typing.get_args(annotation)
    return typing.get_origin(annotation) is tuple and len(args) == 1


def _result_annotations(where: str, annotation: object, writes: bool) -> tuple[object, ...]:
    """Return the annotation of each result, such as A and B for ``tuple[A, B]``. For the annotation None there are no
    results.

    If ``writes`` is true, the op writes to an argument, and None is allowed. Otherwise raise ``SL109`` for None.
    """
    if annotation is None or annotation is type(None):
        if not writes:
            raise error("SL109", where=where, got="None", expected="a result, or mutates=(...)")
        return ()
    args = typing.get_args(annotation)
    # ``tuple[A, ...]`` does not determine the number of results.
    parts = args if typing.get_origin(annotation) is tuple and args and args[-1] is not ... else (annotation,)
    return tuple(parts)


def _read_aliases(where: str, args: Sequence[Arg], given: str | Iterable[str | None], count: int) -> tuple[str, ...]:
    """Return for each of ``count`` results the name of the argument that it is or views, or an empty string for a new
    tensor. ``given`` is the value of ``aliases=``. Raise ``SL130`` if it does not fit the arguments or the number of
    results.
    """
    aliases = (given,) if isinstance(given, str) else tuple(given)
    if not aliases:
        return ("",) * count
    tensors = [a.name for a in args if a.tensor is not None]
    if len(aliases) != count:
        got, expected = f"{len(aliases)} entries in aliases=", f"{count}, one for each result"
        raise error("SL130", where=where, got=got, expected=expected)
    for alias in aliases:
        if alias and alias not in tensors:
            expected = f"None, or one of {', '.join(tensors)}"
            raise error("SL130", where=where, got=f"aliases={alias!r}", expected=expected)
    return tuple(alias or "" for alias in aliases)


def _result_names(where: str, args: Sequence[Arg], given: Sequence[str], shared: Sequence[str]) -> list[str]:
    """Return a name for each result. A result that is or views an argument has the name of that argument, which is in
    ``shared``. The names of all other results are those in ``given``, the value of ``outputs=``.

    If ``given`` is empty, the names are ``out``, or ``out0``, ``out1`` and so on. Raise ``SL109`` if ``given`` has too
    few or too many names, or a name that is taken or invalid.
    """
    fresh = sum(not s for s in shared)
    names = list(given) or (["out"] if fresh == 1 else [f"out{i}" for i in range(fresh)])
    if len(names) != fresh:
        fix = "give outputs= one name for each new tensor that the op returns"
        raise error("SL109", where=where, got=f"{len(names)} names in outputs=", expected=f"{fresh} names", fix=fix)
    used = {a.name for a in args} | {"workspace"}  # keywords of kernels
    taken = [n for i, n in enumerate(names) if n in names[:i] or n in used or not is_schema_name(n)]
    if taken:
        raise error(
            "SL109",
            where=where,
            got=f"output name {taken[0]!r}",
            expected="new names of ASCII letters, none an argument's, nor workspace",
            fix='give outputs=("name", ...)',
        )
    rest = iter(names)
    return [s or next(rest) for s in shared]


def _read_result(name: str, annotation: object, where: str) -> Arg:
    """Return a result as an ``Arg`` with the same name and annotation. Raise ``SL109`` if no schema can return it."""
    try:
        return read_argument(name, annotation, where)
    except ShiplapError as e:
        if e.id != "SL103":
            raise
        shown = "no annotation" if annotation is inspect.Parameter.empty else e.got
        raise error("SL109", where=where, got=shown, expected=_EXPECTED, fix=_ANNOTATE_RESULT) from None


_ANNOTATE_RESULT = (
    'return one tensor and write -> Float[Tensor, "n m"], return a tuple of tensors and write -> tuple[Float[Tensor, '
    '"n"], Float[Tensor, "m"]], or return nothing and write -> None with mutates= if the op only writes to arguments'
)
_EXPECTED = (
    "jaxtyping tensors, lists of them, int, float, bool, str or another scalar of torch's schemas, or one | None"
)


def _read_returns(
    where: str, parts: Sequence[object], shared: Sequence[str], names: Sequence[str]
) -> tuple[Return, ...]:
    """Return the results declared by the annotations ``parts``, in order. ``shared`` holds for each the argument that
    it is or views, or an empty string, and ``names`` holds their names. Raise ``SL109`` for an annotation that cannot
    be returned, and ``SL130`` for an alias that is no tensor.
    """
    returns = []
    for name, part, alias in zip(names, parts, shared, strict=True):
        at = f"{where} {name!r}"
        arg = _read_result(name, part, where)
        if arg.cls is not None:
            raise error("SL109", where=where, got=arg.kind, expected=_EXPECTED, fix="return its fields")
        if arg.choices:
            raise error("SL109", where=where, got=str(part), expected=_EXPECTED, fix=f"annotate {arg.scalar}")
        if arg.absent or arg.length or (arg.optional and (arg.many or alias)):
            expected = "tensors or scalars, lists of them without None, or one that may be None"
            raise error("SL109", where=where, got=str(part), expected=expected, fix="return an empty list, or a tuple")
        if alias and arg.tensor is None:
            raise error("SL130", where=at, got=str(part), expected="a tensor, which an argument can be")
        returns.append(Return(name, arg.tensor, arg.scalar, arg.many, arg.optional, alias))
    return tuple(returns)
