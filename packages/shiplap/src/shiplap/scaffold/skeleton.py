"""Write the source of a declaration draft from a ``DraftSignature``. A line that needs the author's knowledge is marked
FILL. The parameter list has the defaults that Python allows, and the star where it has to stand.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shiplap.scaffold.schema import SchemaField
from shiplap.scaffold.signature import DraftParameter, DraftSignature


@dataclass(frozen=True)
class Draft:
    """The contents of a drafted file. ``decorator`` is ``"op"`` for a draft that wraps a function, and ``"adopt"`` for
    one that wraps a torch op.

    ``signatures`` are those of the ops, and ``namespace`` is theirs. ``origin`` names what is drafted, and ``by`` the
    command that drafts it. ``imports`` is a line of source, and ``call`` the source of the wrapped function. Both may
    be empty.
    """

    origin: str
    namespace: str
    decorator: str
    signatures: Sequence[DraftSignature]
    imports: str = ""
    call: str = ""
    by: str = "shiplap init"


def render_draft(draft: Draft) -> str:
    """Return the source of a Python file with imports and one drafted op for each signature. It can be imported, and
    every call of an op raises ``SL113``.
    """
    names = _names_of_ops(draft)
    bodies = [_draft_op(draft, s, n) for s, n in zip(draft.signatures, names, strict=True)]
    text = "\n\n\n".join(["\n".join(_head_lines(draft)), *bodies]) + "\n"
    ast.parse(text)  # a draft that does not parse is our defect, not the reader's
    return text


def fill_lines(text: str) -> list[dict[str, object]]:
    """Return ``{"line": number, "fill": text}`` for each line of a draft that contains ``FILL:``. ``text`` is what
    follows it.
    """
    marks = ((number, line.partition("FILL: ")) for number, line in enumerate(text.splitlines(), 1))
    return [{"line": number, "fill": what.rstrip('"')} for number, (_, mark, what) in marks if mark]


def _names_of_ops(draft: Draft) -> list[str]:
    """Return a distinct Python name for each signature of the draft. Overloads get a number."""
    names: list[str] = []
    for signature in draft.signatures:
        name = signature.name + "_" * keyword.iskeyword(signature.name)
        count = sum(n == name or n.startswith(f"{name}_") for n in names)
        names.append(f"{name}_{count + 1}" if count else name)
    return names


def _head_lines(draft: Draft) -> list[str]:
    """Return the source lines ahead of the first op, which are the docstring and the imports."""
    types = " ".join(t for s in draft.signatures for t in (*(p.type for p in s.parameters), *(s.returns or ())))
    # Float is imported in any case, since most drafts need it when they are filled in.
    classes = sorted({"Float", *re.findall(r"(\w+)\[Tensor,", types)})
    source = f"{draft.imports}\n" if draft.imports else ""
    return [
        f'"""Drafted by `{draft.by}` from {draft.origin}.',
        "",
        f"Work through the lines marked FILL, then write sl.{draft.decorator} in place of unfinished. Until then every",
        "call raises SL113.",
        '"""',
        "",
        f"{source}from jaxtyping import {', '.join(classes)}  # FILL: the dtype classes that you use: Int32, Bool, ...",
        "from torch import Tensor",
        "",
        f"import shiplap as sl  # noqa: F401 - for sl.{draft.decorator}",
        "from shiplap.scaffold import unfinished",
        "from shiplap.errors import error",
    ]


def _draft_op(draft: Draft, signature: DraftSignature, name: str) -> str:
    """Return the source of the drafted declaration of one op under the Python name ``name``."""
    qualified = f"{draft.namespace}::{signature.name if draft.decorator == 'adopt' else name}"
    parameters = _drop_dynamic_defaults(signature.parameters)
    lines = [f"# {line}" for line in signature.text.splitlines()]
    if name != signature.name and draft.decorator == "op":
        lines.append("# FILL: an op has one signature; give this overload a name of its own")
    lines += [*_decorator_lines(draft, qualified, parameters, signature), f"def {name}("]
    lines += ["    *," if p is None else _argument_line(p) for p in with_star(parameters)]
    lines += [
        _result_line(signature.returns),
        '    """FILL: one sentence: what it computes, shapes, units."""',
        "    # FILL: the reference in plain PyTorch, slow and obviously right",
        f'    raise error("SL113", where="{qualified}, reference")',
    ]
    return "\n".join(lines + (_kernel_lines(draft, name, parameters) if draft.call else []))


def _decorator_lines(
    draft: Draft, qualified: str, parameters: Sequence[DraftParameter], signature: DraftSignature
) -> list[str]:
    """Return the source lines of the decorator ``@unfinished(...)`` of the drafted op ``qualified``. It names the
    arguments that the op writes to if they are known. Comments ``FILL:`` state what the author has to decide.
    """
    written = [p.name for p in parameters if p.written]
    known = draft.decorator == "adopt"  # a torch schema says what is written
    mutates = f", mutates=({', '.join(map(repr, written))},)".replace("'", '"') if written else ""
    if known:
        return [f'@unfinished("{qualified}"{mutates})  # FILL: sl.adopt, when the rest is done']
    must = "; it returns nothing, so there is one" if signature.returns == () else ""
    return [
        f'@unfinished("{qualified}", mutates=())  # FILL: arguments that it writes to{must}; then sl.op',
    ]


def _drop_dynamic_defaults(parameters: Sequence[DraftParameter]) -> list[DraftParameter]:
    """Return the parameters without defaults that are not literals, and without the defaults before them. Python
    requires defaults last. The source of a dropped default is appended to ``original``.
    """
    kept = names_with_default(parameters)
    return [
        p
        if p.name in kept
        else replace(p, original=p.original + (f" = {p.default}" if p.default else ""), default=None)
        for p in parameters
    ]


def _argument_line(p: DraftParameter) -> str:
    """Return the source line of one argument of a draft. A comment ``FILL:`` marks a type or a default that the author
    has to fill in.
    """
    default = "" if p.default is None else f" = {p.default}"
    dropped = p.original.partition(" = ")[2]
    if p.type == "object":
        was = f"it was {p.original}: " if p.original else ""
        fill = f"  # FILL: {was}a tensor with dims, int, float, bool, str or a list of them"
    elif p.open:
        fill = '  # FILL: dtype and dims, such as Float[Tensor, "n c"]'
    else:
        fill = f"  # FILL: its default was {dropped}, which is no literal" if dropped == "..." else ""
        fill = fill or (f"  # FILL: its default was {dropped}" if dropped else "")
    return f"    {p.name}: {p.type}{default},{fill}"


def _result_line(returns: tuple[str, ...] | None) -> str:
    """Return the source line of the return annotation ``returns`` of a draft. A comment ``FILL:`` marks types of
    results that the author has to fill in. If ``returns`` is None, nothing is known of the results.
    """
    if returns == ():
        return ") -> None:"
    if returns is None:
        return ") -> Tensor:  # FILL: what it returns; the signature does not say"
    kind = returns[0] if len(returns) == 1 else f"tuple[{', '.join(returns)}]"
    if not any(DraftParameter("", r).open for r in returns):
        return f") -> {kind}:"
    what = "dims of the inputs, or bounds= for a size that depends on data"
    if any(r != "Tensor" and DraftParameter("", r).open for r in returns):
        what = f"fresh tensors only, a fixed number of them; {what}"
    return f") -> {kind}:  # FILL: {what}"


def _kernel_lines(draft: Draft, name: str, parameters: Sequence[DraftParameter]) -> list[str]:
    """Return the source lines of a kernel of the op ``name``. It calls the original function of the draft with the op's
    arguments, ``parameters``, and returns its results.
    """
    arguments = ", ".join(f"{p.name}={p.name}" if p.keyword_only else p.name for p in parameters)
    signature = ", ".join("*" if p is None else p.name for p in with_star(parameters))
    return [
        "",
        "",
        f'@{name}.kernel("cpu", name="{draft.call}")  # FILL: the device type that it runs on',
        f"def _({signature}):",
        f"    return {draft.call}({arguments})",
    ]


NO_LITERAL = "..."  # a default that has no source
P = TypeVar("P", bound=DraftParameter | SchemaField)


def names_with_default(parameters: Sequence[DraftParameter] | Sequence[SchemaField]) -> set[str]:
    """Return the names of the arguments that can keep their default in a drafted signature. Python admits a default
    only behind the last positional argument without one. The default must also be a literal.
    """
    positional = [p for p in parameters if not p.keyword_only]
    keep = len(positional)
    while keep and positional[keep - 1].default not in (None, NO_LITERAL):
        keep -= 1
    named = {p.name for p in positional[keep:]} | {p.name for p in parameters if p.keyword_only}
    return named - {p.name for p in parameters if p.default == NO_LITERAL}


def with_star(parameters: Sequence[P]) -> list[P | None]:
    """Return the parameters as a list, with None inserted before the first keyword-only one. Python's signature has
    ``*`` there.
    """
    listed: list[P | None] = [*parameters]
    first = next((i for i, p in enumerate(parameters) if p.keyword_only), None)
    if first is not None:
        listed.insert(first, None)
    return listed
