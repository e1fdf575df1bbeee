"""The definitions of a repository's Python files, which names each of them uses, and how far tests are from a change.

A definition is a function, a class, a method or a name that a module assigns; the rest of a module is one more. One
uses another if its code has the other's name: by an import, as an attribute of a module that was imported, as an
attribute of some object, as an argument that is a fixture, or in a string of code. A name that several definitions have
leads to all of them, the more of them the further. A file that names another file leads there, too, as what is called
through a table or a decorator has no name where it is used; this way is longer.
"""

from __future__ import annotations

import ast
import heapq
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
LONGEST_TEXT = 20_000  # characters of a string that are searched for names

# What one step costs: to a definition that uses a name for sure, by an attribute of an unknown object, by a string;
# from a method to its class; from a definition to its module, from there to a module that names it, and to its tests.
SURE, ATTRIBUTE, STRING = 1.0, 1.3, 2.5
TO_CLASS, TO_MODULE, TO_USER, INTO_MODULE = 1.5, 3.0, 2.0, 2.0
WHOLE = 2.0  # to code that has a module as a value, of which it can use any definition
AMBIGUOUS, MOST_ALIKE = 0.5, 40
FURTHEST = 9.0


class Definition(NamedTuple):
    """A definition of a module.

    Attributes:
        name: the name by which others use it, or an empty string for the rest of the module.
        owner: the name of its class, or an empty string.
        first: the first of its lines, that of a decorator if it has any.
        last: the last of its lines.
        uses: the names that its code has: ``x`` for a variable, ``.x`` for an attribute, ``b.x`` for an attribute of
            the imported ``b``, ``(x`` for an argument, ``@x`` for a mark of pytest, and ``'x`` for a word of a string.
    """

    name: str
    owner: str
    first: int
    last: int
    uses: tuple[str, ...]


class Module(NamedTuple):
    """The definitions of a file, and a mapping from each imported name to the module and the name that it stands for.
    The second name is empty for a module.
    """

    definitions: list[Definition]
    imported: dict[str, tuple[str, str]]


def read_module(tree: ast.Module, package: str) -> Module:
    """Return the definitions of the syntax tree ``tree`` and what it imports. ``package`` is the package of the file,
    from which relative imports start.
    """
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                imported[alias.asname or first] = (alias.name if alias.asname else first, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.asname or alias.name] = (absolute(node, package), alias.name)
    definitions: list[Definition] = []
    rest: set[str] = set()
    for name, owner, node in _parts(tree.body, ""):
        # The methods of a class are definitions of their own.
        inner = {id(n) for n in node.body if isinstance(n, FUNCTIONS)} if isinstance(node, ast.ClassDef) else set[int]()
        uses = set(_uses(node, imported, inner))
        if name:
            lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]
            definitions.append(Definition(name, owner, min(lines), node.end_lineno or node.lineno, tuple(sorted(uses))))
        else:
            rest |= uses
    return Module([*definitions, Definition("", "", 0, 0, tuple(sorted(rest)))], imported)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module from which the import ``node`` takes names. ``package`` is the package of the
    file with the import.
    """
    parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    return ".".join([*parts, *([node.module] if node.module else [])])


def _parts(body: Iterable[ast.stmt], owner: str) -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield the name, the name of the class and the syntax node of each definition among the statements ``body`` of a
    module or, if ``owner`` is its name, of a class. The name is empty for a statement that defines nothing.
    """
    for node in body:
        if isinstance(node, FUNCTIONS):
            yield node.name, owner, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, owner, node
            yield from (
                part for part in _parts(node.body, node.name) if isinstance(part[2], (*FUNCTIONS, ast.ClassDef))
            )
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for block in ("body", "orelse", "finalbody", "handlers"):
                for each in getattr(node, block, ()):
                    yield from _parts(each.body if isinstance(each, ast.ExceptHandler) else [each], owner)
            yield "", owner, node
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)]
            for name in names or [""]:
                yield name, owner, node


def _uses(top: ast.AST, imported: Mapping[str, object], left_out: set[int]) -> Iterator[str]:
    """Yield the names that the code of ``top`` uses, in the form of ``Definition.uses``. Nodes whose ids are in
    ``left_out`` are skipped. ``imported`` holds the imported names.
    """
    stack: list[ast.AST] = [top]
    while stack:
        node = stack.pop()
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            base = node.value.id if isinstance(node.value, ast.Name) and node.value.id in imported else ""
            yield f"{base}.{node.attr}"
            if isinstance(node.value, ast.Attribute) and node.value.attr == "mark":
                yield f"@{node.attr}"
            if base:
                continue  # only one attribute of what was imported is used
        elif isinstance(node, ast.arg):
            yield f"({node.arg}"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {w for name in IDENTIFIER.findall(node.value[:LONGEST_TEXT]) for w in name.split(".")}
            yield from (f"'{word}" for word in words if len(word) > 2)
        stack += ast.iter_child_nodes(node)


Place = tuple[str, int]  # a file, and the number of a definition in it


class Definitions:
    """All definitions of a repository and the definitions that use each of them."""

    def __init__(
        self,
        modules: Mapping[str, Module],
        users: Mapping[str, Iterable[str]],
        home: Callable[[str, str], str],
        fixtures: Callable[[str], Iterable[str]],
    ) -> None:
        """Index the ``modules``, a mapping from files to what they define.

        ``users`` maps each file to the files that use it. ``home(module, name)`` returns the file in which the name
        of a module is defined, or the module's own file for an empty name. ``fixtures(file)`` returns the files whose
        fixtures the tests of a file can use.
        """
        self.modules, self.users, self.home, self.fixtures = modules, users, home, fixtures
        # For each name the definitions that use it, and the imported name whose attribute it is: an empty string for
        # an attribute of another object, and None for a variable.
        self.by_use: dict[str, list[tuple[Place, str | None]]] = defaultdict(list)
        self.alike: dict[str, int] = defaultdict(int)
        self.renamed: dict[str, set[str]] = defaultdict(set)
        self.of_modules: dict[str, list[Place]] = defaultdict(list)  # for each file what has its module as a value
        for file, (definitions, imported) in modules.items():
            for number, each in enumerate(definitions):
                self.alike[each.name] += 1
                for use in each.uses:
                    base, dot, attribute = use.partition(".")
                    self.by_use[attribute or use].append(((file, number), base if dot else None))
                    if use in imported and (module := self.home(".".join(filter(None, imported[use])), "")):
                        self.of_modules[module].append((file, number))
            for local, (_, name) in imported.items():
                if name and local != name:
                    self.renamed[name].add(local)

    def of_lines(self, file: str, lines: Iterable[int]) -> set[Place]:
        """Return the definitions of ``file`` that hold one of the ``lines``, the innermost ones. A line of none belongs
        to the rest of the module.
        """
        definitions, found = self.modules[file].definitions, set[Place]()
        for line in lines:
            around = [(d.last - d.first, n) for n, d in enumerate(definitions) if d.name and d.first <= line <= d.last]
            least = min((size for size, _ in around), default=None)
            found |= {(file, n) for size, n in around if size == least} or {(file, len(definitions) - 1)}
        return found

    def distances(self, changed: Iterable[Place]) -> dict[Place, float]:
        """Return a mapping from each definition that leads to one of ``changed`` to the least cost of a way there."""
        found: dict[Place, float] = {}
        queue = [(0.0, place) for place in changed]
        heapq.heapify(queue)
        while queue:
            cost, place = heapq.heappop(queue)
            if place in found or cost > FURTHEST:
                continue
            found[place] = cost
            for user, more in self._steps(place):
                if user not in found:
                    heapq.heappush(queue, (cost + more, user))
        return found

    def _steps(self, place: Place) -> Iterator[tuple[Place, float]]:
        """Yield each definition that uses the one at ``place``, with the cost of the step."""
        file, number = place
        definitions = self.modules[file].definitions
        name, owner = definitions[number][:2]
        if not name:
            for user in self.users.get(file, ()):
                if user in self.modules:
                    yield (user, len(self.modules[user].definitions) - 1), TO_USER
            if file.rpartition("/")[2].startswith("test_"):
                yield from (((file, n), INTO_MODULE) for n, d in enumerate(definitions) if d.name.startswith("test"))
            return
        yield (file, len(definitions) - 1), TO_MODULE
        yield from ((user, WHOLE) for user in self.of_modules.get(file, ()))
        special = name.startswith("__") and name.endswith("__")
        if owner:
            cost = SURE if special else TO_CLASS
            yield from (((file, n), cost) for n, d in enumerate(definitions) if d.name == owner)
        if special or self.alike[name] > MOST_ALIKE:
            return
        unsure = AMBIGUOUS * math.log2(self.alike[name])
        for user, base in self.by_use.get(name, ()):
            if (cost := self._cost_of_use(file, name, owner, user[0], name, base)) is not None:
                yield user, cost + (unsure if cost > SURE else 0)
        for local in self.renamed.get(name, ()):
            for user, base in self.by_use.get(local, ()):
                if base is None and self._cost_of_use(file, name, owner, user[0], local, base) == SURE:
                    yield user, SURE
        for user, _ in self.by_use.get(f"({name}", ()):
            if user[0] == file or file in self.fixtures(user[0]):
                yield user, SURE
        yield from ((user, STRING + unsure) for user, _ in self.by_use.get(f"'{name}", ()))

    def _cost_of_use(self, file: str, name: str, owner: str, user: str, local: str, base: str | None) -> float | None:
        """Return the cost of the step from the definition ``name`` of ``file`` to code of the file ``user`` that has
        ``local`` as a variable or, if ``base`` is not None, as an attribute. Return None if that stands for another
        definition.
        """
        imported = self.modules[user].imported
        if base is None:
            target = imported.get(local)
            if owner:
                return None
            if target is None:
                return SURE if user == file else None
            return SURE if target[1] == name and self.home(*target) == file else None
        if not base:
            return ATTRIBUTE if owner else 2 * ATTRIBUTE
        whole = ".".join(filter(None, imported[base]))
        if owner:
            return ATTRIBUTE if self.home(*imported[base]) == file else None
        return SURE if self.home(whole, name) == file else None
