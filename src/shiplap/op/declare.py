"""A Python function → ``OpSpec``: reads the signature, checks that torch can carry it, relates the sizes."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shiplap.errors import error
from shiplap.op.annotation import is_tensor, read_argument, read_tensor
from shiplap.op.expr import Expr
from shiplap.op.spec import Arg, Dim, OpSpec, Output

__all__ = ["read_spec"]

AUTOCAST_RULES = ("widest", "autocast", "float32", None)


def read_spec(
    name: str,
    fn: Callable[..., Any],
    *,
    dims: Mapping[str, str],
    bounds: Mapping[str, str],
    requires: Iterable[str],
    mutates: Iterable[str],
    contiguous: Iterable[str],
    outputs: Iterable[str],
    autocast: str | None,
) -> OpSpec:
    """The declaration of ``fn`` as data; raises ``DeclarationError`` (SL1xx) for what cannot be declared."""
    namespace, _, opname = name.partition("::")
    if not (namespace.isidentifier() and opname.isidentifier()):
        raise error("SL101", where=f"@sl.op({name!r})", got=name, expected="namespace::name")
    if autocast not in AUTOCAST_RULES:
        raise error("SL112", where=name, got=repr(autocast), expected=", ".join(map(repr, AUTOCAST_RULES)))
    hints = _hints(fn)
    args = tuple(_arguments(name, fn, hints, set(mutates), set(contiguous)))
    outs = tuple(_outputs(name, hints.get("return", inspect.Parameter.empty), tuple(outputs), bool(set(mutates))))
    spec = OpSpec(
        name, args, outs,
        dims=tuple((k, Expr.parse(v, f"{name}, dims[{k!r}]")) for k, v in dims.items()),
        bounds=tuple((k, Expr.parse(v, f"{name}, bounds[{k!r}]")) for k, v in bounds.items()),
        requires=tuple(Expr.parse(v, f"{name}, requires") for v in requires),
        autocast=autocast, doc=inspect.getdoc(fn) or "",
    )  # fmt: skip
    _check(spec)
    return spec


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Evaluated annotations, also under ``from __future__ import annotations`` and for classes local to a function."""
    scope = dict(vars(sys.modules.get(fn.__module__, typing)))
    closure = inspect.getclosurevars(fn)
    return typing.get_type_hints(fn, globalns={**scope, **fn.__globals__}, localns={**closure.nonlocals})


def _arguments(
    name: str, fn: Callable[..., Any], hints: dict[str, Any], mutates: set[str], contiguous: set[str]
) -> Iterable[Arg]:
    parameters = inspect.signature(fn).parameters
    for unknown in (mutates | contiguous) - parameters.keys():
        raise error("SL107", where=name, got=unknown, expected=f"one of {', '.join(parameters)}")
    for p in parameters.values():
        where = f"{name}, argument {p.name!r}"
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise error("SL103", where=where, got=str(p), expected="named arguments", fix="name each argument")
        if p.name not in hints:
            raise error("SL102", where=where, got=str(p), expected="an annotation")
        arg = read_argument(
            p.name, hints[p.name], where,
            default=... if p.default is p.empty else p.default,
            keyword_only=p.kind is p.KEYWORD_ONLY,
            mutated=p.name in mutates, contiguous=p.name in contiguous,
        )  # fmt: skip
        if arg.tensor and arg.keyword_only:
            raise error("SL103", where=where, got="a keyword-only tensor", expected="positional tensors",
                        fix="move it before the *")  # fmt: skip
        if arg.mutated and (arg.tensor is None or arg.many or arg.optional):
            raise error("SL107", where=where, got="not a plain tensor", expected="a tensor argument")
        yield arg


def _outputs(name: str, annotation: Any, names: tuple[str, ...], mutating: bool) -> Iterable[Output]:
    where = f"{name}, return"
    if annotation is None or annotation is type(None):
        if not mutating:
            raise error("SL109", where=where, got="None", expected="tensors, or mutates=(...)")
        return
    parts = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else (annotation,)
    if not parts or not all(is_tensor(p) for p in parts):
        raise error("SL109", where=where, got=str(annotation), expected="jaxtyping tensors that are always there")
    names = names or (("out",) if len(parts) == 1 else tuple(f"out{i}" for i in range(len(parts))))
    if len(names) != len(parts):
        raise error("SL109", where=where, got=f"{len(names)} names in outputs=", expected=f"{len(parts)} names")
    for out_name, part in zip(names, parts, strict=True):
        yield Output(out_name, read_tensor(part, f"{where} {out_name!r}"))


def _check(spec: OpSpec) -> None:
    """What the parts cannot know alone: an input gives the device, every output dim and dtype is determined."""
    if not spec.tensors:
        raise error("SL111", where=spec.name, got="no tensor", expected="at least one tensor argument")
    known = _known_names(spec)
    for label, pairs in (("dims", spec.dims), ("bounds", spec.bounds)):
        for dim, expr in pairs:
            _check_names(f"{spec.name}, {label}[{dim!r}]", expr, known - {dim} if label == "dims" else known)
    for expr in spec.requires:
        _check_names(f"{spec.name}, requires", expr, known)
    classes = {a.tensor.dtype_class for a in spec.tensors if a.tensor and not a.optional}
    for out in spec.outputs:
        where = f"{spec.name}, output {out.name!r}"
        if not out.tensor.concrete and out.tensor.dtype_class not in classes:
            raise error("SL106", where=where, got=out.tensor.dtype_class, expected=f"one of {sorted(classes)}")
        for size in out.tensor.dims:
            _check_output_dim(spec, where, size, known)


def _check_output_dim(spec: OpSpec, where: str, dim: Dim, known: set[str]) -> None:
    if dim.kind == "expr" and dim.expr is not None:
        _check_names(where, dim.expr, known | set(spec.dynamic))
    elif dim.kind == "any" or (dim.text not in known | set(spec.dynamic) and dim.kind in ("name", "variadic")):
        raise error("SL104", where=f"{where}, dim {dim.text!r}", got=dim.text, expected=f"one of {sorted(known)}")


def _known_names(spec: OpSpec) -> set[str]:
    """Dims of inputs that are always there, dims=, and int arguments."""
    named = {
        d.text for a in spec.tensors if a.tensor for d in a.tensor.dims
        if d.kind in ("name", "variadic") and not a.optional and not a.many
    }  # fmt: skip
    ints = {a.name for a in spec.scalars if a.scalar in ("int", "list[int]", "bool")}
    return named | ints | {k for k, _ in spec.dims}


def _check_names(where: str, expr: Expr, known: set[str]) -> None:
    for unknown in sorted(expr.names - known):
        raise error("SL105", where=where, got=f"{expr} uses {unknown!r}", expected=f"names among {sorted(known)}")
