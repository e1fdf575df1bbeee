"""Which module of our packages imports which: wherever the import stands, also in a function or for a type checker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from shiplap_testing.paths import REPOSITORY

__all__ = ["Import", "circle", "graph", "imports_of", "modules"]


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
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


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
            called, text = ast.unparse(node.func).rpartition(".")[2], node.args[0].value
            if called in ("import_module", "late"):
                yield Import(text if called == "import_module" else f"{inside}.{text}", "", node.lineno)


def graph(package: str) -> dict[str, set[str]]:
    """The modules of a distribution and those of them that each imports."""
    known = modules(package)
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = imports_of(path.read_text(encoding="utf-8"), inside)
        found[name] = {i.full if i.full in known else i.module for i in imported} & known.keys() - {name}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as e:
        return [str(module) for module in e.args[1]]
    return []
