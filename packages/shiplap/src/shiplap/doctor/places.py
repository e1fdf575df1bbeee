"""The owner of a source line (torch, Python, an installed package, the user), and its code."""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from shiplap.doctor.diagnosis import Place

_FRAME = re.compile(r'^ +File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_SITE = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
_PYTHON = tuple(str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("stdlib", "platstdlib"))
# Frames of these packages are the compiler's own and never the line to change.
_HIDDEN = frozenset({"torch", "functorch", "torch._dynamo"})
# The doctor's frames lie between the user's call and the compiler when a function is diagnosed in this process.
_OURSELVES = str(Path(__file__).resolve().parent) + "/"


def frames(text: str) -> list[Place]:
    """Return the frames of a printed traceback, outermost first."""
    return [place(file, int(line), function) for file, line, function in _FRAME.findall(text)]


def place(file: str, line: int, function: str = "") -> Place:
    """Return a line with its code and the package that it belongs to."""
    return Place(file, line, _original(function), linecache.getline(file, line).strip(), package(file))


def _original(function: str) -> str:
    """Return the name of the user's function: torch continues ``forward`` after a break as
    ``torch_dynamo_resume_in_forward_at_12``.
    """
    match = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_\d+", function)
    return "" if function == "?" else match[1].replace("__", "") if match else function


@cache
def package(file: str) -> str:
    """Return the installed package of ``file``, ``"python"`` for the standard library, an empty text for the user's own
    code.
    """
    # Ahead of the standard library, whose folder contains site-packages.
    if match := _SITE.search(file):
        return match[1]
    if file.startswith("<frozen") or str(Path(file).resolve()).startswith(_PYTHON):
        return "python"
    if file.startswith(_OURSELVES):
        return "shiplap"
    root = Path(file)
    while (root.parent / "__init__.py").is_file():
        root = root.parent
    installed = root.is_dir() and next(root.parent.glob("*.dist-info"), None) is not None  # pip install --target
    return root.name if installed else ""


def _foreign(p: Place) -> bool:
    """Whether a place is outside torch and Python's standard library."""
    return p.package not in _HIDDEN and p.package != "python"


def innermost(stack: Sequence[Place]) -> Place | None:
    """Return the innermost line outside torch and Python's standard library, else the innermost line."""
    return next((p for p in reversed(stack) if _foreign(p)), stack[-1] if stack else None)


def own(stack: Sequence[Place]) -> Place | None:
    """Return the innermost line of the user's own code, or None."""
    return next((p for p in reversed(stack) if not p.package), None)


def chain(stack: Iterable[Place], end: Place) -> tuple[Place, ...]:
    """Return the frames to ``end`` without torch, Python, the doctor and repetitions, from the user's first line on."""
    steps = [p for p in stack if _foreign(p) and not p.file.startswith(_OURSELVES)]
    # Frames ahead of the user's first line belong to a launcher such as torchrun.
    start = next((i for i, p in enumerate(steps) if not p.package), 0)
    unique = list(dict.fromkeys(steps[start:]))
    return (*(p for p in unique if (p.file, p.line) != (end.file, end.line)), end)


def statement(p: Place) -> ast.stmt | None:
    """Return the innermost statement that covers the line, parsed, or None where the source cannot be read."""
    tree = _parsed(p.file)
    if tree is None:
        return None
    innermost = None
    for node in ast.walk(tree):  # breadth first: the last that covers the line is the innermost
        if isinstance(node, ast.stmt) and node.lineno <= p.line <= (node.end_lineno or node.lineno):
            innermost = node
    return innermost


@cache
def definition(file: str, line: int) -> int:
    """Return the line on which the function around ``line`` is defined, below its decorators, or ``line`` itself
    outside of a function.
    """
    # A later match lies deeper, so the innermost function wins.
    tree, start = _parsed(file), line
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= line <= (node.end_lineno or node.lineno):
                start = node.lineno
    return start


@cache
def _parsed(file: str) -> ast.Module | None:
    """Return the syntax tree of a file, or None where it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
