"""A digest of what a source file means: the same for a file that was moved, formatted or commented, and for no other.

Python counts as its parsed tree, without docstrings, imports and types of local variables; C++ as its tokens, without
comments and includes; YAML as what it holds. A name that was imported counts as what it was imported from, but for
modules of this repository: which of them a function comes from is no part of a digest, and neither is where in the
repository a file lies. So modules may be moved and renamed, and functions may not.

The tokens are cut by regular expressions of our own and not by a highlighter's lexer: with a new version of that, every
recorded measurement would be out of date.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

__all__ = ["Repository", "combined", "digests"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def digests(pattern: str, repository: Repository) -> dict[str, str]:
    """For each file of ``repository`` that ``pattern`` names, by its path, a digest of 16 hexadecimal digits.

    Args:
        pattern: of files, or ``FILE::NAME`` or ``FILE::CLASS.NAME``: that definition in a Python file alone.

    Raises:
        FileNotFoundError: there is no such file, or no such definition in it.
    """
    file, _, definition = pattern.partition("::")
    paths = [path for path in sorted(repository.root.glob(file)) if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"nothing matches {pattern}")
    for path in paths:
        if (path, definition) not in repository.known:
            repository.known[path, definition] = _file(path, repository, definition)
    return {path.relative_to(repository.root).as_posix(): repository.known[path, definition] for path in paths}


def combined(parts: Iterable[str]) -> str:
    """One digest of several, whatever their order and however often each is there."""
    return _hash("\n".join(sorted(set(parts))).encode())


def _file(path: Path, repository: Repository, definition: str) -> str:
    data = path.read_bytes()
    if path.suffix == ".py":
        try:
            tree = ast.parse(data)
        except SyntaxError:  # somebody is in the middle of editing it
            return _hash(data)
        return _hash(json.dumps(_python(tree, repository, definition, path.name)).encode())
    kind = path.with_suffix("").suffix if path.suffix == ".jinja" else path.suffix
    if path.suffix in DATA:
        import yaml  # JSON is YAML, too; no other kind of source needs it

        return _hash(json.dumps(yaml.safe_load(data), default=str).encode())
    cut = _cmake if path.name == "CMakeLists.txt" else LANGUAGES.get(kind)
    return _hash("\0".join(cut(data.decode(), repository)).encode() if cut else data)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# -------------------------------------------------------------------------------------------------------- repository


class Repository:
    """A repository at one moment: its modules, how they and its paths are left out of a text, digests once computed."""

    def __init__(self, root: Path) -> None:
        """Look for the modules below ``root``, wherever scripts and packages import them from."""
        self.root, self.known = root, dict[tuple[Path, str], str]()
        inside = [root, *root.glob("packages/*")]
        bases = [*(p / "src" for p in inside), root / "benchmarks", root / "tools"]
        files = [f.relative_to(base) for base in bases for f in base.rglob("*.py")]
        files += [f.relative_to(p) for p in inside for top in ("tests", "examples") for f in (p / top).rglob("*.py")]
        self.modules = {".".join(p.parts) for f in files for p in (f.with_suffix(""), *f.parents) if p.parts}
        packages = "|".join(sorted({"shiplap", *(m for m in self.modules if re.fullmatch(r"shiplap_\w+", m))}))
        tops = f"src|packages|tests|benchmarks|examples|docs|tools|{packages}"
        self._path = re.compile(rf"(?<![\w./-])(?:{tops})(?:/[\w.*-]+)*/([\w.*-]*)")
        self._dotted = re.compile(rf"(?<![\w./-])(?:{packages}|tests)(?:\.[A-Za-z_]\w*)*(?![\w/-])")

    def without_module(self, dotted: str) -> str:
        """``dotted`` without the modules of ours that it begins with, as it is called where it is defined."""
        parts = dotted.split(".")
        if parts[0] not in self.modules:
            return dotted
        first = next((n for n in range(1, len(parts)) if ".".join(parts[: n + 1]) not in self.modules), len(parts) - 1)
        return ".".join(parts[first:])

    def text(self, text: str) -> str:
        """``text`` without the folders of paths and without the names of modules, where they are of the repository."""
        text = self._path.sub(lambda m: "/" + (m[1] if set(m[1]) & set(".*") else ""), text)
        return self._dotted.sub(lambda m: self._module(m[0]), text)

    def _module(self, dotted: str) -> str:
        parts = dotted.split(".")
        known = max(n for n in range(len(parts) + 1) if not n or ".".join(parts[:n]) in self.modules)
        if known > 1 or (known and parts[0].startswith("shiplap_")):  # not the plain word
            return ":" + ".".join(parts[known:])
        return dotted


# ------------------------------------------------------------------------------------------------------------ Python


def _python(tree: ast.Module, repository: Repository, definition: str, file: str) -> Json:
    """The meaning of ``tree``, or of one definition in it."""
    node: ast.AST = tree
    for part in definition.split(".") if definition else ():
        child = next((n for n in getattr(node, "body", ()) if part in _defined(n)), None)
        if child is None:
            raise FileNotFoundError(f"{file} defines no {definition}")
        node = child
    return _plain(_Meaning(_imported(tree), repository).visit(node))


def _defined(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [getattr(node, "name", ""), *(t.id for t in targets if isinstance(t, ast.Name))]


def _imported(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for; one that stands for several things in several functions is left out."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                names.setdefault(alias.asname or top, set()).add(top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")
    return {name: next(iter(origins)) for name, origins in names.items() if len(origins) == 1}


class _Meaning(ast.NodeTransformer):
    """Takes out what says where things are: imports, ``sys.path``, names of modules, paths.

    Docstrings go, too, and what only a type checker reads: annotations of local variables, and casts.
    """

    def __init__(self, imported: dict[str, str], repository: Repository) -> None:
        self.imported, self.repository = imported, repository
        self.local = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scope(node, local=True)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._scope(node, local=True)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scope(node, local=False)

    def _scope(self, node: ast.AST, local: bool) -> ast.AST:
        outside, self.local = self.local, local
        self.generic_visit(node)
        self.local = outside
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if self.local and isinstance(node.target, ast.Name):
            return self.visit_Assign(ast.Assign([node.target], node.value)) if node.value else None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        named = self._named(node.func)
        if named is not None and named.id == "typing.cast" and len(node.args) == 2:
            return cast(ast.AST, self.visit(node.args[1]))
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        self.generic_visit(node)
        return node if node.body or node.orelse else None  # ``if TYPE_CHECKING`` with nothing but imports

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        docstring = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if docstring or _is_search_path(node.value) else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        # A benchmark's list of sources is no part of what it measures: their digests are.
        about = any(_is_search_path(target) or _dotted(target) == "SOURCES" for target in node.targets)
        return None if about else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._named(node) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._named(node) or self.generic_visit(node)

    def _named(self, node: ast.expr) -> ast.Name | None:
        root, _, rest = (_dotted(node) or "").partition(".")
        if root not in self.imported:
            return None
        return ast.Name(self.repository.without_module(f"{self.imported[root]}.{rest}".rstrip(".")))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        above = isinstance(node.value, ast.Attribute) and node.value.attr == "parents"
        if above and any(isinstance(n, ast.Name) and n.id == "__file__" for n in ast.walk(node)):
            node.slice = ast.Constant("up")  # how deep the file lies
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        # Python 3.12.1 puts empty constants into format specifications.
        node.values = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(self.repository.text(node.value)) if isinstance(node.value, str) else node


def _dotted(node: ast.expr) -> str | None:
    """``a.b.c`` if that is all there is."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{before}.{node.attr}" if before and isinstance(node, ast.Attribute) else None


def _is_search_path(node: ast.expr) -> bool:
    """``sys.path.insert(...)``, or the target of ``sys.path[:0] = ...``."""
    inner = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else node
    return (_dotted(inner) or "").startswith("sys.path")


def _plain(value: object) -> Json:
    """A tree as JSON, without positions and without what differs between versions of Python."""
    if isinstance(value, ast.AST):
        fields = {name: _plain(v) for name, v in ast.iter_fields(value) if name not in ("ctx", "kind", "type_comment")}
        return {type(value).__name__: {name: v for name, v in fields.items() if v is not None and v != []}}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [type(value).__name__, repr(value)]


# ------------------------------------------------------------------------------------------------------------ tokens

INCLUDE = r"\{%-?\s*(?:include|import|from|extends)\b.*?%\}"
STRING = r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""

C = re.compile(
    rf"""
    (?P<directive> ^[^\S\n]*\#(?:\\\n|/\*.*?\*/|{STRING}|(?!//)[^\n])*)
    | (?P<skip> \{{\#.*?\#\}}|{INCLUDE}|//(?:\\\n|[^\n])*|/\*.*?\*/|\\\n|\n|[^\S\n]+)
    | (?P<string> (?:u8|[uUL])?R"(?P<end>[^()\s\\]*)\(.*?\)(?P=end)"|{STRING})
    | \.?\d(?:[eEpP][+-]|'?[\w.])* | \w+ | .
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
# Python with holes that Jinja fills: what a line is indented by counts, where it holds more than a comment.
LINES = re.compile(
    rf"""
    (?P<skip> \{{\#.*?\#\}}|{INCLUDE}|\#[^\n]*|[^\S\n]+)
    | (?P<line> \n[^\S\n]*)
    | (?P<string> \"{{3}}.*?\"{{3}}|'{{3}}.*?'{{3}}|{STRING})
    | \w+ | .
    """,
    re.VERBOSE | re.DOTALL,
)
CMAKE = re.compile(
    r"""
    (?P<skip> \#\[(?P<b>=*)\[.*?\](?P=b)\]|\#[^\n]*|\s+)
    | DESTINATION\s+(?P<where>[^\s()]+)
    | "(?:\\.|[^"\\])*" | [()] | [^\s()"\#]+
    """,
    re.VERBOSE | re.DOTALL,
)


# Named after the path of its file.
GUARD = re.compile(r"^#ifndef (\w+)\n#define \1$", re.MULTILINE)


def _c(text: str, repository: Repository) -> Iterator[str]:
    for match in C.finditer(GUARD.sub("#if", text, count=1)):
        if match["directive"]:
            inside = match[0].strip()[1:].strip()
            if not inside.startswith("include"):
                yield from ("#", *_c(inside, repository), "\n")  # a directive ends with its line
        elif not match["skip"]:
            yield repository.text(match[0]) if match["string"] else match[0]


def _lines(text: str, repository: Repository) -> Iterator[str]:
    line = ""
    for match in LINES.finditer(text):
        if match["line"]:
            line = match[0]
        elif not match["skip"]:
            if line:
                yield line
            line = ""
            yield repository.text(match[0]) if match["string"] else match[0]


def _cmake(text: str, repository: Repository) -> Iterator[str]:
    for match in CMAKE.finditer(text):
        if not match["skip"]:
            yield "DESTINATION" if match["where"] else repository.text(match[0]) if "/" in match[0] else match[0]


DATA = {".yaml", ".yml", ".json"}
LANGUAGES: dict[str, Callable[[str, Repository], Iterator[str]]] = {
    **dict.fromkeys((".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"), _c),
    **dict.fromkeys((".triton", ".py"), _lines),  # .triton.jinja, .py.jinja
    ".cmake": _cmake,
}
