"""Hand-written bodies in ``csrc/``: scaffolds, and a check of their signatures against the generated wrappers.

C++ reports some of these mistakes late, such as an undefined symbol at import, and some never: two tensor parameters in
the wrong order have the same type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shiplap import ShiplapError
from shiplap.codegen import render_source
from shiplap.plugin_api import error
from shiplap_backend.expression import suggest_nearest
from shiplap_backend.vendor import find_closing_bracket, split_at_commas, strip_comments
from shiplap_backend.wrapper import Wrapper

# Names that mean one type: torch's headers use both.
_SAME = {
    "long": "int64_t",
    "IntList": "IntArrayRef",
    "ArrayRef<int64_t>": "IntArrayRef",
    "ArrayRef<Tensor>": "TensorList",
    "optional<IntArrayRef>": "OptionalIntArrayRef",
    "basic_string_view<char>": "string_view",
}


@dataclass(frozen=True)
class _BodyDefinition:
    """A C++ function that a file in ``csrc/`` defines, with its name, the type of its result and its parameters.

    ``where`` is the path of the file and the number of the line, as ``file:line``.
    """

    where: str
    name: str
    returns: str
    parameters: tuple[str, ...]


def check_bodies(directory: Path, wrappers: Sequence[Wrapper]) -> None:
    """Write an unfinished C++ file into ``directory`` for each of the generated ``wrappers`` that has no body yet.

    The wrappers use the template ``custom``, whose body is written by hand. Raise ``SL908`` with file, line and
    parameter if an existing body has another signature than its wrapper calls.
    """
    # Without custom wrappers nothing is compared, and a project need not have the directory.
    definitions = [d for path in sorted(directory.glob("*.cpp")) for d in _find_definitions(path)] if wrappers else []
    # All signatures are compared before the first scaffold is written.
    missing = [w for w in wrappers if not _check_body(w, definitions, directory / f"{w.id}.cpp")]
    for w in missing:
        (directory / f"{w.id}.cpp").write_text(
            render_source("scaffold.cpp.jinja", package="shiplap_backend", w=w), encoding="utf-8"
        )


def _find_definitions(path: Path) -> Iterator[_BodyDefinition]:
    """Yield a ``_BodyDefinition`` for each C++ function that the file ``path`` defines."""
    text = strip_comments(path.read_text(encoding="utf-8"), quoted=False)
    for m in re.finditer(r"([\w:<>,&*\s]*(?:[&*]|[\w>]\s))\s*((?:\w+::)*)(\w+)\s*\(", text):
        try:
            end = find_closing_bracket(text, m.end() - 1, "()")
        except ValueError:
            continue
        # A brace begins a body. Calls and declarations have none.
        if re.match(r"\s*(?:noexcept\s*)?\{", text[end:]):
            where = f"{path}:{text.count(chr(10), 0, m.start(3)) + 1}"
            yield _BodyDefinition(where, m[3], m[1].strip(), tuple(split_at_commas(text[m.end() : end - 1])))


def _check_body(w: Wrapper, definitions: Sequence[_BodyDefinition], path: Path) -> bool:
    """Return whether one of ``definitions`` is the hand-written body of the generated wrapper ``w``.

    ``definitions`` are the C++ functions in ``csrc/``. Raise ``SL908`` if all functions of the wrapper's name have
    another signature, or if the file ``path`` exists and no function has that name.
    """
    named = [d for d in definitions if d.name == w.id]
    if not named and path.exists():
        here = [d for d in definitions if d.where.startswith(f"{path}:")]
        where = here[0].where if here else f"{path}:1"
        raise _body_error(w, where, f"no definition of {w.id!r}{suggest_nearest(w.id, [d.name for d in definitions])}")
    problems = [(d, _signature_problem(w, d)) for d in named]
    if named and all(problem for _, problem in problems):  # an overload of the same name may serve the author himself
        definition, problem = problems[0]
        raise _body_error(w, definition.where, problem)
    return bool(named)


def _signature_problem(w: Wrapper, d: _BodyDefinition) -> str:
    """Return the first difference between the signature of ``d`` and that of the body which the generated wrapper ``w``
    calls.

    Return an empty string if they agree.
    """
    arguments = w.declaration.arguments
    if _normalize_type(d.returns) != _normalize_type(w.declaration.cpp_returns):
        return f"it returns {d.returns}, not {w.declaration.cpp_returns}"
    if len(d.parameters) != len(arguments):
        return f"{len(d.parameters)} parameters, not {len(arguments)}"
    names = [a.name for a in arguments]
    for place, (text, a) in enumerate(zip(d.parameters, arguments, strict=True), 1):
        declared, name = _split_parameter(text)
        if _normalize_type(declared) != _normalize_type(a.cpp):
            return f"parameter {place}: {text!r} is no {a.cpp!r}"
        # Two exchanged parameters of one type would compile and give wrong values.
        if name and name != a.name:
            hint = f", {name!r} is parameter {names.index(name) + 1}" if name in names else suggest_nearest(name, names)
            return f"parameter {place}: {text!r} stands for {a.name!r}{hint}"
    return ""


def _split_parameter(text: str) -> tuple[str, str]:
    """Return the type and the name of the C++ parameter ``text``.

    The name is empty if the parameter has none.
    """
    m = re.fullmatch(r"(.*[\s>&*])(\w+)", text.strip(), re.S)
    # A parameter without a name ends with its type.
    if m and m[1].strip() not in ("", "const") and m[2] not in ("const", "int", "long", "double", "bool"):
        return m[1], m[2]
    return text, ""


def _normalize_type(text: str) -> str:
    """Return the C++ type ``text`` without namespaces, spaces, ``inline`` and ``static``. ``const`` is moved to the
    front for references and pointers, and removed for values.

    Two spellings of one type give the same string.
    """
    plain = re.sub(r"\b(?:inline|static)\b|(?:\b\w+)?::", " ", text)
    constant = bool(re.search(r"\bconst\b(?![^<]*>)", plain))
    plain = re.sub(r"\s+", "", re.sub(r"\bconst\b", "", plain))
    for name, same in _SAME.items():
        plain = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", same, plain)
    # const of a value is the body's own affair.
    return f"const {plain}" if constant and plain.endswith(("&", "*")) else plain


def _body_error(w: Wrapper, where: str, got: str) -> ShiplapError:
    """Return the error ``SL908`` for the hand-written body of the generated wrapper ``w``.

    ``where`` is the file and line of the body, and ``got`` is its mistake. The field ``expected`` of the error is the
    signature that the wrapper needs.
    """
    signature = f"{w.declaration.cpp_returns} {w.id}({w.parameters})"
    return error("SL908", where=f"{where}: {w.declaration.name}", got=got, expected=signature)
