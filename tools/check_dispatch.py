"""What an object can do is declared by its type: flag ``hasattr``, ``getattr`` and caught ``AttributeError``.

Held to this are the rooms in ``ROOMS``, whose objects are our own. Names that torch gives to dtypes and the like
(``getattr(torch, name)``) are data, and pass. What remains asks about objects of other libraries or of users; each such
use is listed in ``tools/dispatch.toml`` with its reason, and an entry that excuses nothing is flagged too.

Usage: ``check_dispatch.py [ROOT]``, by default this repository; exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path("packages/shiplap/src/shiplap")
ROOMS = ("declare", "plan", "dispatch", "kernels", "tuning", "inductor", "audit")
LIST = Path("tools/dispatch.toml")


@dataclass(frozen=True)
class Use:
    """One question about what an object has, as it stands in a file."""

    path: str
    line: int
    what: str

    @property
    def key(self) -> tuple[str, str]:
        return self.path, self.what


def uses(path: str, source: str) -> Iterator[Use]:
    """Every such question of a file; ``what`` is the call, or the handler's exceptions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            if not (isinstance(node.args[0], ast.Name) and node.args[0].id == "torch"):
                yield Use(path, node.lineno, ast.unparse(node))
        elif isinstance(node, ast.ExceptHandler) and node.type is not None and _catches(node.type):
            yield Use(path, node.lineno, f"except {ast.unparse(node.type)}")
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and any(map(_catches, node.args))
        ):
            yield Use(path, node.lineno, ast.unparse(node))


def _catches(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "AttributeError" for n in ast.walk(node))


def allowed(file: Path) -> dict[tuple[str, str], str]:
    """(path, what) → reason of the list; an entry without a reason is an error."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("use", []) if file.is_file() else []
    for entry in entries:
        if not entry.get("reason", "").strip():
            raise SystemExit(f"{file}: {entry['path']}: {entry['what']} has no reason")
    return {(entry["path"], entry["what"]): entry["reason"] for entry in entries}


def findings(root: Path) -> Iterator[str]:
    """One line for each use that is not listed, and for each entry of the list that is not needed."""
    listed, seen = allowed(root / LIST), set()
    for room in ROOMS:
        for file in sorted((root / HOME / room).rglob("*.py")):
            path = file.relative_to(root / HOME).as_posix()
            for use in uses(path, file.read_text(encoding="utf-8")):
                seen.add(use.key)
                if use.key not in listed:
                    yield f"{(HOME / path).as_posix()}:{use.line}: {use.what}: say by a type what the object can do"
    for path, what in sorted(listed.keys() - seen):
        yield f"{LIST.as_posix()}: the entry for {path}: {what} is not needed"


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there is one, else 0."""
    listed = list(findings(Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]))
    print("\n".join(listed), end="\n" if listed else "")
    return bool(listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
