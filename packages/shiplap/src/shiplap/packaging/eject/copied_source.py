"""``SourceCopy``: functions of Python copied into a module of plain sources, with all that they use.

A copied function keeps its body as it is written. The functions, classes and constants that it uses come along from the
module of the function and from the modules beside it; other packages are imported. A use of a declared op becomes a use
of the torch op of the same name.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from shiplap.declare.code_text import GLOBAL_LOADS
from shiplap.dispatch import Op

OWN_PACKAGES = ("shiplap", "jaxtyping")  # a copy imports neither: annotations are dropped
MARKER = "--8<--"  # of documentation that quotes the source


class CannotCopy(Exception):
    """The error which says that a function cannot be written without Shiplap. Its message is the reason."""


@dataclass
class _ModuleSource:
    """The source code of a module, and the statements at its top that bind names.

    Attributes:
        bound: for each name, the last statement that binds it.
        changed: the names whose value further statements change. For them, ``bound`` does not give the whole value.
    """

    module: ModuleType
    lines: list[str]
    tree: ast.Module
    bound: dict[str, ast.stmt] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, module: ModuleType) -> _ModuleSource:
        """Return the source of a module, with the statement at its top that binds each name. Raise ``CannotCopy`` if
        the module is not a file.
        """
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError):
            raise CannotCopy(f"the source of the module {module.__name__} is not in a file") from None
        made = cls(module, text.splitlines(), ast.parse(text))
        for statement in _top_statements(made.tree.body):
            for name in _bound_names(statement):
                made.bound[name] = statement  # the last one is in force
        made.changed.update(_changed_names(module, made.tree.body))
        return made

    def text(self, node: ast.stmt) -> str:
        """Return the source code of the statement ``node`` with its decorators and comments, without indentation. Lines
        that mark quotations for the documentation are left out.
        """
        # The line of a ``def`` is behind its decorators.
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        lines = [line for line in self.lines[first - 1 : node.end_lineno] if MARKER not in line]
        return textwrap.dedent("\n".join(lines))


def _top_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements at the top of a module in order. For ``if`` and ``try``, yield the statements inside them
    instead.
    """
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            inner = [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", []) for s in h.body)]
            yield from _top_statements(inner)
        else:
            yield node


def _bound_names(node: ast.stmt) -> list[str]:
    """Return the names to which the statement ``node`` gives a value by a definition, an import or an assignment. The
    list is empty for other statements.
    """
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            # ``import a.b`` binds the name a.
            return [a.asname or a.name.partition(".")[0] for a in names]
        case ast.Assign(targets=targets):
            return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            return [name]
    return []


def _changed_names(module: ModuleType, body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names whose value is not made by one statement. Such a name is set several times or in a loop, or an
    item of it is set. It may also be a list, dict or set of which a method is called. A name may be yielded several
    times.
    """
    seen: set[str] = set()
    for statement in _top_statements(body):
        bound = _bound_names(statement)
        # Two statements bind it, so neither alone makes its value.
        yield from seen.intersection(bound)
        seen.update(bound)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                    yield name
                case ast.AugAssign(target=ast.Name(id=name)):
                    yield name
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                    # A method such as append or update may have changed it.
                    if isinstance(vars(module).get(name), (list, dict, set)):
                        yield name
                case ast.Name(id=name, ctx=ast.Store()) if not bound:
                    yield name


class SourceCopy:
    """The source code of one new module, collected function by function.

    Attributes:
        imports: the import statements, each once.
        blocks: the copied statements. A statement comes after those that it needs.
        ops: the declared ops that copied code calls, by the name that it uses.
    """

    def __init__(self, taken: Mapping[str, object] | None = None) -> None:
        """Start an empty module. ``taken`` maps reserved names to their values. The module may use such a name only for
        that value.
        """
        self.imports: dict[str, None] = {}
        self.blocks: list[str] = []
        self.ops: dict[str, Op] = {}
        self._names: dict[str, object] = dict(taken or {})  # of the new module, and what each stands for
        self._sources: dict[str, _ModuleSource] = {}

    def function(self, function: Callable[..., Any], name: str) -> str:
        """Copy ``function`` into the new module under ``name``, with everything that it uses, and return the name.
        Annotations and decorators are left out.

        Raise ``CannotCopy`` if that is not possible.
        """
        plain = inspect.unwrap(function)
        if not isinstance(plain, FunctionType):
            raise CannotCopy(f"{function!r} is no function of Python")
        # A copy at the top of a module cannot read the variables of another function.
        if plain.__closure__:
            free = ", ".join(plain.__code__.co_freevars)
            raise CannotCopy(f"the function {plain.__qualname__} reads {free} of the function around it")
        if name in self._names:
            if self._names[name] is plain:
                return name
            raise CannotCopy(f"two things are called {name}")
        # Before its body is followed, so that a recursive function ends here.
        self._names[name] = plain
        source, node = self._definition(plain)
        self._bind_globals(source, _global_names(plain.__code__), plain.__globals__)
        self._bind_globals(
            source, _names_in([*node.args.defaults, *(d for d in node.args.kw_defaults if d)]), plain.__globals__
        )
        # After what it uses, which must be defined first.
        self.blocks.append(_plain_definition(source, node, name))
        return name

    def helper(self, function: Callable[..., Any]) -> str:
        """Copy a function of Shiplap that generated checks call, and return its name. A function that is already copied
        is not copied again. Raise ``CannotCopy`` if it cannot be copied.
        """
        return self.function(function, function.__name__)

    def triton_function(self, kernel: Any) -> str:
        """Copy a ``@triton.jit`` function as it is written, with everything that it uses, and return its name. Raise
        ``CannotCopy`` if that is not possible.
        """
        plain = kernel.fn
        return self._bind(plain.__name__, self._source_of(plain), plain.__globals__)

    def module(self, module: ModuleType) -> str:
        """Add an import of a module of Python's library under its own name, and return the name. Raise ``CannotCopy``
        if the name is taken.
        """
        name = module.__name__
        if self._names.setdefault(name, module) is not module:
            raise CannotCopy(f"two things are called {name}")
        self.imports[f"import {name}"] = None
        return name

    def op_name(self, op: Op, wanted: str = "") -> str:
        """Return the name under which copied code calls a declared op, and add the op to ``ops``.

        A name that the op already has is used again. Otherwise it is ``wanted`` or, if that is empty, the op's own
        name. Raise ``CannotCopy`` if the name is taken.
        """
        name = next((n for n, other in self.ops.items() if other is op), wanted or op.spec.stem)
        if self._names.setdefault(name, op) is not op:
            raise CannotCopy(f"two things are called {name}")
        self.ops[name] = op
        return name

    def _source_of(self, function: FunctionType) -> _ModuleSource:
        """Return the source of the module that defines a function. Raise ``CannotCopy`` if the module is not loaded or
        is not a file.
        """
        module = sys.modules.get(function.__module__)
        if module is None:
            raise CannotCopy(f"the module {function.__module__} of {function.__qualname__} is not loaded")
        return self._source(module)

    def _source(self, module: ModuleType) -> _ModuleSource:
        """Return the source of a module. Each module is read once for this ``SourceCopy``. Raise ``CannotCopy`` if the
        module is not a file.
        """
        if module.__name__ not in self._sources:
            self._sources[module.__name__] = _ModuleSource.read(module)
        return self._sources[module.__name__]

    def _definition(self, function: FunctionType) -> tuple[_ModuleSource, ast.FunctionDef]:
        """Return the source of the module that defines ``function``, and the statement that defines it. Raise
        ``CannotCopy`` for a function not written as ``def``, such as a lambda.
        """
        source, line = self._source_of(function), function.__code__.co_firstlineno
        named = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == function.__name__]
        for node in named:
            # co_firstlineno is the line of the first decorator, where there is one.
            if line in (node.lineno, *(d.lineno for d in node.decorator_list)):
                return source, node
        raise CannotCopy(f"the function {function.__qualname__} is not written as a def in {source.module.__name__}")

    def _bind_globals(self, source: _ModuleSource, names: Iterator[str] | list[str], world: Mapping[str, Any]) -> None:
        """Make ``names`` available in the new module, by copies or imports from ``source``. Only names in ``world``,
        the globals of the copied code, are considered. Raise ``CannotCopy`` if a name cannot be made available.
        """
        for name in names:
            # A module has names of its own for some that it does not define, such as __name__.
            if name in world and not (name.startswith("__") and hasattr(builtins, name)):
                self._bind(name, source, world)

    def _bind(self, name: str, source: _ModuleSource, world: Mapping[str, Any]) -> str:
        """Give ``name`` in the new module the meaning that it has in the module ``source``, and return the name.

        The name is bound to an op, an import, a literal or a copied statement. ``world`` holds the globals of the
        module. Raise ``CannotCopy`` if the name has another meaning already, or if its value cannot be copied.
        """
        value = world[name]
        if name in self._names:
            if self._names[name] is not value and self._names[name] is not getattr(value, "fn", value):
                raise CannotCopy(f"two things are called {name}")
            return name
        self._names[name] = value
        if isinstance(value, Op):
            self.ops[name] = value
        elif isinstance(value, ModuleType):
            # The module itself is not copied, only what is used of it.
            if _is_beside(value, source.module):
                raise CannotCopy(f"{name} is the module {value.__name__} beside it: import the function by its name")
            self._import(value.__name__, name)
            for each in _top_statements(source.tree.body):  # `import a.b` binds the name a
                if isinstance(each, ast.Import):
                    dotted = [a.name for a in each.names if a.asname is None and a.name.startswith(f"{name}.")]
                    self.imports |= dict.fromkeys(f"import {path}" for path in dotted)
        elif (statement := source.bound.get(name)) is None or (
            name in source.changed and not _is_definition(statement, value)
        ):
            self.blocks.append(f"{name} = {_literal(name, value)}")
        elif isinstance(statement, ast.ImportFrom):
            self._import_from(statement, name, value, source)
        elif isinstance(statement, ast.Import):
            raise CannotCopy(f"{name} is imported in a way that has no plain form")
        else:
            self._copy_statement(statement, source, world)
        return name

    def _copy_statement(self, statement: ast.stmt, source: _ModuleSource, world: Mapping[str, Any]) -> None:
        """Copy a statement of the module ``source`` into the new module. If it names Shiplap or jaxtyping, all its
        annotations are left out.

        The names that the statement reads are made available, too. ``world`` holds the globals of the module. Raise
        ``CannotCopy`` if such a name cannot be made available.
        """
        for other in _bound_names(statement):
            self._names.setdefault(other, world.get(other))
        own = ast.parse(ast.unparse(statement)).body[0]
        if isinstance(own, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign)):
            own = _WithoutAnnotations().visit(own)
        self._bind_globals(source, list(_free_names(ast.unparse(own))), world)
        # The author's text is kept where it needs no change.
        plain = ast.unparse(own) if _mentions_own_package(statement, world) else source.text(statement)
        self.blocks.append(plain)

    def _import_from(self, statement: ast.ImportFrom, name: str, value: Any, source: _ModuleSource) -> None:
        """Make available ``name``, which ``statement`` of the module ``source`` imports from another module. If both
        modules are of one package or folder, copy the name's definition. Otherwise import the name in the new module.
        """
        asked = next(a.name for a in statement.names if (a.asname or a.name) == name)
        home = "." * statement.level + (statement.module or "")
        if statement.level:
            # The dots of a relative import count from the package of the module that contains it.
            package = source.module.__package__ or ""
            parts = package.split(".")[: len(package.split(".")) - statement.level + 1]
            home = ".".join([*parts, *([statement.module] if statement.module else [])])
        module = sys.modules.get(home)
        if module is not None and _is_beside(module, source.module):
            bound = self._bind(asked, self._source(module), vars(module)) if asked != name else None
            if bound is None:
                # Bound again, with the meaning that it has in the other module.
                del self._names[name]
                self._bind(name, self._source(module), vars(module))
            else:
                self.blocks.append(f"{name} = {bound}")
            return
        self._refuse_own(home, name)
        self.imports[f"from {home} import {asked}" + (f" as {name}" if name != asked else "")] = None

    def _import(self, module: str, name: str) -> None:
        """Add an import of a module under ``name``. Raise ``CannotCopy`` if the module belongs to Shiplap or declares
        ops.
        """
        self._refuse_own(module, name)
        if module in sys.modules and _declares_ops(sys.modules[module]):
            raise CannotCopy(f"{name} is the module {module}, which declares ops: import the function by its name")
        self.imports[f"import {module}" if module == name else f"import {module} as {name}"] = None

    def _refuse_own(self, module: str, name: str) -> None:
        """Raise ``CannotCopy`` if ``module`` belongs to Shiplap or to one of its families, which are the packages named
        ``shiplap_*``. Copied code uses ``name`` of that module.
        """
        package = module.partition(".")[0]
        if package == "shiplap" or package.startswith("shiplap_"):
            raise CannotCopy(f"its code uses {name} of {module}")


def _declares_ops(module: ModuleType) -> bool:
    """Return whether a declared op is among the globals of a module."""
    return any(isinstance(v, Op) for v in vars(module).values())


def _is_beside(module: ModuleType, other: ModuleType) -> bool:
    """Return whether two modules belong together, so that one is copied with the other. That is so if they are of one
    package or are scripts in one folder.
    """
    first, second = (m.__name__.partition(".")[0] for m in (module, other))
    if first == second:
        return True
    files = [getattr(m, "__file__", None) for m in (module, other)]
    # Scripts in one folder import each other by plain names.
    if any(f is None for f in files) or "." in module.__name__ + other.__name__:
        return False
    return Path(str(files[0])).parent == Path(str(files[1])).parent


def _is_definition(statement: ast.stmt, value: Any) -> bool:
    """Return whether ``statement`` is the ``def`` of the function that ``value`` is, wraps or compiles."""
    plain = inspect.unwrap(getattr(value, "fn", value))  # of a Triton kernel
    if not isinstance(statement, ast.FunctionDef) or not isinstance(plain, FunctionType):
        return False
    return plain.__code__.co_firstlineno in (statement.lineno, *(d.lineno for d in statement.decorator_list))


def _mentions_own_package(statement: ast.stmt, world: Mapping[str, Any]) -> bool:
    """Return whether a name in a statement belongs to Shiplap or jaxtyping. Names in annotations count, too. ``world``
    holds the globals of the module.
    """
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id in world:
            value = world[node.id]
            module = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
            if module.partition(".")[0] in OWN_PACKAGES:
                return True
    return False


def _global_names(code: CodeType) -> list[str]:
    """Return the global names that ``code`` and the functions in it load, in order, each once."""
    found = [i.argval for i in dis.get_instructions(code) if i.opname in GLOBAL_LOADS]
    # Functions inside of it load globals, too.
    found += [n for c in code.co_consts if isinstance(c, CodeType) for n in _global_names(c)]
    return list(dict.fromkeys(found))


def _names_in(nodes: list[ast.expr]) -> list[str]:
    """Return the names that occur in the expressions ``nodes``, in order."""
    return [n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)]


def _free_names(text: str) -> Iterator[str]:
    """Yield, sorted, the names that the source code ``text`` reads from a global scope. Names that it binds at its top
    are included.
    """
    tables = [symtable.symtable(text, "<copied>", "exec")]
    seen: dict[str, None] = {}
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            # At the top of a module symtable calls its own names local.
            if symbol.is_referenced() and (symbol.is_global() or top):
                seen[symbol.get_name()] = None
    yield from sorted(seen)


class _WithoutAnnotations(ast.NodeTransformer):
    """A transformer that removes annotations from a syntax tree. The generated code never evaluates them."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Return a function without the annotations of its result, its parameters and its body."""
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Return a parameter without its annotation. An annotation ``constexpr`` is kept, since Triton reads it."""
        # Triton reads this one.
        if node.annotation is not None and "constexpr" not in ast.unparse(node.annotation):
            node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """Return a plain assignment in place of an annotated one. Return a declaration without a value unchanged."""
        if node.value is None or not isinstance(node.target, ast.Name):
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def _plain_definition(source: _ModuleSource, node: ast.FunctionDef, name: str) -> str:
    """Return the source code of the function ``node`` under the name ``name``, without decorators and annotations. The
    body is as it is written.
    """
    bare = ast.parse(ast.unparse(ast.FunctionDef("f", node.args, [ast.Pass()], [], None, lineno=1, col_offset=0)))
    bare = _WithoutAnnotations().visit(bare)
    head = f"def {name}({ast.unparse(bare.body[0].args)}):"
    first = node.body[0].lineno
    if first == node.lineno:
        return "\n".join([head, *(f"    {line}" for each in node.body for line in ast.unparse(each).splitlines())])
    # Comments above the first statement belong to the body, and no node has them.
    while first - 2 >= node.lineno and source.lines[first - 2].strip().startswith("#"):
        first -= 1
    lines = [line for line in source.lines[first - 1 : node.end_lineno] if MARKER not in line]
    return "\n".join([head, textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")])


def _literal(name: str, value: object) -> str:
    """Return ``value``, the constant of the global ``name``, as Python source. It serves constants that no single
    statement makes, such as one set in a loop.

    Raise ``CannotCopy`` if ``value`` has no literal.
    """
    if isinstance(value, (bool, int, float, str, bytes, tuple, list, dict, set, type(None))):
        try:
            # A container may hold what has no literal.
            if ast.literal_eval(repr(value)) == value:
                return repr(value)
        except (SyntaxError, ValueError):  # it holds what is no constant
            pass
    raise CannotCopy(f"{name} is set in a way that has no plain form")
