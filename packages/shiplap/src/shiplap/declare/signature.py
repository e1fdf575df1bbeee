"""The reader of declarations, which makes an ``OpSpec`` from a Python function.

``read_spec`` reads the signature, checks that a torch schema can express it, and relates the sizes of all tensors.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Literal, TypedDict, Unpack, cast, get_args

import torch

from shiplap.declare.annotation import read_argument
from shiplap.declare.broadcast import broadcast_dims, check_broadcasts
from shiplap.declare.choices import to_value
from shiplap.declare.code_parts import HasCode, closure_cell_value
from shiplap.declare.dim_expression import Expr
from shiplap.declare.keyword_values import annotations_of, check_value, unknown_keyword_error
from shiplap.declare.return_annotation import is_schema_name, is_single_tuple, read_results
from shiplap.declare.schema import has_default_literal
from shiplap.declare.spec import Arg, Dim, OpSpec
from shiplap.declare.value_kinds import kind_mismatch
from shiplap.errors import error
from shiplap.torch_private.dispatcher_library import is_torch_attribute

RESERVED_OVERLOADS = ("default", "raw")  # overloads: torch's word for none, and the part of an op below autograd
ListOption = Literal[
    "requires",
    "mutates",
    "contiguous",
    "outputs",
    "reference_is_fast_on",
    "specialize",
    "nondifferentiable",
    "unordered",
]
AUTOCAST_RULES = ("widest", "autocast", "float32", None)
COMPILER_NAMES = ("kernel", "cls")  # parameters of the functions of torch's compiler that get the keywords of a call
# Torch's tags that a declaration may give. The others follow from its other parts.
DECLARED_TAGS = (torch.Tag.cudagraph_unsafe,)
# Keywords that take one name or several.
LISTS: tuple[ListOption, ...] = get_args(ListOption)


class DeclarationKeywords(TypedDict, total=False):
    """The keywords of ``@sl.op`` and ``@sl.adopt``, declared beside the signature. ``sl.op`` documents them."""

    dims: Mapping[str, str]
    bounds: Mapping[str, str]
    requires: Iterable[str]
    mutates: Iterable[str]
    contiguous: Iterable[str]
    outputs: Iterable[str]
    autocast: str | None
    reference_is_fast_on: Iterable[str]
    tolerance: tuple[float, str] | None
    aliases: str | Iterable[str | None]
    specialize: Iterable[str]
    fake: str
    nondifferentiable: Iterable[str]
    random: str
    unordered: Iterable[str]
    tags: torch.Tag | Iterable[torch.Tag]


def check_keywords(where: object, given: Mapping[str, object], keywords: type = DeclarationKeywords) -> None:
    """Raise ``SL140`` for a name in ``given`` that is none of ``keywords``, a typed dict, and for a value of another
    type than the typed dict declares. By default it holds the keywords of ``sl.op``.
    """
    known = annotations_of(keywords)
    for keyword, value in given.items():
        if keyword not in known:
            raise unknown_keyword_error(str(where), keyword, known)
        check_value(str(where), keyword, value, known[keyword])


def _fix_of_decorated(decorated: object) -> str:
    """Return the advice of the error for an object other than a function under ``@sl.op``."""
    if type(decorated).__name__ == "CustomOpDef":
        return (
            "remove @torch.library.custom_op, since sl.op registers an op itself, and annotate dtype and dims, as in "
            'x: Float[Tensor, "n c"]. To keep that op, write a function with its parameters and such annotations, and '
            'decorate it with @sl.adopt("namespace::name")'
        )
    if isinstance(decorated, HasCode):  # a declared op
        return "remove one of the two decorators: the object is declared already"
    return "write a function that calls the object; put @staticmethod above @sl.op"


def read_spec(name: str, fn: Callable[..., object], **given: Unpack[DeclarationKeywords]) -> OpSpec:
    """Return the declaration of the annotated function ``fn`` under the op name ``name``. Raise a ``DeclarationError``
    (``SL1xx``) if the declaration is invalid.
    """
    check_op_name(name)
    check_keywords(name, given)
    if not inspect.isfunction(fn):
        kind = type(fn).__name__
        raise error(
            "SL103",
            where=name,
            what="the decorated object is not a function",
            got=f"a{'n' * (kind[0] in 'AEIOU')} {kind}",
            expected="a function defined with def",
            fix=_fix_of_decorated(fn),
        )
    for test, word, fix in (
        (inspect.iscoroutinefunction, "an async function", "write def in place of async def"),
        (inspect.isgeneratorfunction, "a generator", "write return in place of yield"),
    ):
        if test(fn):
            what, expected = "the function does not return its results", "a function that returns tensors"
            raise error("SL103", where=name, what=what, got=word, expected=expected, fix=fix)
    autocast = given.get("autocast", "widest")
    if autocast not in AUTOCAST_RULES:
        raise error("SL112", where=name, got=repr(autocast), expected=", ".join(map(repr, AUTOCAST_RULES)))
    named = {option: _as_name_tuple(given.get(option, ())) for option in LISTS}
    # Evaluated once, as postponed annotations are texts until then.
    hints = _evaluate_annotations(fn)
    special = [set(named[option]) for option in ("mutates", "contiguous", "specialize")]
    args = tuple(_read_signature_arguments(name, fn, hints, *special))
    returned, aliases = hints.get("return", inspect.Parameter.empty), given.get("aliases", ())
    outs, returns, traced = read_results(name, args, returned, named["outputs"], aliases, given.get("fake", "declared"))
    dims = {**broadcast_dims(args, given.get("dims") or {}), **(given.get("dims") or {})}
    spec = OpSpec(
        name,
        args,
        outs,
        returns=returns,
        traced=traced,
        dims=tuple((k, Expr.parse(v, f"{name}, dims[{k!r}]")) for k, v in dims.items()),
        bounds=tuple((k, Expr.parse(v, f"{name}, bounds[{k!r}]")) for k, v in (given.get("bounds") or {}).items()),
        requires=tuple(Expr.parse(v, f"{name}, requires") for v in (*named["requires"], *_length_preconditions(args))),
        autocast=autocast,
        reference_is_fast_on=named["reference_is_fast_on"],
        doc=inspect.getdoc(fn) or "",
        tolerance=_read_tolerance(name, given.get("tolerance")),
        detached=named["nondifferentiable"],
        random=given.get("random", ""),
        unordered=named["unordered"],
        single_tuple=is_single_tuple(returned),
        tags=_read_tags(name, given.get("tags", ())),
    )
    _check_sizes_and_dtypes(spec)
    _check_detached(spec)
    _check_random(spec)
    _check_unordered(spec)
    return spec


def _check_detached(spec: OpSpec) -> None:
    """Raise ``SL119`` unless each name in ``nondifferentiable=`` is a result, or an argument that the op does not write
    to. Raise it also if a result of the op may be a view.
    """
    where = f"{spec.name}, nondifferentiable="
    if spec.detached and spec.view:
        fix = "call detach() in the reference, through which torch sees"
        raise error("SL119", where=where, got="an op whose result may be a view", expected="fresh results", fix=fix)
    known = [a.name for a in spec.tensors if not a.mutated] + list(spec.results)
    for name in spec.detached:
        if name not in known:
            got = f"{name!r}, which the op writes to" if name in spec.mutated else repr(name)
            raise error("SL119", where=where, got=got, expected=f"one of {', '.join(known)}")


def _check_random(spec: OpSpec) -> None:
    """Raise ``SL120`` unless ``random=`` is ``"global"`` or names an int, integer tensor or generator argument. Raise
    it also if a result of the op may be a view.
    """
    seeds = [a.name for a in spec.args if a.scalar in ("int", "Generator") or _is_integer_tensor(a)]
    if spec.random and (spec.random not in (*seeds, "global") or spec.view):
        got = "an op whose result may be a view" if spec.view else repr(spec.random)
        expected = ", ".join([*map(repr, seeds), "'global'"])
        fix = "remove aliases=, and return new tensors" if spec.view else ""
        raise error("SL120", where=f"{spec.name}, random=", got=got, expected=f"one of {expected}", fix=fix)


def _is_integer_tensor(arg: Arg) -> bool:
    """Return whether the argument is a single tensor of integers that the op does not write to."""
    kind = arg.tensor
    return kind is not None and not (arg.many or arg.mutated) and all("int" in n for n in kind.dtypes or ("float",))


def _check_unordered(spec: OpSpec) -> None:
    """Raise ``SL121`` unless ``unordered=`` names single result tensors that all have the same number of rows."""
    where, rows = f"{spec.name}, unordered=", set()
    kinds = {r.name: r.tensor for r in spec.made if not (r.many or r.optional)} if spec.traced else {}
    kinds |= {o.name: o.tensor for o in spec.outputs}
    for name in spec.unordered:
        kind = kinds.get(name)
        if kind is None or not kind.dims or kind.dims[0].kind == "variadic":
            known = [n for n, t in kinds.items() if t is not None and t.dims]
            raise error("SL121", where=where, got=repr(name), expected=f"one of {', '.join(known)}")
        rows.add(str(kind.dims[0]))
    if len(rows) > 1:
        raise error("SL121", where=where, got=f"{' and '.join(sorted(rows))} rows", expected="as many rows of each")


def _read_tolerance(name: str, given: tuple[float, str] | None) -> tuple[float, str] | None:
    """Return ``given``, the declared tolerance, as ``(relative error, reason)``, or None if ``given`` is None. Raise
    ``SL118`` if the error is not a number above 0 and below 1, or if the reason is missing or blank. ``name`` names the
    op in the error.
    """
    if given is None:
        return None
    value, reason = given if isinstance(given, tuple) and len(given) == 2 else (given, "")
    if not isinstance(value, (int, float)) or not 0 < value < 1 or not isinstance(reason, str) or not reason.strip():
        raise error("SL118", where=name, got=repr(given), expected="(a number between 0 and 1, the reason)")
    return float(value), reason.strip()


def _read_tags(name: str, given: object) -> tuple[torch.Tag, ...]:
    """Return ``given``, one declared tag or several, as a tuple. Raise ``SL140`` for a value that is none of
    ``DECLARED_TAGS``. ``name`` names the op in the error.
    """
    tags = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(tag, torch.Tag) and tag in DECLARED_TAGS for tag in tags):
        allowed = ", ".join(f"torch.Tag.{tag.name}" for tag in DECLARED_TAGS)
        raise error(
            "SL140",
            what="tags= has a value that no declaration may give",
            where=name,
            got=f"tags={given!r}"[:120],
            expected=allowed,
            fix=f"write tags=({allowed},), or leave tags= out: torch's other tags follow from the declaration",
        )
    return tuple(dict.fromkeys(tags))


def check_op_name(name: object) -> None:
    """Raise ``SL101`` unless ``name`` is ``"namespace::name"``, with an optional ``.overload``, and torch can have such
    an op.

    If ``@sl.op`` is written without parentheses, the decorated function is passed as the name, and is refused.
    """
    if isinstance(name, str):
        namespace, _, opname = name.partition("::")
        opname, dot, overload = opname.partition(".")
        named = not dot or (is_schema_name(overload) and overload not in RESERVED_OVERLOADS)
        well_formed = is_schema_name(namespace) and is_schema_name(opname) and named
        if not well_formed or is_torch_attribute(namespace, opname, overload):
            fix = "" if well_formed else _name_advice(name)
            raise error("SL101", where=f"@sl.op({name!r})", got=name, expected="namespace::name", fix=fix)
        return
    # The decorator without parentheses passes the function as the name.
    if inspect.isfunction(name) or inspect.isclass(name):
        shown = name.__name__
        got = f"no name, but the {type(name).__name__} {shown}"
        fix = f'write the decorator with a name, as in @sl.op("mylib::{shown}")' if shown.isidentifier() else ""
    else:
        got, fix = f"{type(name).__name__} {name}", ""
    raise error("SL101", where="@sl.op", got=got, expected="namespace::name", fix=fix)


def _name_advice(name: str) -> str:
    """Return the fix for ``name``, which is no valid name of an op. The fix shows the decorator with a valid name that
    is like it. Return an empty string if there is no such name.
    """
    bare, _, schema = name.partition("(")
    parts = [re.sub(r"[^0-9A-Za-z_]+", "_", part.strip()) for part in bare.split("::")]
    namespace, opname = ("mylib", parts[0]) if len(parts) == 1 else (parts[0], parts[-1])
    if len(parts) > 2 or not (is_schema_name(namespace) and is_schema_name(opname)):
        return ""
    foreign = " and ".join(sorted({repr(c) for c in re.findall(r"[^0-9A-Za-z_:]", bare)}))
    reason = f": a name has only letters, digits and underscores, and no {foreign}" if foreign else ""
    reason += ": the schema follows from the annotations" if schema else ""
    reason += ", with a namespace of your own in place of mylib" if len(parts) == 1 else ""
    return f'write @sl.op("{namespace}::{opname}"){reason}'


def read_arguments(name: str, fn: Callable[..., object]) -> tuple[Arg, ...]:
    """Return the annotated parameters of ``fn``, a function that is no op, as ``Arg`` objects. ``name`` names it in
    errors. Raise the errors of :func:`read_spec`.
    """
    return tuple(_read_signature_arguments(name, fn, _evaluate_annotations(fn), set(), set(), set()))


def _length_preconditions(args: Iterable[Arg]) -> Iterable[str]:
    """Return the conditions on list arguments that are declared with a fixed length, such as ``len(stride) == 2``.
    Every call must meet them, since torch does not check the length.
    """
    return (f"len({a.name}) == {a.length}" for a in args if a.length and not (a.optional or a.many))


def _as_name_tuple(value: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``value`` as a tuple. A string is one name, so that ``mutates="cache"`` does not name five
    arguments of one letter.
    """
    return (value,) if isinstance(value, str) else tuple(value)


def _evaluate_annotations(fn: Callable[..., object]) -> dict[str, object]:
    """Return the annotations of ``fn`` by parameter, evaluated. Raise ``SL102`` for a name that does not exist at run
    time.

    Postponed annotations (``from __future__ import annotations``) and classes local to a function are evaluated, too.
    """
    # A module that was run by path may not be in sys.modules.
    scope = dict(vars(sys.modules.get(fn.__module__, typing)))
    # A variable around the function may be assigned only later, as that of the op itself is.
    plain = cast("FunctionType", inspect.unwrap(fn))
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    around = {name: value for name, cell in cells if (value := closure_cell_value(cell)) is not None}
    try:
        return typing.get_type_hints(fn, globalns={**scope, **fn.__globals__}, localns=around)
    except NameError as e:
        raise error(
            "SL102",
            where=fn.__qualname__,
            got=str(e),
            expected="annotations that can be evaluated",
            fix=_fix_of_unknown_name(e, {**scope, **fn.__globals__, **around}),
        ) from None


def _fix_of_unknown_name(problem: NameError, known: Iterable[str]) -> str:
    """Return the advice of the error for an annotation that has a name which does not exist. ``known`` are the names
    that do.
    """
    near = difflib.get_close_matches(problem.name or "", known)
    corrected = f"write {near[0]} in place of {problem.name}, or " if near else ""
    return f"{corrected}import the name at run time, at module level"


def _read_signature_arguments(
    name: str,
    fn: Callable[..., object],
    hints: dict[str, object],
    mutates: set[str],
    contiguous: set[str],
    specialize: set[str],
) -> Iterable[Arg]:
    """Yield the arguments of the reference ``fn``. They are read from its parameters, evaluated annotations
    (``hints``), defaults and the names in ``mutates``, ``contiguous`` and ``specialize``. Raise ``SL102``, ``SL103`` or
    ``SL107`` for an argument that no schema can carry.
    """
    parameters = inspect.signature(fn).parameters
    for option, given in (("mutates", mutates), ("contiguous", contiguous), ("specialize", specialize)):
        for unknown in given - parameters.keys():
            near = next(iter(difflib.get_close_matches(unknown, parameters)), "")
            fix = f"write {option}=({near!r},)" if near else f"name an argument of the signature in {option}="
            what, expected = f"{option}= names no argument", f"one of {', '.join(parameters)}"
            raise error("SL107", where=name, what=what, got=unknown, expected=expected, fix=fix)
    for p in parameters.values():
        where = f"{name}, argument {p.name!r}"
        # The parameter's name is checked first: all errors below quote it.
        _check_parameter_name(where, p)
        if p.name not in hints:
            method = "declare a function; in a class, put @staticmethod above @sl.op" if p.name == "self" else ""
            raise error("SL102", where=where, got=str(p), expected="an annotation", fix=method)
        read = read_argument(p.name, hints[p.name], where)
        arg = replace(
            read,
            default=... if p.default is p.empty else to_value(read, p.default),
            keyword_only=p.kind is p.KEYWORD_ONLY,
            mutated=p.name in mutates,
            contiguous=p.name in contiguous,
            specialized=read.specialized or p.name in specialize,
        )
        _check_argument(where, arg)
        yield arg


def _check_parameter_name(where: str, p: inspect.Parameter) -> None:
    """Raise ``SL103`` for ``*args``, ``**kwargs`` and a parameter whose name cannot be used in a schema or in generated
    code.
    """
    if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
        raise error("SL103", where=where, got=str(p), expected="named arguments", fix="name each argument")
    if not is_schema_name(p.name) or p.name.startswith("_"):  # names with _ are those of generated code
        raise error(
            "SL103",
            where=where,
            got=f"the name {p.name}",
            expected="a name of ASCII letters, no _ first",
            fix="rename the argument",
        )


def check_keyword_names(spec: OpSpec) -> None:
    """Raise ``SL103`` for a keyword-only argument that torch's compiler could not pass: a function of its own that gets
    the keywords of the call has a parameter of this name.
    """
    for arg in spec.args:
        if arg.keyword_only and arg.name in COMPILER_NAMES:
            raise error(
                "SL103",
                what="torch's compiler cannot pass this argument",
                where=f"{spec.name}, argument {arg.name!r}",
                got=f"the keyword-only argument {arg.name}, which is a parameter of the compiler's own function",
                expected="another name, or an argument that a call may pass by position",
                fix="rename the argument, or declare it before the *",
            )


def _check_argument(where: str, arg: Arg) -> None:
    """Raise ``SL103`` for a default that a schema cannot carry. Raise it also for ``specialize=`` with an argument that
    is neither an int nor a list of ints. Raise ``SL107`` for ``mutates=`` with an argument that is no tensor.
    """
    if arg.has_default and (bad := _bad_default(arg)):
        raise error(
            "SL103",
            where=where,
            got=f"default {arg.default!r}",
            expected=bad,
            fix=_default_fix(arg),
        )
    if arg.specialized and arg.scalar not in ("int", "list[int]"):
        fix = "leave it out of specialize="
        raise error(
            "SL103", where=where, got=f"specialize= with a {arg.scalar or 'tensor'}", expected="an int or ints", fix=fix
        )
    if arg.mutated and arg.tensor is None:
        raise error("SL107", where=where, got="not a tensor", expected="a tensor argument, or a list of tensors")


def _default_fix(arg: Arg) -> str:
    """Return the fix, in words, for a default that a schema cannot carry."""
    if arg.default is None:
        kind = str(arg.tensor) if arg.tensor is not None else arg.kind
        return f"annotate {arg.name}: {f'list[{kind}]' if arg.many else kind} | None"
    if arg.choices:
        return f"use {arg.shown_choices}"
    if arg.tensor is None and kind_mismatch(arg, arg.default):
        return f"write a default of type {arg.kind}, or annotate {arg.name} with the type of this default"
    return "use None as the default, in an optional argument"


def _bad_default(arg: Arg) -> str:
    """Return an empty string if the torch schema can carry the default of ``arg``, which has one. Otherwise return, in
    words, which defaults it could carry.
    """
    # Infinities and NaN have no literal in a schema.
    numbers = arg.default if isinstance(arg.default, (list, tuple)) else [arg.default]
    if kind_mismatch(arg, arg.default):
        return f"a default of type {arg.scalar or 'None'}" + (" or None" if arg.optional and arg.scalar else "")
    if arg.choices and arg.default is not None and arg.default not in arg.choices:
        return arg.shown_choices
    if arg.tensor is not None and arg.default is not None:
        return "None"
    if isinstance(arg.default, str) and "\0" in arg.default:
        return "a text without a NUL character"
    if arg.default is not None and (why := _unparsed_default_kind(arg)):
        return f"no default{' but None' if arg.optional else ''}, which torch cannot parse for {why}"
    return "a finite number" if any(isinstance(v, float) and not math.isfinite(v) for v in numbers) else ""


def _unparsed_default_kind(arg: Arg) -> str:
    """Return an empty string if torch's schema parser accepts the default of ``arg``. Otherwise return, in words, the
    kind of default that it does not accept, such as ``Generator``.
    """
    kind = str(arg.scalar)
    if kind in ("dtype", "device", "layout", "memory_format"):
        return "" if has_default_literal(arg.default) else f"{kind} {arg.default}"
    return arg.kind if kind in ("Generator", "object", "list[Scalar]", "list[str]") else ""


def _check_sizes_and_dtypes(spec: OpSpec) -> None:
    """Raise ``SL104`` for a dim of an output that the inputs do not determine, and ``SL106`` for such a dtype. Raise
    ``SL105`` for an expression with an unknown name.
    """
    known = _check_dims(spec)
    _check_bounds(spec, known)
    scalars = {a.name for a in spec.scalars if not a.optional}
    for expr in spec.requires:
        _check_expression_names(spec, f"{spec.name}, requires", expr, known | scalars)
    # An absent tensor has no dtype that an output could take.
    classes = {a.tensor.dtype_class for a in spec.tensors if a.tensor and not a.optional}
    for out in spec.outputs:
        where = f"{spec.name}, output {out.name!r}"
        if not out.tensor.concrete and out.tensor.dtype_class not in classes:
            raise error("SL106", where=where, got=out.tensor.dtype_class, expected=f"one of {sorted(classes)}")
        for size in out.tensor.dims:
            _check_output_dim(spec, where, size, known)


def _check_dims(spec: OpSpec) -> set[str]:
    """Return the names that expressions may use. Each expression in ``dims=`` may use the names of the inputs and of
    the dims before it.

    Raise ``SL105`` for an expression with any other name, and for a name that is used both as one dim and as a variadic
    dim.
    """
    known = _known_names(spec)
    for dim, expr in spec.dims:
        # A dim may use those before it, and not itself.
        _check_expression_names(spec, f"{spec.name}, dims[{dim!r}]", expr, known - {dim})
        known.add(dim)
    kinds: dict[str, str] = {}
    check_broadcasts(spec, known)
    for arg in spec.tensors:
        own = {d.text for d in arg.tensor.dims if d.kind == "name"} if arg.tensor else set()
        for size in arg.tensor.dims if arg.tensor else ():
            where = f"{spec.name}, argument {arg.name!r}"
            if size.expr is not None:
                _check_expression_names(spec, where, size.expr, known | own)
            elif kinds.setdefault(size.text, size.kind) != size.kind:
                raise error(
                    "SL105",
                    where=where,
                    got=f"{size.text!r} as one dim and as *{size.text}",
                    expected="one meaning a name",
                )
    return known


def _check_bounds(spec: OpSpec, known: set[str]) -> None:
    """Raise ``SL104`` unless each dim in ``bounds=`` is a size of an output and of no input. Raise ``SL105`` for an
    expression with names that are not in ``known``.
    """
    # Only a plain dim can be measured on the result.
    plain = {d.text for o in spec.outputs for d in o.tensor.dims if d.kind == "name"}
    for dim, expr in spec.bounds:
        where = f"{spec.name}, bounds[{dim!r}]"
        if dim in known or dim not in plain:
            got = "a dim that the inputs determine" if dim in known else "a dim that is no output's size"
            raise error(
                "SL104",
                where=where,
                got=got,
                expected="a dim of an output that no input has",
                fix="remove it from bounds=, or name the output's dim so",
            )
        _check_expression_names(spec, where, expr, known)


def _check_output_dim(spec: OpSpec, where: str, dim: Dim, known: set[str]) -> None:
    """Raise ``SL104`` if ``dim``, a dim of an output, is defined by no argument. Raise ``SL105`` if it is an expression
    with names that are not in ``known``. ``where`` names the output in the error.
    """
    if dim.kind == "expr" and dim.expr is not None:
        _check_expression_names(spec, where, dim.expr, known | set(spec.dynamic))
    elif dim.kind == "any" or (dim.text not in known | set(spec.dynamic) and dim.kind in ("name", "variadic")):
        expected = f"one of {', '.join(sorted(known))}" if known else "a dim that an argument has, too"
        fix = ""
        if dim.kind == "any" or dim.text == "...":
            free = next(name for name in ("s", "n", "m", "k", "unnamed") if name not in known)
            name = f"*{free}" if dim.text == "..." else free
            fix = f"give the dim a name, both in the argument and in the result: write {name} in place of {dim.text}"
        raise error("SL104", where=f"{where}, dim {dim.text!r}", got=dim.text, expected=expected, fix=fix)


def _known_names(spec: OpSpec) -> set[str]:
    """Return the names that have a value in every call. They are the dims of required tensor arguments, and the
    required int, bool and list[int] arguments.
    """
    named = {
        d.text
        for a in spec.tensors
        if a.tensor
        for d in a.tensor.dims
        if d.kind in ("name", "variadic") and d.text != "..." and not a.optional
    }
    return named | {a.name for a in spec.scalars if a.scalar in ("int", "list[int]", "bool") and not a.optional}


def read_workspace(spec: OpSpec, source: str) -> Expr:
    """Return the ``workspace=`` of a kernel, a number of bytes, as an expression. Raise ``SL105`` for names that it
    must not use.

    The expression may use dims that the inputs determine, int arguments, ``threads`` and ``itemsize``.
    """
    where = f"{spec.name}, workspace"
    expr = Expr.parse(source, where)
    _check_expression_names(spec, where, expr, _known_names(spec) | {k for k, _ in spec.dims} | {"threads", "itemsize"})
    return expr


def _check_expression_names(spec: OpSpec, where: str, expr: Expr, known: set[str]) -> None:
    """Raise ``SL105`` for a name in the expression that is not in ``known``."""
    for unknown in sorted(expr.names - known):
        named = any(a.name == unknown for a in spec.args)
        add = f"annotate {unknown} as int" if named else f"add `{unknown}: int` to the arguments of the function"
        if any(a.name == unknown for a in spec.tensors):
            add = f"write the names of the dims of {unknown}, since an expression sees sizes and no tensors"
        fix = f"{add}, or correct it to one of {', '.join(sorted(known))}" if known else add
        if ", argument '" in where and not named:
            fix = (
                f"give this dim a name of its own, as in e in place of {expr}, and compute the others from it, as in "
                f"e-1. If {unknown} is a dim of another argument, name it there; or {fix}"
            )
        if "dims[" in where:
            fix += '. A condition, such as that g divides c, is no size: write requires="c % g == 0"'
        expected = f"names among {sorted(known)}"
        raise error("SL105", where=where, got=f"{expr} uses {unknown!r}", expected=expected, fix=fix)
