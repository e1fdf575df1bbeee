"""Only ``compat/`` may touch private torch: flag every other use of it.

Flags ``import torch._x``, ``from torch._x import y``, and the internal packages as attributes (``torch._C.f``) or names
(``from torch import _C``). Underscored functions that torch documents, such as ``torch._check``, are not internals.
Works on the syntax tree, so strings and comments raise no alarm.

Usage: ``check_private_torch.py [FILE_OR_DIRECTORY ...]``, by default ``packages/*/src``; exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

INTERNALS = frozenset({"_C", "_dynamo", "_functorch", "_guards", "_inductor", "_library", "_subclasses"})
ALLOWED = Path("packages/shiplap/src/shiplap/compat")
ROOT = Path(__file__).resolve().parents[1]


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each private use of torch in ``source``."""
    tree = ast.parse(source)
    torch_names = {"torch"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch" and alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("torch._"))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.startswith("torch._"):
                yield node.lineno, node.module
            elif node.module == "torch":
                yield from ((node.lineno, f"torch.{alias.name}") for alias in node.names if alias.name in INTERNALS)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in INTERNALS
            and isinstance(node.value, ast.Name)
            and node.value.id in torch_names
        ):
            yield node.lineno, f"torch.{node.attr}"


def python_files(paths: list[Path]) -> list[Path]:
    """Return the Python files that ``paths`` name or contain, but for those of ``compat``."""
    files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return sorted(file for file in files if ROOT / ALLOWED not in file.resolve().parents)


def main(arguments: list[str]) -> int:
    """Print each finding as ``file:line: what``; return 1 if there is one, else 0."""
    findings = [
        f"{file}:{line}: {what} is private; give compat a function for what you need of it"
        for file in python_files([Path(a) for a in arguments] or sorted(ROOT.glob("packages/*/src")))
        for line, what in sorted(private_uses(file.read_text(encoding="utf-8")))
    ]
    print("\n".join(findings), end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
