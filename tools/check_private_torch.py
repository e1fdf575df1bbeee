"""Only ``shiplap.torch_private`` may touch private torch: flag every other use of it in the packages.

Private is every module or attribute under ``torch`` with a part that starts with an underscore, wherever it stands:
``torch._ops``, ``torch.utils._pytree``, ``torch.fx._symbolic_trace``. Found are imports, attributes through any chain
that starts at torch or at a name bound to a part of it, ``getattr`` and ``import_module`` with a literal name, and
annotations in quotes. Functions that torch documents in spite of their underscore are in ``DOCUMENTED``. The syntax
tree is read, so texts and comments raise no alarm; a private attribute of a value (``node._args``) is not seen, since
only running the program could tell what the value is.

Usage: ``check_private_torch.py [FILE_OR_DIRECTORY ...]``, by default ``packages/*/src``; exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTING = ROOT / "packages" / "shiplap-testing" / "src" / "shiplap_testing"
ALLOWED = (
    ROOT / "packages" / "shiplap" / "src" / "shiplap" / "torch_private",
    TESTING / "private.py",  # what tests need: it puts things in the place of Inductor's own
    TESTING / "defects",  # programs of others, with a fault each: they do what others do
)

# name -> the page of https://docs.pytorch.org/docs that tells users to call it
DOCUMENTED = {
    "torch._assert": "generated/torch._assert.html",
    "torch._check": "user_guide/torch_compiler/compile/dynamic_shapes_troubleshooting_guardon_errors.html",
    "torch._register_device_module": "generated/torch.utils.rename_privateuse1_backend.html",
}

# A function that takes the name of a module, and one that takes an object and the name of its attribute.
IMPORTERS = frozenset({"import_module", "__import__", "find_spec"})
GETTERS = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def private_part(path: str) -> str:
    """The private name that ``path`` begins with (``torch._C`` of ``torch._C._nn.gelu``), or nothing."""
    parts = path.split(".")
    if parts[0] != "torch":
        return ""
    for end, part in enumerate(parts[1:], start=2):
        special = part.startswith("__") and part.endswith("__")
        if part.startswith("_") and not special:
            name = ".".join(parts[:end])
            return "" if name in DOCUMENTED else name
    return ""


class Uses(ast.NodeVisitor):
    """Collects ``uses``: (line, private name). ``names`` maps a local name to the part of torch that it is bound to.

    A function sees the names around it, and what it binds ends with it.
    """

    def __init__(self) -> None:
        self.uses: set[tuple[int, str]] = set()
        self.names: dict[str, str] = {"torch": "torch"}

    def flag(self, node: ast.AST, path: str) -> None:
        """Note ``path`` if it is private; ``node`` says where."""
        if name := private_part(path):
            self.uses.add((getattr(node, "lineno", 1), name))

    def path(self, node: ast.AST) -> str:
        """The dotted path under torch that an expression spells, or nothing."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            before = self.path(node.value)
            return f"{before}.{node.attr}" if before else ""
        if isinstance(node, ast.Call):
            return self.called(node)
        return ""

    def called(self, node: ast.Call) -> str:
        """The path that ``getattr(torch, "_C")`` or ``import_module("torch._C")`` returns, or nothing."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [a.value if isinstance(a, ast.Constant) and isinstance(a.value, str) else "" for a in node.args]
        if name in IMPORTERS and texts:
            return texts[0] if texts[0].partition(".")[0] == "torch" else ""
        if name in GETTERS and len(texts) > 1 and texts[1]:
            before = self.path(node.args[0])
            return f"{before}.{texts[1]}" if before else ""
        return ""

    # --- imports ---

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if private_part(alias.name):
                self.uses.add((node.lineno, alias.name))
            top = alias.name.partition(".")[0]
            if alias.asname:
                self.bind(alias.asname, alias.name if top == "torch" else "")
            else:
                self.bind(top, top if top == "torch" else "")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        ours = node.level == 0 and module.partition(".")[0] == "torch"
        for alias in node.names:
            path = f"{module}.{alias.name}" if ours else ""
            if private_part(path):
                self.uses.add((node.lineno, module if private_part(module) else private_part(path)))
            self.bind(alias.asname or alias.name, path)

    # --- expressions ---

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.flag(node, self.path(node))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.flag(node, self.path(node))

    def visit_Call(self, node: ast.Call) -> None:
        self.flag(node, self.called(node))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """``sys.modules["torch._C"]``."""
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.value, ast.Attribute) and node.value.attr == "modules" and isinstance(key, str):
            self.flag(node, key)
        self.generic_visit(node)

    # --- what names are bound to ---

    def bind(self, name: str, path: str) -> None:
        """From here on ``name`` is this part of torch; something else if the path is empty, or flagged already."""
        if path and not private_part(path):
            self.names[name] = path
        else:
            self.names.pop(name, None)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.bind(target.id, self.path(node.value))
            else:
                self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.bind(node.target.id, self.path(node.value) if node.value is not None else "")
        else:
            self.visit(node.target)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args):
            self.visit(part)
        if node.returns is not None:
            self.annotation(node.returns)
        self.inside(node.args, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self.inside(node.args, [node.body])

    def inside(self, arguments: ast.arguments, body: list[ast.stmt] | list[ast.expr]) -> None:
        """Visit the body of a function with its arguments bound, and forget afterwards what it bound."""
        around = dict(self.names)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                self.bind(argument.arg, "")
        for part in body:
            self.visit(part)
        self.names = around

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation is not None:
            self.annotation(node.annotation)

    def annotation(self, node: ast.expr) -> None:
        """Visit an annotation, and what it has in quotes; a text that is no expression is a shape."""
        self.visit(node)
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    quoted = ast.parse(part.value, mode="eval")
                except SyntaxError:
                    continue
                self.visit(ast.increment_lineno(quoted, part.lineno - 1))


def private_uses(source: str) -> list[tuple[int, str]]:
    """(line, private name) of each use of private torch in ``source``, in order."""
    uses = Uses()
    uses.visit(ast.parse(source))
    return sorted(uses.uses)


def python_files(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files that ``paths`` name or contain, but for the allowed ones."""
    files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    yield from sorted(file for file in files if not any(file.resolve().is_relative_to(a) for a in ALLOWED))


def main(arguments: list[str]) -> int:
    """Print each finding as ``file:line: what``; return 1 if there is one, else 0."""
    paths = [Path(a) for a in arguments] or sorted((ROOT / "packages").glob("*/src"))
    findings = [
        f"{file}:{line}: {what} is private; give torch_private a function for what you need of it"
        for file in python_files(paths)
        for line, what in private_uses(file.read_text(encoding="utf-8"))
    ]
    print("\n".join(findings), end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
