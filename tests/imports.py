"""What a module of our packages imports: wherever the import stands, also in a function or for a type checker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shiplap_testing.paths import REPOSITORY


@dataclass(frozen=True)
class Import:
    """One import: ``name`` of ``module``, or ``module`` itself where ``name`` is empty; and the line of it."""

    module: str
    name: str
    line: int

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def modules(package: str) -> dict[str, Path]:
    """Every module of a distribution (``shiplap-dense``), by its full name."""
    root = REPOSITORY / "packages" / package / "src"
    paths: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports_of(source: str, inside: str) -> Iterator[Import]:
    """What ``source`` imports, the text of a module in the package ``inside``.

    The text that ``import_module`` takes counts, and so does the first argument of ``late``, by which a family names a
    module of the package that it stands in.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = inside.split(".")[: len(inside.split(".")) + 1 - node.level] if node.level else []
            home = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (Import(home, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = node.args[0].value
            if called in ("import_module", "late"):
                yield Import(text if called == "import_module" else f"{inside}.{text}", "", node.lineno)
