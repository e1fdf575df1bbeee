"""Write the source of a module of drafted declarations: it imports, registers with Shiplap, and marks inferred
parts.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jaxtyping
import torch
from torch import Tensor

from shiplap.scaffold.infer import InferredDeclaration
from shiplap.scaffold.schema import SchemaField, SchemaForm
from shiplap.scaffold.skeleton import names_with_default, with_star

WIDTH, LONGEST = 118, 100  # of a line, of a sentence


@dataclass(frozen=True)
class DraftedOp:
    """An op of a drafted module. ``form`` is its schema, and ``known`` is the declaration inferred for it.

    ``doc`` is a sentence about the op, which was taken from the function ``documented``. ``notes`` are comments for the
    author. ``python`` is the name of the op in the module, or an empty string until :meth:`renamed` sets it.
    """

    form: SchemaForm
    known: InferredDeclaration
    doc: str = ""
    documented: str = ""
    notes: Sequence[str] = field(default_factory=list)
    python: str = ""

    def renamed(self, taken: set[str]) -> DraftedOp:
        """Return a copy of this op with a Python name that is not in ``taken``, and add the name to ``taken``. It is
        made from the op's name.
        """
        space, _, rest = self.form.name.partition("::")
        base = re.sub(r"\W", "_", rest)
        # These names are used by the module itself.
        base += "_" * (keyword.iskeyword(base) or base in ("sl", "error", "Tensor", "torch"))
        name = base if base not in taken else f"{space}_{base}"
        while name in taken:
            name += "_"
        taken.add(name)
        return replace(self, python=name)


def write_module_source(
    entries: Sequence[DraftedOp], left_out: Mapping[str, str], *, head: Sequence[str], home: str
) -> str:
    """Return the source of a module with the drafted declarations ``entries``. ``head`` holds the lines of its
    docstring. ``left_out`` holds the reason for each op without a draft, by name. The source imports the module
    ``home``, which registers the ops.
    """
    bodies = [write_op_source(e) for e in entries]
    # Imports depend on the bodies, so these are written first.
    text = "\n".join(bodies)
    classes = sorted({c for c in re.findall(r"(\w+)\[Tensor", text) if hasattr(jaxtyping, c)})
    imports = ["import torch"] if "torch." in text else []
    lines = ['"""' + head[0], "", *head[1:], '"""', "", f"import {home}  # noqa: F401 - registers the ops", *imports]
    lines += [f"from jaxtyping import {', '.join(classes)}"] if classes else []
    lines += ["from torch import Tensor"] if re.search(r"\bTensor\b", text) else []
    lines += ["", "import shiplap as sl", "from shiplap.errors import error"]
    source = "\n".join(lines) + "\n" + "".join(f"\n\n{body}\n" for body in bodies)
    if left_out:
        source += "\n\n# Not drafted:\n" + "".join(f"#   {name}: {why}\n" for name, why in left_out.items())
    ast.parse(source)  # a draft that does not parse is our defect, not the reader's
    return source


def adopt_keywords(form: SchemaForm, known: InferredDeclaration) -> dict[str, Any]:
    """Return the keyword arguments of ``sl.adopt(name, ...)`` for the inferred declaration ``known`` of the schema
    ``form``. Arguments with an empty value are left out.
    """
    fresh = len([r for r in form.results if not r.alias])
    taken = {a.name for a in form.arguments} | {"workspace"}
    usual = ["out"] if fresh == 1 else [f"out{i}" for i in range(fresh)]
    given: dict[str, Any] = {
        "mutates": form.mutates,
        "aliases": form.aliases,
        "specialize": form.specialize,
        "bounds": known.bounds,
        "requires": known.requires,
        # Declared outputs are called out, out0, ...; an argument of that name needs others.
        "outputs": tuple(f"result{i}" for i in range(fresh)) if taken & set(usual) else (),
        "fake": "reference" if known.reference else "",
    }
    return {k: v for k, v in given.items() if v}


def make_drafted_function(form: SchemaForm, known: InferredDeclaration) -> Callable[..., Any]:
    """Return a Python function with an empty body, from which a declaration can be read. It has the signature of the
    schema ``form``, with the annotations of the inferred declaration ``known``.
    """
    scope: dict[str, Any] = {**vars(jaxtyping), "torch": torch, "Tensor": Tensor, "inf": float("inf")}
    # The text holds names of a schema and annotations made here.
    exec("\n".join([*_signature_lines(form, known, "drafted", marks=False), "    ..."]), scope)
    function: Callable[..., Any] = scope["drafted"]
    function.__module__ = __name__
    return function


def write_op_source(entry: DraftedOp) -> str:
    """Return the Python source of the drafted declaration of one op. Comments state what was inferred. The word
    ``FILL`` stands wherever the author has to complete the declaration.
    """
    form, known = entry.form, entry.known
    given = [f"{k}={_source_of_value(v)}" for k, v in adopt_keywords(form, known).items()]
    lines = [*_wrap_comment(f"# {form.schema}"), *(f"# {note}" for note in entry.notes)]
    inferred = [k for k in ("bounds", "requires") if adopt_keywords(form, known).get(k)]
    if inferred:
        lines.append(f"# inferred: {' and '.join(inferred)}, from {known.where.get('samples', known.where['return'])}")
    lines += [*_adopt_call_lines(f'"{form.name}"', *given), *_signature_lines(form, known, entry.python, marks=True)]
    lines.append(f'    """{entry.doc or "FILL: one sentence: what it computes, shapes, units."}"""')
    lines += [f"    # inferred: the sentence is that of {entry.documented}"] if entry.documented else []
    lines += [
        "    # FILL: the reference in plain PyTorch, slow and obviously right",
        f'    raise error("SL113", where="{form.name}, reference")',
    ]
    if known.sampler:
        lines += ["", "", f"@{entry.python}.samples  # inferred: {known.where['samples']}"]
        lines += ["def _(rng, sizes, dtype, device):", *(f"    {line}" for line in known.sampler)]
    return "\n".join(lines)


def _adopt_call_lines(*given: str) -> list[str]:
    """Return the source lines of the decorator ``@sl.adopt(...)`` with the arguments ``given``. It is one line if that
    is at most ``WIDTH`` long, and otherwise has one line for each argument.
    """
    line = f"@sl.adopt({', '.join(given)})"
    return [line] if len(line) <= WIDTH else ["@sl.adopt(", *(f"    {g}," for g in given), ")"]


def _wrap_comment(text: str) -> list[str]:
    """Return the lines of a comment. ``text`` is the comment on one line, which begins with ``#``. If it is too long,
    it is wrapped after commas.
    """
    lines, rest = [], text
    # A schema has no spaces inside of its types, so it is cut between arguments.
    while len(rest) > WIDTH and (cut := rest.rfind(", ", 0, WIDTH)) > 0:
        lines.append(rest[: cut + 1])
        rest = "#     " + rest[cut + 2 :]
    return [*lines, rest]


def _source_of_value(value: Any) -> str:
    """Return the Python source of a string, tuple, dict or other literal. A tuple of one element that is not None is
    written as that element.
    """
    if isinstance(value, tuple):
        return (
            _source_of_value(value[0])
            if len(value) == 1 and value[0] is not None
            else f"({', '.join(map(_source_of_value, value))})"
        )
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_source_of_value(k)}: {_source_of_value(v)}" for k, v in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _signature_lines(form: SchemaForm, known: InferredDeclaration, name: str, *, marks: bool) -> list[str]:
    """Return the source lines of ``def name(...) -> ...:``, one for each argument of the schema ``form``, with the
    annotations of the inferred declaration ``known``.

    If ``marks`` is true, comments state what was inferred and what is left open. Otherwise there are no comments.
    """
    lines, keeping = [f"def {name}("], names_with_default(form.arguments)
    for a in with_star(form.arguments):
        if a is None:
            lines.append("    *,")
            continue
        annotation = a.annotation(known.tensors.get(a.name, "")) if a.tensor else a.annotation()
        default = "" if a.default is None or a.name not in keeping else f" = {a.default}"
        lines.append(f"    {a.name}: {annotation}{default}," + _comment_of_argument(a, known) * marks)
    parts = [r.annotation(t) if r.tensor else r.annotation() for r, t in zip(form.results, known.results, strict=True)]
    result = "None" if not parts else parts[0] if len(parts) == 1 else f"tuple[{', '.join(parts)}]"
    where = known.where.get("return", "")
    note = where if where.startswith("not inferred") else f"inferred: {where}"
    return [*lines, f") -> {result}:" + (f"  # {note}" if where and marks else "")]


def _comment_of_argument(argument: SchemaField, known: InferredDeclaration) -> str:
    """Return the comment behind an argument in the source. It states from what the annotation was inferred, and has
    ``FILL`` if something is left open. It is empty if nothing is known or open.
    """
    where = known.where.get(argument.name, "")
    fill = "; FILL: the dtype" if argument.name in known.open and where else ""
    if argument.name in known.open and not where:
        return "  # FILL: dtype and dims"
    return f"  # inferred: {where}{fill}" if where else ""


def first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring on one line. If it is longer than ``LONGEST`` characters, it is cut at a
    word and ends in ``...``. Characters that would end another docstring are removed.
    """
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    first = re.split(r"(?<=[.!?])\s", paragraph)[0]
    # The sentence stands inside of triple quotes in the draft.
    plain = first.replace("\\", "").replace('"""', "").rstrip('"')
    return plain if len(plain) <= LONGEST else plain[:LONGEST].rpartition(" ")[0] + " ..."
