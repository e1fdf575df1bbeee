"""Mutants of source files: which expressions can be changed, and how; drawn at random from each room alike."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from _record import ROOT

ROOMS = ("declare", "plan", "dispatch", "kernels/native")
SOURCE = "packages/shiplap/src/shiplap"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}
# Calls whose arguments are texts for people, types, or settings that Python checks.
NOT_CODE = ("error", "dataclass", "lru_cache", "cast", "TypeVar", "notice", "zip")


@dataclass(frozen=True)
class SourceMutant:
    """One changed expression.

    Attributes:
        kind: which rule changed it, such as ``compare``.
        line: where it begins, and ``last`` where it ends.
        start: its first byte in the file, and ``end`` the one after its last.
        inside: whether it is code of a function, which a fork can exchange.
        sha: of the file's bytes.
    """

    room: str
    number: int
    file: str
    line: int
    last: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    inside: bool
    sha: str

    @property
    def name(self) -> str:
        return f"{self.room.replace('/', '.')}-{self.number}"

    def change(self, data: bytes) -> bytes:
        return data[: self.start] + self.after.encode() + data[self.end :]


def find_sites(tree: ast.AST) -> Iterator[tuple[Any, str, bool]]:
    """Yield each expression or statement that can be changed, its kind, and whether it is code of a function."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}

    def place_of(node: ast.AST) -> bool | None:
        """Return whether ``node`` is code of a function, or None for texts and types."""
        inside = False
        while node in parents:
            parent = parents[node]
            if isinstance(parent, ast.Raise | ast.Assert | ast.arg | ast.JoinedStr):
                return None
            if isinstance(parent, ast.AnnAssign) and node is not parent.value:
                return None
            if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in NOT_CODE:
                return None
            if isinstance(parent, ast.If) and getattr(parent.test, "id", "") == "TYPE_CHECKING":
                return None
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                if node is parent.returns:
                    return None
                inside |= node in parent.body
            inside |= isinstance(parent, ast.Lambda) and node is parent.body
            node = parent
        return inside

    for node in ast.walk(tree):
        if (kind := kind_of(node)) and (inside := place_of(node)) is not None:
            yield node, kind, inside


def kind_of(node: ast.AST) -> str:
    """Return which rule changes ``node``, or an empty text."""
    if isinstance(node, ast.Compare):
        return "compare" if len(node.ops) == 1 and type(node.ops[0]) in SWAPS else ""
    if isinstance(node, ast.BinOp):
        texts = [n for n in (node.left, node.right) if isinstance(n, ast.JoinedStr | ast.Constant)]
        is_text = any(not isinstance(n, ast.Constant) or isinstance(n.value, str) for n in texts)
        return "arithmetic" if type(node.op) in SWAPS and not is_text else ""
    if isinstance(node, ast.Constant):
        return {int: "number", bool: "flag"}.get(type(node.value), "")
    if isinstance(node, ast.Return):
        return "return" if node.value is not None and not isinstance(node.value, ast.Constant) else ""
    if isinstance(node, ast.UnaryOp):
        return "not" if isinstance(node.op, ast.Not) else ""
    others = {ast.BoolOp: "and, or", ast.IfExp: "branches", ast.Break: "jump", ast.Continue: "jump"}
    return others.get(type(node), "")


def change_node(node: Any, kind: str) -> str:
    """Return the text of the changed ``node``."""
    made = copy.deepcopy(node)
    if kind == "compare":
        made.ops[0] = SWAPS[type(node.ops[0])]()
    elif kind in ("arithmetic", "and, or"):
        made.op = SWAPS[type(node.op)]()
    elif kind == "not":
        made = made.operand
    elif kind in ("number", "flag"):
        return repr(node.value + 1 if kind == "number" else not node.value)
    elif kind == "branches":
        made.body, made.orelse = made.orelse, made.body
    elif kind == "jump":
        return "continue" if isinstance(node, ast.Break) else "break"
    else:
        return "return None"
    return f"({ast.unparse(made)})"


def statement_lines(mutant: SourceMutant) -> range:
    """Return the lines of the innermost statement with the mutant, without those of the statements in it."""
    tree = ast.parse((ROOT / mutant.file).read_bytes())
    found = range(mutant.line, mutant.last + 1)
    for node in ast.walk(tree):  # inner ones after outer ones
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line and mutant.last <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            found = range(node.lineno, max(end or 0, mutant.last) + 1)
    return found


def draw_mutants(seed: int, each: int) -> tuple[list[SourceMutant], dict[str, int]]:
    """Return ``each`` mutants of each room, and the number of places from which they are drawn."""
    rng, drawn, places = random.Random(seed), list[SourceMutant](), dict[str, int]()
    for room in ROOMS:
        pool = []
        for path in sorted((ROOT / SOURCE / room).glob("*.py")):
            data = path.read_bytes()
            pool += [(path, data, *site) for site in find_sites(ast.parse(data))]
        places[room] = len(pool)
        rng.shuffle(pool)
        made = (make_mutant(room, number, *site) for number, site in enumerate(pool))
        drawn += islice((mutant for mutant in made if mutant), each)
    return sorted(drawn, key=lambda m: (m.number, m.room)), places


def make_mutant(
    room: str, number: int, path: Path, data: bytes, node: Any, kind: str, inside: bool
) -> SourceMutant | None:
    """Return the mutant at ``node``, or None if the changed file means the same or is not Python."""
    lines = [0]
    for line in data.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
    sha, name = hashlib.sha256(data).hexdigest()[:16], str(path.relative_to(ROOT))
    what = (kind, data[start:end].decode(), change_node(node, kind), start, end, inside, sha)
    mutant = SourceMutant(room, number, name, node.lineno, node.end_lineno, *what)
    with suppress(SyntaxError):
        if ast.dump(ast.parse(mutant.change(data))) != ast.dump(ast.parse(data)):
            return mutant
    return None


def keep_sample(mutants: list[SourceMutant], place: Path) -> list[SourceMutant]:
    """Return the sample of mutants that the file ``place`` keeps, or write ``mutants`` there if it does not exist.

    In a file that has changed since, a mutant is the nearest expression with the same text. Without one it is left out.
    """
    if not place.exists():
        place.write_text(json.dumps([asdict(mutant) for mutant in mutants]))
    kept = (find_again(SourceMutant(**each)) for each in json.loads(place.read_text()))
    return [mutant for mutant in kept if mutant]


def find_again(mutant: SourceMutant) -> SourceMutant | None:
    """Return a mutant of an earlier state of its file as one of the present state, or None if its expression is
    gone.
    """
    path = ROOT / mutant.file
    data = path.read_bytes() if path.exists() else b""
    if hashlib.sha256(data).hexdigest()[:16] == mutant.sha:
        return mutant
    sites = [site for site in find_sites(ast.parse(data)) if site[1] == mutant.kind]
    made = (make_mutant(mutant.room, mutant.number, path, data, *site) for site in sites)
    same = [each for each in made if each and (each.before, each.after) == (mutant.before, mutant.after)]
    return min(same, key=lambda each: abs(each.line - mutant.line), default=None)
