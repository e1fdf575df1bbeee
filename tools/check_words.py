"""Hold names to the field's words: no name from the list of retired words, and few locals called ``found``.

A name is read before the code around it. ``found`` can hold anything that a function looked for, so it says nothing; a
local says what it holds (``match``, ``entries``, ``gradients``). The retired words were this project's own terms for
what the field calls a fallback, a reference, partial sums and so on, and a new reader cannot know them.

Checked are the names that Python code binds: functions, classes, arguments and variables. A name of somebody else, such
as ``torch.floor``, is used and not bound. ``size-budget.toml`` has the number of functions that may bind ``found``, as
``limits.found``; the number only falls.

Usage: ``check_words.py [ROOT]``, by default this repository; exit status 1 if a retired word is used, or if ``found``
is bound in more functions than granted.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

RETIRED = {
    "again": "remeasure, rerun, repeated",
    "apart": "disjoint, isolated, distance",
    "carried": "saved",
    "fate": "use",
    "floor": "fallback",
    "holes": "hooks",
    "law": "reference",
    "planes": "split_k, partial_sums",
    "roomy": "padded",
    "said": "message, reason, output",
}
FOLDERS = ("packages", "tests", "tools", "examples")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def bound(node: ast.AST) -> str:
    """The name that ``node`` binds, or nothing."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return ""


def retired(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each name in ``tree`` that is a retired word."""
    for node in ast.walk(tree):
        name = bound(node)
        if name.strip("_").lower() in RETIRED:
            yield getattr(node, "lineno", 0), name


def own(function: Function) -> Iterator[ast.AST]:
    """The nodes of ``function`` without those of the functions and classes inside it."""
    stack: list[ast.AST] = [function.args, *function.body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stack += ast.iter_child_nodes(node)


def vague(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each function in ``tree`` that binds ``found``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and "found" in map(bound, own(node)):
            yield node.lineno, node.name


def main(arguments: list[str]) -> int:
    """Print what is wrong; return 1 if anything is, else 0."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    budget = tomllib.loads((root / "size-budget.toml").read_text(encoding="utf-8"))["limits"]["found"]
    lines, functions = [], []
    for file in sorted(path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.py")):
        tree, path = ast.parse(file.read_text(encoding="utf-8")), file.relative_to(root).as_posix()
        for line, name in retired(tree):
            lines.append(f"{path}:{line}: the name {name!r} is retired; use {RETIRED[name.strip('_').lower()]}")
        functions += [f"{path}:{line}: {name} binds 'found'; name what it holds" for line, name in vague(tree)]
    if len(functions) > budget:
        lines += [*functions, f"{len(functions)} functions bind 'found', the budget is {budget}"]
    print("\n".join(lines), end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
