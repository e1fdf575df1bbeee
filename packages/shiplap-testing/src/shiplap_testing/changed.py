"""The files and lines that a branch has changed, and the test files that reach them.

What changed is what git names between the merge base with ``main`` and the working tree. A file reaches what its text
names: modules that it imports, wherever the import stands; for a name that it takes from a package, the module from
which that package has the name, at once or when it is first used; modules and files that its texts name, such as a
template, or in tests the program of a process. A file that no other file names is reached by the modules of its folder.
A test file is also the nearest one to the module whose name it has. Tests of the room of a change come before others.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from shiplap_testing.definitions import Definition, Definitions, Module, Place, absolute, read_module
from shiplap_testing.paths import REPOSITORY

HUNK = re.compile(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@")
DOTTED = re.compile(r"\b[a-z]\w*(?:\.\w+)+")
PLUGIN = "shiplap_testing.plugin"
FILE = re.compile(r"[\w./-]*\w\.(?:py|cpp|cc|c|h|cmake|jinja|json|yaml|toml|md|txt|laz|cu|inc)\b")


def changed_files(base: str, root: Path = REPOSITORY) -> list[str]:
    """Return a sorted list of the files of the repository ``root`` that differ between the working tree and its merge
    base with the branch ``base``. Untracked files are among them.
    """
    merged = _git(root, "merge-base", base, "HEAD").strip()
    tracked = _git(root, "diff", "--name-only", "--no-renames", merged).splitlines()
    return sorted({*tracked, *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()})


def changed_lines(base: str, root: Path = REPOSITORY) -> dict[str, set[int]]:
    """Return the lines of each tracked file of the repository ``root`` that differ from its merge base with the branch
    ``base``, as numbers of lines in the working tree. A removed line counts as a change of the line before it and of
    the one after it.
    """
    merged = _git(root, "merge-base", base, "HEAD").strip()
    lines: dict[str, set[int]] = defaultdict(set)
    file = ""
    for line in _git(root, "diff", "--unified=0", "--no-renames", "--no-color", "--no-ext-diff", merged).splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif found := HUNK.match(line):
            first, count = int(found[1]), int(found[2] or 1)
            lines[file].update(range(first, first + count) if count else (first, first + 1))
    return lines


def _git(root: Path, *arguments: str) -> str:
    """Return the output of ``git`` with ``arguments`` in ``root``. Raise ``pytest.UsageError`` if git fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise pytest.UsageError(f"--changed: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Graph:
    """The graph of a repository's files.

    A file points to the files that use it by an import, a path or a fixture.

    Attributes:
        files: the files that git tracks or would track, below ``root``.
        users: a mapping from each file to the set of files that use it.
        uses: a mapping from each Python file to the number of files that it uses.
        modules: a mapping from each Python file to its definitions.
    """

    def __init__(self, root: Path = REPOSITORY, kept: Path | None = None) -> None:
        """Read all files of the repository ``root`` that git tracks or would track. Fill ``users``, which maps each
        file to those that name it, ``uses``, which maps each Python file to the number of files that it names, and
        ``modules``. If ``kept`` is given, a file there keeps what was read, so that only files that are edited later
        are read again.
        """
        self.root = root
        listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate").splitlines()
        self.files = frozenset(name for name in listed if (root / name).is_file())
        self._modules = {module: file for file in self.files if (module := _module_of(file))}
        self._named: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            self._named[file.rpartition("/")[2]].append(file)
        initial = [(m, f) for m, f in self._modules.items() if f.endswith("__init__.py")]
        self._exports = {module: self._exports_of(module, file) for module, file in initial}
        self._shared = self._shared_fixtures()
        self.users: dict[str, set[str]] = defaultdict(set)
        self.uses: dict[str, int] = {}
        self.modules: dict[str, Module] = {}
        before = _load_kept(kept, state := self._digest())
        after = {file: before.get(file) or self._read(file) for file in self.files if file.endswith(".py")}
        for file, (stamp, *read) in after.items():
            if stamp != self._stamp(file):
                after[file] = stamp, *read = self._read(file)
            named, definitions, imported = read
            self.modules[file] = Module(
                [Definition(*most, tuple(uses)) for *most, uses in definitions],
                {local: (module, name) for local, (module, name) in imported.items()},
            )
            self.uses[file] = len(named)
            for used in named:
                if used != file:
                    self.users[used].add(file)
        if kept is not None and after != before:
            _keep(kept, {"state": state, "files": after})
        self._add_unnamed_files()

    def _digest(self) -> str:
        """Return a digest of all on which the files that a file uses depend, other than the file itself: of the names
        of files, of the exports of packages, of shared fixtures, and of the code that reads them.
        """
        own = [Path(__file__), Path(__file__).with_name("definitions.py")]
        texts = [path.read_text(encoding="utf-8") for path in own]
        known = [sorted(self.files), sorted(self._exports.items()), sorted(map(str, self._shared)), sys.version, texts]
        known.append(sorted((name, sorted(used)) for name, used in self._shared.items()))
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def _stamp(self, file: str) -> list[int]:
        """Return the time of the last change of ``file`` in nanoseconds, and its size."""
        status = (self.root / file).stat()
        return [status.st_mtime_ns, status.st_size]

    def _read(self, file: str) -> list[Any]:
        """Return the stamp of the Python file ``file``, a sorted list of the files that it uses, its definitions and
        what it imports, as lists and dicts.
        """
        stamp, tree, module = self._stamp(file), self._tree(file), _module_of(file)
        named = {used for used in self._used(file, tree) if _is_of_tests(file) or not _is_test(used)}
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        definitions, imported = read_module(tree, package)
        return [stamp, sorted(named), [[*d[:-1], list(d.uses)] for d in definitions], imported]

    def _tree(self, file: str) -> ast.Module:
        """Return the syntax tree of the Python file ``file``, or an empty tree if the file cannot be parsed. Tests of
        that file report the error.
        """
        try:
            return ast.parse((self.root / file).read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            return ast.Module([], [])

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """Return a mapping from each file that reaches one of ``changed`` to the least number of steps to one of them.
        A step leads from a file to one that it uses by an import, a path or a fixture. Files of ``changed`` themselves
        have 0. A module that no file names is copied or loaded by its name, so that the nearest ``__init__.py`` around
        it counts as its user. If no test is reached, this holds for the modules that use it as well, and again.
        """
        steps = dict.fromkeys(changed, 0)
        queue = deque(steps)
        for file in list(steps):
            self._add_package_around(file, steps, queue)
        while True:
            # A breadth-first search reaches each file by the fewest steps first.
            while queue:
                file = queue.popleft()
                for user in self.users.get(file, ()):
                    if user not in steps:
                        steps[user] = steps[file] + 1
                        queue.append(user)
            if any(map(_is_test, steps)):
                return steps
            for file in list(steps):
                self._add_package_around(file, steps, queue)
            if not queue:
                return steps

    def _add_package_around(self, file: str, steps: dict[str, int], queue: deque[str]) -> None:
        """If ``file`` is a module of a package that no file names, add the nearest ``__init__.py`` around it that is
        not in ``steps`` yet to ``steps``, one step further than ``file``, and to ``queue``.
        """
        if not file.endswith(".py") or "/src/" not in file or self.users.get(file):
            return
        around = [f"{file[:at]}/__init__.py" for at, letter in enumerate(file) if letter == "/"]
        for nearest in [f for f in around if f in self.files and f not in steps][-1:]:
            steps[nearest] = steps[file] + 1
            queue.append(nearest)

    def test_costs(self, changed: Iterable[str], lines: Mapping[str, Iterable[int]]) -> dict[str, float]:
        """Return a mapping from each test function that uses a changed definition, such as ``tests/test_a.py::test_b``,
        to the cost of its way there, as of :meth:`Definitions.distances`. The definitions that changed are those with
        one of the ``lines`` of a file of ``changed``, all of a file without lines, and for a file that is not Python
        the modules that use it.
        """
        index = self._index
        places = set[Place]()
        for file in changed:
            if file in self.modules:
                every = range(len(self.modules[file].definitions))
                places |= index.of_lines(file, lines[file]) if lines.get(file) else {(file, n) for n in every}
            else:
                users = self.users.get(file, set()) & self.modules.keys()
                places |= {(user, len(self.modules[user].definitions) - 1) for user in users}
        costs: dict[str, float] = {}
        for (file, number), cost in index.distances(places).items():
            found = self.modules[file].definitions[number]
            if _is_test(file) and found.name.startswith("test"):
                costs["::".join(filter(None, (file, found.owner, found.name)))] = cost
        return costs

    @cached_property
    def _index(self) -> Definitions:
        """The definitions of all files and which of them use each other."""
        return Definitions(self.modules, self.users, self._home, self._fixture_files)

    def _home(self, module: str, name: str) -> str:
        """Return the file that defines ``name`` of ``module``, or that of the module ``name`` in a package, or an empty
        string if the repository has none.
        """
        for _ in range(4):
            if name and name in self._exports.get(module, {}):
                module = self._exports[module][name]
        whole = f"{module}.{name}" if name else module
        return self._modules.get(whole) or self._modules.get(module, "")

    def _fixture_files(self, file: str) -> set[str]:
        """Return the files whose fixtures the tests of ``file`` can use, without ``file`` itself."""
        return {*self._fixtures(file), self._modules.get(PLUGIN, "")}

    def tests(self, changed: Iterable[str]) -> list[str]:
        """Return a list of the test files that use one of the files ``changed`` (by an import, a path or a fixture),
        directly or through others, the nearest first. A test in the same first folder of its distribution
        as a change counts as two steps nearer. So does one whose name has a word of the changed file's, as
        ``test_merge.py`` for ``merge_tables.py`` or ``test_compiler.py`` for ``compile.py``, and one with
        the name of the changed module as a string, as tests name checks. Among equally near ones, those of
        the same distribution come first, and then those that name the fewest files. Files that need an
        accelerator come last. For a module that no test reaches, all tests of its distribution are
        returned.
        """
        changed = list(changed)
        steps = self.distances(changed)
        names, rooms = {_stem(file) for file in changed}, {_room(file) for file in changed}
        distributions, words = {_distribution(file) for file in changed}, set[str]().union(*map(_words, changed))
        quoted = re.compile("|".join(rf"[\"']{re.escape(Path(file).stem)}[\"']" for file in changed) or "(?!)")
        reached = [f for f in steps if _is_test(f) and f in self.files]
        reached += [f for f in self.files if _is_test(f) and _stem(f) in names and f not in steps]
        if not reached and any("/src/" in file and file.endswith(".py") for file in changed):
            reached = [f for f in self.files if _is_test(f) and _distribution(f) in distributions]

        def place(file: str) -> tuple[bool, bool, int, bool, int, str]:
            """Return the sort key of the test file ``file``. Tests named like a changed module come first, and other
            files for accelerators come last. The rest are sorted by their distance to a change, which is two steps less
            in the folder of a change, and two less for each way in which the file names it. Then those of the same
            distribution come first, then those that use the fewest files, and then they are sorted by name.
            """
            other = _stem(file) not in names and steps.get(file, 0) > 0
            named = bool(quoted.search((self.root / file).read_text(encoding="utf-8")))
            named += _have_a_word_in_common(_words(file), words)
            away = steps.get(file, 1) - 2 * (_room(file) in rooms) - 2 * named
            distant = _distribution(file) not in distributions
            return other and "/gpu/" in file, other, away, distant, self.uses.get(file, 0), file

        return sorted(reached, key=place)

    # ------------------------------------------------------------------------------------------------- what is named

    def _exports_of(self, package: str, file: str) -> dict[str, str]:
        """Return a mapping from each name that the package ``package`` takes from one of its modules to the name of the
        module. The names are read from the imports and from dicts of strings in ``file``, the package's
        ``__init__.py``.
        """
        homes: dict[str, str] = {}
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    homes[alias.asname or alias.name] = absolute(node, package)
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if (
                        isinstance(key, ast.Constant)
                        and isinstance(value, ast.Constant)
                        and value.value in self._modules
                    ):
                        homes[str(key.value)] = str(value.value)
        return homes

    def _used(self, file: str, tree: ast.Module) -> Iterator[str]:
        """Yield the files that the Python file ``file`` uses by imports, attributes of packages, strings and fixtures.
        ``tree`` is its syntax tree.
        """
        module = _module_of(file)
        initial = file.endswith("__init__.py")
        package = module if initial else module.rpartition(".")[0]
        bound: dict[str, str] = {}  # a local name -> the package that it stands for
        walked = list(ast.walk(tree))
        # A docstring mentions files without using them.
        docstrings = {id(n.value) for n in walked if isinstance(n, ast.Expr)}
        for node in _at_import(tree) if initial else walked:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._module(alias.name)
                    bound[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                home = absolute(node, package)
                for alias in node.names:
                    yield from self._name(home, alias.name)
                    if f"{home}.{alias.name}" in self._exports:
                        bound[alias.asname or alias.name] = f"{home}.{alias.name}"
            elif isinstance(node, ast.JoinedStr):
                yield from self._modules_of_f_string(node, package, initial)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not initial:
                yield from () if id(node) in docstrings else self._named_in_text(node.value, file, package)
        for node in walked:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
                yield from self._name(bound[node.value.id], node.attr)
        if _is_test(file):
            yield from self._fixtures(file)
            named = {n.arg for n in walked if isinstance(n, ast.arg)}
            yield from (used for name in named & self._shared.keys() for used in self._shared[name])

    def _module(self, name: str) -> Iterator[str]:
        """Yield the file of the module ``name`` and the ``__init__.py`` of each package around it, since an import of
        the module runs these too.
        """
        while name:
            if name in self._modules:
                yield self._modules[name]
            name = name.rpartition(".")[0]

    def _name(self, home: str, name: str, depth: int = 4) -> Iterator[str]:
        """Yield the files that ``from home import name`` runs. If ``home`` imports the name from another package, that
        package is followed too, through at most ``depth`` packages.
        """
        if f"{home}.{name}" in self._modules and name not in self._exports.get(home, {}):
            yield from self._module(f"{home}.{name}")
            return
        yield from self._module(home)
        if depth and name in self._exports.get(home, {}):
            yield from self._name(self._exports[home][name], name, depth - 1)

    def _modules_of_f_string(self, text: ast.JoinedStr, package: str, initial: bool) -> Iterator[str]:
        """Yield the files of all modules directly in the package whose name begins the f-string ``text``.

        Examples are ``f"P.{name}"`` and ``f"{__name__}.{name}"``. ``package`` is the package of the file that contains
        the f-string. ``initial`` says whether that file is the ``__init__.py`` of the package.
        """
        first = text.values[0] if text.values else None
        home = ""
        if isinstance(first, ast.Constant) and str(first.value).endswith("."):
            home = str(first.value)[:-1]
        elif isinstance(first, ast.FormattedValue) and ast.unparse(first.value) in ("__name__", "__package__"):
            home = package if initial or ast.unparse(first.value) == "__package__" else ""
        if home in self._exports:
            yield from (f for m, f in self._modules.items() if m.rpartition(".")[0] == home)

    def _named_in_text(self, text: str, file: str, package: str) -> Iterator[str]:
        """Yield the files that the string ``text`` in ``file`` names, as modules or by their paths. ``package`` is the
        package of ``file``. Outside of folders of tests, a string with blanks is prose and names no file.
        """
        if not _is_of_tests(file) and any(map(str.isspace, text)):
            return
        if text.isidentifier():  # as of late("module")
            if f"{package}.{text}" in self._modules and package.startswith("shiplap_"):
                yield self._modules[f"{package}.{text}"]
            return
        for name in DOTTED.findall(text):
            while name and name not in self._modules:
                name = name.rpartition(".")[0]
            if "." in name:
                yield self._modules[name]
        for name in FILE.findall(text):
            same = [f for f in self._named.get(name.rpartition("/")[2], ()) if f.endswith(name.lstrip("./"))]
            near = [f for f in same if f.rpartition("/")[0] == file.rpartition("/")[0]] or [
                f for f in same if _distribution(f) == _distribution(file)
            ]
            yield from near or (same if len(same) == 1 else ())

    def _fixtures(self, file: str) -> Iterator[str]:
        """Yield the ``conftest.py`` files from which pytest takes fixtures for the test file ``file``, the nearest
        first.
        """
        folder = file
        while folder := folder.rpartition("/")[0]:
            if f"{folder}/conftest.py" in self.files:
                yield f"{folder}/conftest.py"

    def _shared_fixtures(self) -> dict[str, set[str]]:
        """Return the fixtures of ``shiplap_testing.plugin``, the pytest plugin of all tests, by name. Each is mapped to
        the files that it uses.
        """
        file = self._modules.get(PLUGIN, "")
        functions = [n for n in ast.walk(self._tree(file)) if isinstance(n, ast.FunctionDef)] if file else []
        fixtures = [f for f in functions if any("fixture" in ast.unparse(d) for d in f.decorator_list)]
        return {f.name: set(self._used(file, ast.Module([f], []))) for f in fixtures}

    def _add_unnamed_files(self) -> None:
        """Record users for each file of a package or of the tests that no other file names by an import, a path or a
        fixture.

        Its users are the Python files of the nearest folder above it that contains any.
        """
        folders: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            if not file.endswith(".py"):
                continue
            folders[file.rpartition("/")[0]].append(file)
        for file in self.files:
            if file.endswith((".py", ".md")) or self.users.get(file) or not file.startswith(("packages/", "tests/")):
                continue
            folder = file
            while folder := folder.rpartition("/")[0]:
                if folder in folders:
                    self.users[file] |= set(folders[folder])
                    break


def _at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a package's ``__init__.py`` that run when the package is imported.

    ``tree`` is the syntax tree of the file. Imports for type checkers are left out. Of functions, only their f-strings
    are yielded, since these load modules by name.
    """
    stack: list[ast.AST] = [*tree.body]
    while stack:
        node = stack.pop()
        # A function runs after the import, so what it imports is not used by all who import the package.
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            stack += [n for n in ast.walk(node) if isinstance(n, ast.JoinedStr)]  # it loads its members by name
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            stack += ast.iter_child_nodes(node)


def _load_kept(kept: Path | None, state: str) -> dict[str, Any]:
    """Return what the file ``kept`` says of each Python file, or an empty dict if it is of another ``state``."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        if kept is not None and (read := json.loads(kept.read_bytes()))["state"] == state:
            files: dict[str, Any] = read["files"]
            return files
    return {}


def _keep(kept: Path, value: dict[str, Any]) -> None:
    """Write ``value`` to the file ``kept`` as JSON. Runs that do so at the same time leave the whole text of one."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(f"{kept.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
    beside.replace(kept)


def _module_of(file: str) -> str:
    """Return the name by which the Python file ``file`` of the repository is imported, or an empty string if it is not
    a Python file.
    """
    if not file.endswith(".py"):
        return ""
    path = file.removesuffix(".py").removesuffix("/__init__")
    if "/src/" in path:
        return path.partition("/src/")[2].replace("/", ".")
    if "/tests/" in path and path.startswith("packages/"):
        return f"tests.{path.partition('/tests/')[2]}".replace("/", ".")
    return path.replace("/", ".")


def _is_test(file: str) -> bool:
    """Return whether ``file`` is a test file, which is a ``test_*.py`` below a folder ``tests``."""
    name = file.rpartition("/")[2]
    return name.startswith("test_") and name.endswith(".py") and "tests" in file.split("/")


def _is_of_tests(file: str) -> bool:
    """Return whether ``file`` lies below a folder ``tests``."""
    return "tests" in file.split("/")


def _stem(file: str) -> str:
    """Return a string that is equal for a module and its test file. ``file`` is the path of either.

    It is ``shiplap op/fake`` for ``op/fake.py`` and ``op/test_fake.py`` of the distribution ``shiplap``. For other
    distributions it leaves out the folder, as in ``shiplap-dense cpu``.
    """
    parts = file.removesuffix(".py").split("/")
    inside = parts[4:] if parts[2:3] == ["src"] else parts[3:]
    named = "/".join(inside if _distribution(file) == "shiplap" else inside[-1:])
    return f"{_distribution(file)} {named.replace('test_', '')}"


def _room(file: str) -> str:
    """Return the distribution of ``file`` and its first folder in that distribution as one string, such as ``shiplap
    dispatch``.

    The string is equal for a module and its tests.
    """
    parts = file.split("/")
    inside = parts[4:-1] if parts[2:3] == ["src"] else parts[3:-1]
    return f"{_distribution(file)} {inside[0] if inside else ''}"


def _words(file: str) -> set[str]:
    """Return the words of four letters and more in the name of ``file``, without a final ``s``. Words are separated by
    underscores.
    """
    return {word.removesuffix("s") for word in _stem(file).rpartition("/")[2].split("_") if len(word) > 3}


def _have_a_word_in_common(words: set[str], others: set[str]) -> bool:
    """Return whether one of ``words`` begins one of ``others`` or the other way round, as ``compile`` does
    ``compiler``.
    """
    return any(word.startswith(other) or other.startswith(word) for word in words for other in others)


def _distribution(file: str) -> str:
    """Return the name of the folder below ``packages`` that holds ``file``, or an empty string if the file is
    elsewhere.
    """
    parts = file.split("/")
    return parts[1] if parts[0] == "packages" and len(parts) > 1 else ""
