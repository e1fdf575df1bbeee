"""Which names of spconv, flex_gemm and cumm checkouts use, and which of them the facades have.

Usage: ``consumer_names.py [--least 0.95] FOLDER ...``. Python files are read, not run. A name counts once, wherever it
is used: ``from spconv.pytorch import X``, ``spconv.X`` behind ``import spconv.pytorch as spconv``, and ``spconv.X``
where a module of the checkout hands ``spconv`` on. Exit status 1 if less than the share given exists, or if a folder
has no such name.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from shiplap_sparse3d.drop_in import drop_in

PACKAGES = ("spconv", "flex_gemm", "cumm")
HANDED_ON = {"spconv": "spconv.pytorch", "flex_gemm": "flex_gemm"}  # what a checkout's own module calls them


def of_package(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def bindings(tree: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """For each import the local name, what it stands for, and whether that is a use of the last part itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if of_package(alias.name):
                    root = alias.name.partition(".")[0]
                    yield alias.asname or root, alias.name if alias.asname else root, False
                    yield "", alias.name, True
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                if node.level == 0 and of_package(module):
                    yield alias.asname or alias.name, f"{module}.{alias.name}", True
                elif alias.name in HANDED_ON:
                    yield alias.asname or alias.name, HANDED_ON[alias.name], False


def chain(node: ast.Attribute) -> list[str]:
    """``a.b.c`` as its parts; empty where it does not begin with a name."""
    parts, inner = [node.attr], node.value
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return [inner.id, *reversed(parts)] if isinstance(inner, ast.Name) else []


def used(text: str) -> set[str]:
    """The dotted names of the packages that a file uses, each as far as its first part that is no module."""
    tree = ast.parse(text)
    imports = list(bindings(tree))
    names = {target for _, target, use in imports if use}
    stands_for = {local: target for local, target, _ in imports if local}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (parts := chain(node)) and parts[0] in stands_for:
            names.add(".".join((stands_for[parts[0]], *parts[1:])))
    return names


def resolved(name: str) -> tuple[str, bool]:
    """The part of ``name`` up to the first thing that is no module, and whether it exists."""
    parts = name.split(".")
    here = importlib.import_module(parts[0])
    for at in range(1, len(parts)):
        inner = ".".join(parts[: at + 1])
        try:
            here = importlib.import_module(inner)
        except ModuleNotFoundError:
            return inner, hasattr(here, parts[at])
    return name, True


def files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*.py")) if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--least", type=float, default=0.95, help="the share that has to exist (default: 0.95)")
    given = parser.parse_args()
    known: dict[str, bool] = {}
    users: dict[str, set[str]] = defaultdict(set)
    with drop_in():
        for folder in given.folders:
            for path in files(folder):
                text = path.read_text(encoding="utf-8", errors="replace")
                try:
                    names = used(text) if any(package in text for package in PACKAGES) else set()
                except SyntaxError as e:
                    print(f"{path} cannot be read: {e}")
                    continue
                for name in names:
                    short, there = resolved(name)
                    if "." in short:
                        known[short] = there
                        users[short].add(folder.name)
    for name in sorted(known):
        print(f"{'exists ' if known[name] else 'MISSING'} {name:55} {', '.join(sorted(users[name]))}")
    idle = [folder.name for folder in given.folders if not any(folder.name in names for names in users.values())]
    if idle:
        print(f"uses none of these packages: {', '.join(idle)}")
    share = sum(known.values()) / max(1, len(known))
    print(f"{sum(known.values())} of {len(known)} names exist, {share:.1%}")
    return 0 if share >= given.least and not idle else 1


if __name__ == "__main__":
    raise SystemExit(main())
