"""Read the source of a candidate, without running it, for what no kernel needs and cheats live on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["suspicious"]

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


def suspicious(file: str) -> list[str]:
    """``line N: what`` for names that look at callers, at other objects of the interpreter, or change its code."""
    try:
        content = Path(file).read_bytes()
        if len(content) > LARGEST:
            return [f"more than {LARGEST} bytes, which nobody looks through"]
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return [f"line {line}: {what}" for line, what in sorted(set(_found(tree)))]


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
            line = getattr(node, "lineno", 0)
            if name in STACK:
                yield line, f"{name} looks at the callers"
            elif name in HEAP:
                yield line, f"{name} looks at objects of others"
            elif name in MEMORY:
                yield line, f"{name} changes the process that it runs in"
