"""Read the signatures that drafts start from: annotations, extension docstrings, torch schemas, or a call in source.

All but the last end as text of a Python signature, which is parsed once. A type that has no certain Shiplap form stays
``object`` with its original text, so that a draft never guesses.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from shiplap.errors import error


@dataclass(frozen=True)
class DraftParameter:
    """An argument in a draft.

    ``type`` is the text of its annotation in a declaration. It is ``Tensor`` alone if the dims are unknown, and
    ``object`` if nothing is known. ``original`` is the annotation in the source, or an empty string. ``default`` is
    Python source, or None if there is none. ``written`` states whether the function writes to it.
    """

    name: str
    type: str
    original: str = ""
    default: str | None = None
    keyword_only: bool = False
    written: bool = False

    @property
    def open(self) -> bool:
        """Whether the author still has to fill in the type of this parameter. That is so for ``object`` and for a
        tensor without dtype and dims.
        """
        return self.type == "object" or bool(re.search(r"(?<!\w)Tensor(?!,)", self.type))


@dataclass(frozen=True)
class DraftSignature:
    """The known part of a function's signature.

    ``returns`` holds the annotations of the results, as strings. It is None if the source does not describe them, and
    empty if there are none. ``text`` is the signature as the source writes it.
    """

    name: str
    parameters: tuple[DraftParameter, ...]
    returns: tuple[str, ...] | None
    text: str


def signatures_of_function(fn: Callable[..., Any], where: str) -> list[DraftSignature]:
    """Return the signatures of ``fn``. They come from its annotations, or else from the overloads in its docstring, or
    else from its parameters without types. Raise ``SL604`` if none of these exists.
    """
    name = getattr(fn, "__name__", where.rpartition(":")[2])
    try:
        annotated = inspect.signature(fn)
    except (TypeError, ValueError):
        annotated = None
    # Annotations are more exact than a docstring; names without types come last.
    if annotated is not None and any(p.annotation is not p.empty for p in annotated.parameters.values()):
        return [parse_signature(f"{name}{_source_of_signature(annotated)}", where)]
    signatures = [parse_signature(line, where) for line in _signature_lines_of_doc(name, inspect.getdoc(fn) or "")]
    if not signatures and annotated is not None and _has_named_parameters(annotated):
        signatures = [parse_signature(f"{name}{_source_of_signature(annotated)}", where)]
    if not signatures:
        raise error(
            "SL604",
            where=where,
            got="no annotations, and no signature in the docstring",
            expected=f"{name}(x: torch.Tensor, ...) -> torch.Tensor",
        )
    return signatures


def _has_named_parameters(signature: inspect.Signature) -> bool:
    """Return whether a signature has a named parameter, besides ``*args`` and ``**kwargs``."""
    return any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())


def _source_of_signature(signature: inspect.Signature) -> str:
    """Return a signature as Python source text. Defaults that are not literals become ``...``."""
    parts, star = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        # Parameters behind ``*args`` are keyword-only without a star of their own.
        star = star or p.kind is p.VAR_POSITIONAL
        kind = "" if p.annotation is p.empty else f": {_source_of_annotation(p.annotation)}"
        default = "" if p.default is p.empty else f" = {_source_of_literal(p.default)}"
        parts.append(f"{prefix}{p.name}{kind}{default}")
    empty = signature.return_annotation is inspect.Signature.empty
    return f"({', '.join(parts)})" + ("" if empty else f" -> {_source_of_annotation(signature.return_annotation)}")


def _source_of_annotation(annotation: Any) -> str:
    """Return an annotation as source text. A class that has no name in source becomes ``object``."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    # A class without a name in source prints as <...>, which cannot be parsed.
    return re.sub(r"<[^<>]*>", "object", text)


def _source_of_literal(value: Any) -> str:
    """Return a value as source text. A value that is not a Python literal becomes ``...``."""
    try:
        return repr(value) if ast.literal_eval(repr(value)) == value else "..."
    except (ValueError, SyntaxError):
        return "..."


def _signature_lines_of_doc(name: str, doc: str) -> Iterator[str]:
    """Yield the signature lines in a docstring of the function ``name``. They are the numbered ones that pybind11
    writes for overloads, or else the first line.
    """
    lines = [line.strip() for line in doc.splitlines()]
    # pybind11 lists overloads in this form.
    numbered = [m[1] for line in lines if (m := re.match(rf"\d+\.\s+({re.escape(name)}\(.*)", line))]
    if numbered:
        yield from numbered
    elif lines and re.match(rf"{re.escape(name)}\(.*\)", lines[0]):
        yield lines[0]


def signature_of_overload(overload: Any) -> DraftSignature:
    """Return the draft signature of a registered torch overload, read from its schema."""
    schema = overload._schema
    parameters = tuple(
        DraftParameter(
            a.name,
            _form_of_annotation(_parse_or_none(str(a.type))) or "object",
            str(a.type),
            _source_of_literal(a.default_value) if a.has_default_value() else None,
            a.kwarg_only,
            bool(a.alias_info and a.alias_info.is_write),
        )
        for a in schema.arguments
    )
    returns = tuple(
        "object" if r.alias_info else _form_of_annotation(_parse_or_none(str(r.type))) or "object"
        for r in schema.returns
    )  # an alias is no fresh output
    return DraftSignature(schema.name.rpartition("::")[2], parameters, returns, str(schema))


def signature_of_call(call: ast.Call) -> DraftSignature:
    """Return a draft signature with one parameter for each argument of a call found in source. It serves a function
    without a signature. All types are left for the author to fill in.
    """
    # Two arguments may have the same source, such as f(x, x).
    names: list[str] = []
    values = [*((None, a) for a in call.args), *((k.arg, k.value) for k in call.keywords)]
    parameters = []
    for index, (keyword, value) in enumerate(values):
        name = keyword or _root_name(value) or f"arg{index}"
        name = name if name not in names and not iskeyword(name) else f"{name}{index}"
        names.append(name)
        parameters.append(DraftParameter(name, "object", f"{ast.unparse(value)} in the call"))
    return DraftSignature(_last_name(call.func) or "kernel", tuple(parameters), None, ast.unparse(call))


def parse_signature(text: str, where: str) -> DraftSignature:
    """Return the signature in a text such as ``f(x: torch.Tensor, y: int = 3) -> torch.Tensor``. The text is in
    Python's syntax or pybind11's. Raise ``SL604`` if it cannot be parsed.
    """
    try:
        head = ast.parse(f"def {_as_python_syntax(text)}: pass").body[0]
    except SyntaxError as e:
        raise error("SL604", where=where, got=text, expected=f"a signature ({e.msg})") from None
    assert isinstance(head, ast.FunctionDef)
    if head.args.vararg or head.args.kwarg:
        raise error("SL604", where=where, got=text, expected="named arguments, no *args or **kwargs")
    positional = [*head.args.posonlyargs, *head.args.args]
    # The syntax tree lists the defaults of the last parameters only.
    defaults = [None] * (len(positional) - len(head.args.defaults)) + list(head.args.defaults)
    parameters = [_make_parameter(a, d, False) for a, d in zip(positional, defaults, strict=True)]
    parameters += [
        _make_parameter(a, d, True) for a, d in zip(head.args.kwonlyargs, head.args.kw_defaults, strict=True)
    ]
    # A missing annotation leaves the outputs open, while -> None says that there are none.
    returns = None if head.returns is None else _forms_of_returns(head.returns)
    return DraftSignature(head.name, tuple(parameters), returns, text)


def _as_python_syntax(text: str) -> str:
    """Return a signature of pybind11 in Python's syntax. C++ spellings, such as templates and namespaces, are replaced
    by names.
    """
    text = re.sub(r"=\s*<[^>]*>", "= ...", text.rstrip(": "))
    text = re.sub(r"\b(?:c10|std)::optional<([\w:]+)>", r"Optional[\1]", text)
    # From the inside out, because templates nest. "->" is no bracket.
    while (shorter := re.sub(r"(?<!-)<[^<>]*>", "", text)) != text:
        text = shorter
    return re.sub(r"\b\w+::", "", text)


def _make_parameter(argument: ast.arg, default: ast.expr | None, keyword_only: bool) -> DraftParameter:
    """Return the draft parameter of ``argument``, an argument in a syntax tree. ``default`` is the syntax tree of its
    default. If it is None, the parameter has no default. If ``keyword_only`` is true, the parameter can only be passed
    by keyword.
    """
    form = _form_of_annotation(argument.annotation)
    original = ast.unparse(argument.annotation) if argument.annotation else ""
    value = ast.unparse(default) if default else None
    return DraftParameter(argument.arg, form or "object", original, value, keyword_only)


def _forms_of_returns(node: ast.expr) -> tuple[str, ...]:
    """Return the text of each output's annotation for a declaration, from a return annotation. A tuple gives one text
    per member, one value gives one text, and None gives an empty tuple.
    """
    if isinstance(node, ast.Constant) and node.value is None:
        return ()
    if isinstance(node, ast.Subscript) and _last_name(node.value) in ("tuple", "Tuple"):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        # tuple[Tensor, ...] has no fixed number of outputs, which a declaration needs.
        if not any(isinstance(i, ast.Constant) and i.value is ... for i in items):
            return tuple(_form_of_annotation(i) or "object" for i in items)
    return (_form_of_annotation(node) or "object",)


# The names of scalar types in Python, in pybind11's docstrings and in schemas.
_SCALAR_FORMS = {
    "int": "int",
    "SupportsInt": "int",
    "SupportsIndex": "int",
    "SymInt": "int",
    "float": "float",
    "SupportsFloat": "float",
    "bool": "bool",
    "str": "str",
}
# All of these become list[...], the one sequence that a schema has.
_LIST_TYPES = ("list", "List", "Sequence", "tuple", "Tuple", "Iterable")


def _form_of_annotation(node: ast.expr | None) -> str | None:
    """Return the text of the annotation that a declaration would have for ``node``, such as ``Tensor`` or ``int``.
    Return None if that is not certain.
    """
    match node:
        # An annotation in quotes.
        case ast.Constant(value=str(text)):
            return _form_of_annotation(_parse_or_none(text))
        case ast.Name() | ast.Attribute():
            name = _last_name(node)
            return "Tensor" if name == "Tensor" else _SCALAR_FORMS.get(name)
        case ast.BinOp(op=ast.BitOr()):
            return _form_of_optional([node.left, node.right])
        case ast.Subscript():
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return _form_of_subscript(_last_name(node.value), items)
    return None


def _form_of_subscript(base: str, items: list[ast.expr]) -> str | None:
    """Return the text of the annotation that a declaration would have for ``base[items]``. Return None if that is not
    certain.
    """
    if base == "Optional":
        return _form_of_optional([items[0], ast.Constant(None)])
    if base == "Union":
        return _form_of_optional(items)
    if base == "Annotated":
        return _form_of_annotation(items[0])
    if base in _LIST_TYPES:
        forms = {_form_of_annotation(i) for i in items if not (isinstance(i, ast.Constant) and i.value is ...)}
        form = forms.pop() if len(forms) == 1 else None
        return f"list[{form}]" if form in ("Tensor", "int", "float", "bool") else None
    if _is_dtype_class(base) and len(items) == 2 and isinstance(items[1], ast.Constant):
        return f'{base}[Tensor, "{items[1].value!s}"]' if _last_name(items[0]) == "Tensor" else None
    return None


def _is_dtype_class(name: str) -> bool:
    """Return whether ``name`` is a class of jaxtyping for dtypes, such as ``Float``."""
    import jaxtyping

    return isinstance(getattr(jaxtyping, name, None), type) and hasattr(getattr(jaxtyping, name), "dtypes")


def _form_of_optional(parts: list[ast.expr]) -> str | None:
    """Return the text ``<type> | None`` for a union of one type and None. ``<type>`` is the type's annotation in a
    declaration. Return None for any other union.
    """
    rest = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
    if len(rest) != 1 or len(parts) != 2:
        return None
    form = _form_of_annotation(rest[0])
    return form and f"{form} | None"


def _root_name(node: ast.expr) -> str:
    """Return a name for an argument in a call, from its expression ``node``. It is ``cost`` for ``cost``, ``x.cost``,
    ``cost.numpy()`` and ``cost[0]``. Return an empty string if there is none.
    """
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
        node = node.value if isinstance(node, ast.Attribute) else node
    return _last_name(node)


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name. Return an empty string for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _parse_or_none(text: str) -> ast.expr | None:
    """Return the syntax tree of an expression, or None if the text is not Python."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
