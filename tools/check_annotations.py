"""Hold the annotations ``Any`` and ``object`` of a folder to the density in ``size-budget.toml``.

Counted is every ``Any``, wherever it stands but for its import, and every ``object`` in an annotation, a type alias or
a cast: ``object.__new__`` says nothing about types. A budget is a number for each thousand lines of Python in a folder.

Usage: ``check_annotations.py [ROOT]``, by default this repository; exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

Annotated = ast.arg | ast.AnnAssign
Function = ast.FunctionDef | ast.AsyncFunctionDef


def vague(tree: ast.Module) -> int:
    """How often a file says ``Any`` or ``object`` of a type."""
    anywhere = sum(_is(node, "Any") for node in ast.walk(tree))
    return anywhere + sum(_is(node, "object") for name in _types(tree) for node in ast.walk(name))


def _is(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name
    return isinstance(node, ast.Attribute) and node.attr == name == "Any"


def _types(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions that are types: annotations, values of aliases, arguments of casts and of type variables."""
    for node in ast.walk(tree):
        if isinstance(node, Annotated) and node.annotation is not None:
            yield from _parsed(node.annotation)
            if (
                isinstance(node, ast.AnnAssign)
                and node.value is not None
                and "TypeAlias" in ast.unparse(node.annotation)
            ):
                yield from _parsed(node.value)
        elif isinstance(node, Function) and node.returns is not None:
            yield from _parsed(node.returns)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("cast", "TypeVar"):
            yield from (t for argument in [*node.args, *(k.value for k in node.keywords)] for t in _parsed(argument))


def _parsed(node: ast.expr) -> Iterator[ast.expr]:
    """A type, also where it is quoted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            yield ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return
    else:
        yield node


def density(folder: Path) -> tuple[int, int]:
    """``(how many, of how many lines)`` in all Python files of a folder."""
    sources = [file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))]
    return sum(vague(ast.parse(s)) for s in sources), sum(len(s.splitlines()) for s in sources)


def findings(root: Path) -> Iterator[str]:
    """One line for each folder over its budget, and for each that is not there."""
    budgets = tomllib.loads((root / "size-budget.toml").read_text(encoding="utf-8")).get("annotations", {})
    for path, most in budgets.items():
        count, lines = density(root / path)
        if not lines:
            yield f"{path}: no Python there"
        elif 1000 * count > most * lines:
            each = f"{1000 * count / lines:.1f} a thousand"
            yield f"{path}: {count} Any and object in {lines} lines, {each}; budget {most}"


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there is one, else 0."""
    listed = list(findings(Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]))
    print("\n".join(listed), end="\n" if listed else "")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
