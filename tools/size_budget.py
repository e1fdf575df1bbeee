"""Hold files and functions to the sizes in ``size-budget.toml``.

A file counts all its lines. A function counts the lines of its body that hold code, without blank lines, comments and
its docstring, and one for its signature: the formatter gives each parameter a line of its own, which says nothing about
how much there is to understand. The budget file grants exceptions, each with a reason; one that is no longer
needed is flagged as well, so that the list cannot rot.

Usage: ``size_budget.py [ROOT]``, by default this repository; exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = {".py"}
CPP = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Size:
    """The lines of one file (``function`` is empty) or one function."""

    path: str
    function: str
    lines: int
    at: int = 1

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.function


@dataclass(frozen=True)
class Budget:
    """The limits, and the exceptions as (path, function) to granted lines."""

    file: int
    function: int
    granted: dict[tuple[str, str], int]

    @classmethod
    def load(cls, path: Path) -> Budget:
        """Read a budget file; an exception without a reason is an error."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        granted = {}
        for entry in data.get("exception", []):
            if not entry.get("reason", "").strip():
                raise SystemExit(f"{path}: the exception for {entry['path']} gives no reason")
            granted[entry["path"], entry.get("function", "")] = entry["lines"]
        return cls(data["limits"]["file"], data["limits"]["function"], granted)

    def limit(self, size: Size) -> int:
        """Return the most lines that ``size`` may have without an exception."""
        return self.function if size.function else self.file


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield (qualified name, node) for each function under ``node``, nested ones and methods included."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, Function | ast.ClassDef)
        name = f"{prefix}{child.name}" if named else prefix
        if isinstance(child, Function):
            yield name, child
        yield from functions(child, f"{name}." if named else prefix)


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines of ``source`` that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}


def function_sizes(path: str, source: str) -> Iterator[Size]:
    """Yield the size of each function of a Python file."""
    code = code_lines(source)
    for name, node in functions(ast.parse(source)):
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        lines = {n for part in body for n in range(_begins(part), (part.end_lineno or part.lineno) + 1)}
        yield Size(path, name, len(code & lines - {node.lineno}) + 1, node.lineno)


def _begins(statement: ast.stmt) -> int:
    """The first line of ``statement``, a decorator's where it has one."""
    return min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])


def sizes(root: Path) -> Iterator[Size]:
    """Yield the sizes of all source files under ``root`` and of the functions of the Python ones."""
    for file in sorted((*root.glob("src/**/*"), *root.glob("packages/*/src/**/*"))):
        if file.suffix not in PYTHON | CPP or "CMakeFiles" in file.parts:
            continue
        path = file.relative_to(root).as_posix()
        source = file.read_text(encoding="utf-8")
        yield Size(path, "", len(source.splitlines()))
        if file.suffix in PYTHON:
            yield from function_sizes(path, source)


def findings(root: Path) -> Iterator[str]:
    """Yield one line for each size over its budget and each exception that excuses nothing."""
    budget = Budget.load(root / "size-budget.toml")
    needed = set()
    for size in sizes(root):
        if size.lines <= budget.limit(size):
            continue
        needed.add(size.key)
        limit = budget.granted.get(size.key, budget.limit(size))
        if size.lines > limit:
            what = size.function or "file"
            yield f"{size.path}:{size.at}: {what} has {size.lines} lines, its budget is {limit}"
    for path, function in sorted(budget.granted.keys() - needed):
        yield f"size-budget.toml: the exception for {path} {function}".rstrip() + " is not needed"


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there is one, else 0."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    listed = list(findings(root))
    print("\n".join(listed), end="\n" if listed else "")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
