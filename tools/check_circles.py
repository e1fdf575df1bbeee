"""No circle among files: report every set of Python files that import each other, directly or in a ring.

All imports count: those at the top, those inside functions (lazy), those under ``if TYPE_CHECKING``, and
``importlib.import_module("a.literal")``. ``from package import name`` is an import of the module ``package.name`` where
there is one, else of the package's ``__init__``; that importing a module runs the ``__init__`` of the packages above it
is not counted, as every package would then be one circle. Works on syntax trees: nothing is imported.

Usage: ``check_circles.py [ROOT ...]``; a root is a directory that holds packages. Exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Import:
    """``source`` imports ``target`` in a line; ``how`` is empty for an import at the top of the file."""

    source: str
    target: str
    line: int
    how: str = ""


def modules(root: Path) -> dict[str, Path]:
    """Name of each module below ``root`` → its file."""
    by_name = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return by_name


def imports(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    """What the module ``name`` imports of the ``known`` ones."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node, how in _walk(ast.parse(file.read_text(encoding="utf-8")), ""):
        for target in _targets(node, package, known):
            if target != name:
                yield Import(name, target, node.lineno, how)


def _walk(node: ast.AST, how: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Every statement and expression, with what makes its imports unlike those at the top."""
    for child in ast.iter_child_nodes(node):
        inside = how
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside = "lazy"
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = "typing"
        if isinstance(child, (ast.stmt, ast.expr)):
            yield child, inside
        yield from _walk(child, inside)


def _targets(node: ast.stmt | ast.expr, package: str, known: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (target for alias in node.names if (target := _nearest(alias.name, known)))
    elif isinstance(node, ast.ImportFrom):
        home = _absolute(node.module or "", node.level, package)
        for alias in node.names:
            if target := _nearest(f"{home}.{alias.name}", known):
                yield target
    elif isinstance(node, ast.Call) and (name := _imported_by_name(node)):
        level = len(name) - len(name.lstrip("."))
        if target := _nearest(_absolute(name.lstrip("."), level, package), known):
            yield target


def _imported_by_name(node: ast.Call) -> str:
    """The literal of ``import_module("...")``, also where it is one of several parts, or empty."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function not in ("import_module", "__import__") or not node.args:
        return ""
    first = node.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _absolute(module: str, level: int, package: str) -> str:
    if not level:
        return module
    home = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*home, *([module] if module else [])])


def _nearest(name: str, known: Mapping[str, Path]) -> str:
    """The longest known module that ``name`` begins with: ``a.b.f`` of the module ``a.b``."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []
    for root in sorted(edges):
        work = [(root, iter(sorted(edges[root])))] if root not in index else []
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
            following = next((t for t in rest if t not in index or t in stack), None)
            if following is not None and following not in index:
                work.append((following, iter(sorted(edges[following]))))
                continue
            if following is not None:
                low[node] = min(low[node], index[following])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                at = stack.index(node)
                if len(stack) > at + 1:
                    components.append(sorted(stack[at:]))
                del stack[at:]
    return sorted(components)


def findings(roots: list[Path]) -> Iterator[str]:
    """For each circle its modules, then the imports among them."""
    known = {name: file for root in roots for name, file in modules(root).items()}
    every = [i for name, file in known.items() for i in imports(name, file, known)]
    edges: dict[str, set[str]] = {name: set() for name in known}
    for edge in every:
        edges[edge.source].add(edge.target)
    for circle in circles(edges):
        yield f"circle of {len(circle)} files: {', '.join(circle)}"
        for edge in sorted({i for i in every if {i.source, i.target} <= set(circle)}, key=lambda i: (i.source, i.line)):
            how = f" ({edge.how})" if edge.how else ""
            yield f"  {known[edge.source]}:{edge.line}: imports {edge.target}{how}"


def source_roots(repository: Path) -> list[Path]:
    """``src`` of each package of this repository."""
    return sorted(repository.glob("packages/*/src")) or [repository / "src"]


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there is one, else 0."""
    listed = list(findings([Path(a) for a in arguments] or source_roots(REPOSITORY)))
    print("\n".join(listed), end="\n" if listed else "")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
