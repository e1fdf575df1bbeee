"""Read a candidate, without running it, for names that no kernel needs and that cheats live on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from shiplap.referee.mine import numbers

__all__ = ["LOOKS", "constants", "suspicious", "suspicious_function"]

LARGEST = 2_000_000  # bytes
STACK = {
    "_getframe",
    "_current_frames",
    "_getframemodulename",
    "currentframe",
    "getouterframes",
    "f_back",
    "tb_frame",
    "extract_stack",
    "walk_stack",
    "format_stack",
    "print_stack",
    "dump_traceback",
    "dump_traceback_later",
    "get_object_traceback",
    "take_snapshot",
    "CapturedTraceback",
    "gather_traceback",
}
HEAP = {"get_objects", "get_referrers", "get_referents"}
MEMORY = {
    "mprotect",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "LD_PRELOAD",
    "clock_gettime",
    "pthread_create",
}
OF_PYTHON = {  # functions of Python's C interface
    "PyEval_GetFrame",
    "PyThreadState_GetFrame",
    "PyFrame_GetBack",
    "_PyThread_CurrentFrames",
    "PyEval_SetTrace",
    "PyEval_SetProfile",
    "PyUnstable_GC_VisitObjects",
}
LOOKS = STACK | HEAP | MEMORY | OF_PYTHON
"""Names whose use is held against a candidate, wherever it finds them."""


def suspicious(file: str) -> list[str]:
    """``line N: what`` for names that look at callers, at other objects of the interpreter, or change its code."""
    try:
        if Path(file).stat().st_size > LARGEST:
            return [f"more than {LARGEST} bytes, which nobody looks through"]
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [f"line {line}: {what}" for line, what in sorted(set(_found(tree)))]


def constants(file: str) -> list[float]:
    """Numbers in a source, also those in texts, which may be code: sizes and values at which a candidate may branch."""
    try:
        if Path(file).stat().st_size > LARGEST:  # ``suspicious`` says so
            return []
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    values: dict[float, None] = {}
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) is float or (type(value) is int and abs(value) < LARGEST):
            values[value] = None
        elif isinstance(value, str):
            values |= dict.fromkeys(numbers(value))
    return list(values)


def suspicious_function(fn: Any) -> list[str]:
    """The same for one function that is loaded, and for the functions of its module that it names."""
    reasons: dict[str, None] = {}
    left, seen = [getattr(fn, "fn", fn)], set[int]()  # a Triton kernel wraps its function
    while left:
        at = left.pop()
        if not isinstance(at, FunctionType) or id(at) in seen or at.__module__ != getattr(fn, "__module__", None):
            continue
        seen.add(id(at))
        names = _names(at.__code__)
        reasons |= dict.fromkeys(what for name in sorted(names) if (what := _about(name)))
        left += [at.__globals__[name] for name in names if name in at.__globals__]
    return list(reasons)


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes that a function and those inside it use, and its texts."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union((c for c in code.co_consts if isinstance(c, str)), *map(_names, inner))


def _about(name: str) -> str:
    """What is said of a name; empty for most."""
    if name in STACK or name in OF_PYTHON:
        return f"{name} looks at the callers"
    if name in HEAP:
        return f"{name} looks at objects of others"
    return f"{name} changes the process that it runs in" if name in MEMORY else ""


def _found(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
            if node.attr == "stack" and isinstance(node.value, ast.Name) and node.value.id == "inspect":
                yield node.lineno, "inspect.stack looks at the callers"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        for name in names:
            if what := _about(name):
                yield getattr(node, "lineno", 0), what
