"""The owner of a source line (torch, Python, an installed package, the user), and its code."""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from shiplap.doctor.diagnosis import SourcePlace

# A frame as Python prints it in a traceback.
_FRAME_LINE = re.compile(r'^ +File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_SITE_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+?)(?:\.py)?(?:/|$)")
_STDLIB_FOLDERS = tuple(str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in ("stdlib", "platstdlib"))
# Frames of these packages are the compiler's own and never the line to change.
_TORCH_PACKAGES = frozenset({"torch", "functorch", "torch._dynamo"})
# The doctor's frames lie between the user's call and the compiler when a function is diagnosed in this process.
_DOCTOR_FOLDER = str(Path(__file__).resolve().parent) + "/"


def parse_frames(text: str) -> list[SourcePlace]:
    """Return the frames of a printed traceback as source lines, from the outermost on."""
    return [make_place(file, int(line), function) for file, line, function in _FRAME_LINE.findall(text)]


def make_place(file: str, line: int, function: str = "") -> SourcePlace:
    """Return the source line number ``line`` of ``file``, with its source code and the package to which it belongs.
    ``function`` is the name of the function around it, or an empty string.
    """
    return SourcePlace(
        file, line, _original_function_name(function), linecache.getline(file, line).strip(), owning_package(file)
    )


def _original_function_name(function: str) -> str:
    """Return the name of the user's function for a name in torch's trace. Return an empty string for ``?``.

    Torch continues ``forward`` after a break as ``torch_dynamo_resume_in_forward_at_12``.
    """
    match = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_\d+", function)
    return "" if function == "?" else match[1].replace("__", "") if match else function


@cache
def owning_package(file: str) -> str:
    """Return the name of the installed package to which ``file`` belongs. Return ``"python"`` for the standard library,
    and an empty string for the user's own code.
    """
    # Ahead of the standard library, whose folder contains site-packages.
    if match := _SITE_PACKAGE.search(file):
        return match[1]
    if file.startswith("<frozen") or str(Path(file).resolve()).startswith(_STDLIB_FOLDERS):
        return "python"
    if file.startswith(_DOCTOR_FOLDER):
        return "shiplap"
    root = Path(file)
    while (root.parent / "__init__.py").is_file():
        root = root.parent
    installed = root.is_dir() and next(root.parent.glob("*.dist-info"), None) is not None  # pip install --target
    return root.name if installed else ""


def _is_outside_torch(p: SourcePlace) -> bool:
    """Return whether a source line is neither in torch nor in Python's standard library."""
    return p.package not in _TORCH_PACKAGES and p.package != "python"


def innermost_relevant(stack: Sequence[SourcePlace]) -> SourcePlace | None:
    """Return the innermost line of ``stack`` that is outside torch and Python's standard library. If all lines are
    inside these, return the innermost line. Return None for an empty stack.
    """
    return next((p for p in reversed(stack) if _is_outside_torch(p)), stack[-1] if stack else None)


def innermost_of_user(stack: Sequence[SourcePlace]) -> SourcePlace | None:
    """Return the innermost line of ``stack`` in the user's own code, or None if there is none."""
    return next((p for p in reversed(stack) if not p.package), None)


def relevant_chain(stack: Iterable[SourcePlace], end: SourcePlace) -> tuple[SourcePlace, ...]:
    """Return the lines of ``stack`` that lead to ``end``, without repetitions, from the first line of the user's code
    on.

    Lines in torch, in Python and in the code of ``shiplap doctor`` are left out. The last one is ``end``.
    """
    steps = [p for p in stack if _is_outside_torch(p) and not p.file.startswith(_DOCTOR_FOLDER)]
    # Frames ahead of the user's first line belong to a launcher such as torchrun.
    start = next((i for i, p in enumerate(steps) if not p.package), 0)
    unique = list(dict.fromkeys(steps[start:]))
    return (*(p for p in unique if (p.file, p.line) != (end.file, end.line)), end)


def statement_at(p: SourcePlace) -> ast.stmt | None:
    """Return the syntax node of the innermost statement that covers the line ``p``. Return None if there is none, or if
    the file cannot be parsed.
    """
    tree = _parse_file(p.file)
    return None if tree is None else innermost_statement(tree, p.line)


def innermost_statement(tree: ast.AST, line: int) -> ast.stmt | None:
    """Return the innermost statement of the syntax tree ``tree`` that covers the line ``line``, or None if there is
    none.
    """
    statements = (n for n in ast.walk(tree) if isinstance(n, ast.stmt))
    around = [n for n in statements if n.lineno <= line <= (n.end_lineno or n.lineno)]
    return around[-1] if around else None  # breadth first: the last is the innermost


@cache
def is_function_disabled(file: str, name: str) -> bool:
    """Return whether ``file`` marks its own function ``name`` with ``torch.compiler.disable``, as a decorator or by a
    call.
    """
    tree = _parse_file(file)
    for node in ast.walk(tree) if tree else ():
        marks: list[ast.expr] = []
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks = node.decorator_list
        elif isinstance(node, ast.Call) and any(ast.unparse(a).rpartition(".")[2] == name for a in node.args):
            marks = [node.func]
        if any(re.search(r"\.disable\b", ast.unparse(mark)) for mark in marks):
            return True
    return False


@cache
def imported_from(file: str, name: str) -> str:
    """Return the name of the module from which ``file`` imports ``name`` by ``from ... import``, or an empty string."""
    tree = _parse_file(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return node.module or ""
    return ""


@cache
def definition_line(file: str, line: int) -> int:
    """Return the line of the ``def`` of the innermost function of ``file`` around ``line``. Return ``line`` itself if
    it is outside a function.
    """
    # A later match lies deeper, so the innermost function wins.
    tree, start = _parse_file(file), line
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= line <= (node.end_lineno or node.lineno):
                start = node.lineno
    return start


def methods_around(place: SourcePlace) -> dict[str, ast.FunctionDef]:
    """Return the methods, by name, of the innermost class around the line ``place``. Return an empty dict if the line
    is in no class.
    """
    tree = _parse_file(place.file)
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)] if tree else []
    around = [c for c in classes if c.lineno <= place.line <= (c.end_lineno or c.lineno)]
    return {n.name: n for n in around[-1].body if isinstance(n, ast.FunctionDef)} if around else {}


@cache
def _parse_file(file: str) -> ast.Module | None:
    """Return the syntax tree of a file, or None if it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
