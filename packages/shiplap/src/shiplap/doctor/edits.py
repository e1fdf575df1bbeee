"""Edits of a program's source, one function a kind of edit. Each yields alternatives, the first of them preferred.

An edit is a proposal: only a run of the edited program says whether it removes an entry and keeps the results.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

from shiplap.cached_property import cached_property
from shiplap.doctor.places import innermost_statement
from shiplap.doctor.scratch import Edit, list_python_files, split_lines

Edits = tuple[Edit, ...]


@dataclass(frozen=True)
class Case:
    """A graph break or recompile with the data that editors need. An editor is a function that proposes edits which may
    remove it.

    Attributes:
        root: the folder of the program.
        main: the file that runs first, relative to ``root``, or None if it is not known.
        file: the file of the break or recompile, relative to ``root``, or None if it lies outside ``root``.
        line, function: the line in that file, and the function around it.
        subject: the call at fault, or the value that varied.
        text: torch's message about it.
        texts: the contents of the files that earlier remedies have changed, by file.
        callers: for each call that leads to the break, from the innermost on, its file relative to ``root`` and its
            line. Calls in files outside ``root`` are left out.
        cause: the id of its cause, or of the kind of the value that varied.
        frames: the file and the line of the ``def`` of each function in whose compilation the break or recompile came.
            The file is relative to ``root`` if it is in the program.
        compiled_at: the file, line and column of each call of ``torch.compile`` that compiled its function, as far as
            they are in the program. The file is relative to ``root``. None if it is not known which calls did.
        varies: whether the entry is a recompile.
    """

    root: Path
    main: str | None
    file: str | None
    line: int
    function: str
    subject: str
    text: str
    texts: dict[str, str] = field(default_factory=dict)
    callers: tuple[tuple[str, int], ...] = ()
    cause: str = ""
    frames: tuple[tuple[str, int], ...] = ()
    compiled_at: tuple[tuple[str, int, int], ...] | None = None
    varies: bool = False

    def source(self, file: str) -> Source:
        """Return a Python file of the program as a ``Source``, with the changes that remedies of earlier graph breaks
        and recompiles have made to it.
        """
        return Source(file, self.texts[file] if file in self.texts else self._read(file))

    def _read(self, file: str) -> str:
        """Return the content of a file of the program. Return an empty string for a file that is not UTF-8, so that it
        is not edited.
        """
        try:
            return (self.root / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return ""

    @cached_property
    def own(self) -> Source | None:
        """The file of the break or recompile as a ``Source``, or None if it is not a file of the program."""
        return self.source(self.file) if self.file else None

    def sources(self) -> Iterator[Source]:
        """Yield, as a ``Source``, each Python file of the program that mentions torch."""
        for path in list_python_files(self.root):
            file = str(path.relative_to(self.root))
            source = self.source(file)
            if "torch" in source.text:
                yield source


Editor = Callable[[Case], Iterator[Edits]]


def of_statement(edit: Callable[[Case, Source, ast.stmt], Iterator[Edits]]) -> Editor:
    """Return an editor that calls ``edit(case, source, statement)`` with the statement at fault and yields its edits.

    An editor is a function that proposes edits for a break or recompile. The returned one proposes none if the break or
    recompile has no statement in the program's own files.
    """

    @wraps(edit)
    def edit_statement(case: Case) -> Iterator[Edits]:
        """Yield the edits that ``edit`` of the enclosing function proposes for the statement of the break or recompile.
        Yield nothing if there is no such statement.
        """
        own = case.own
        if own is not None and (node := own.statement(case.line)) is not None:
            # A statement in place of an elif would stand behind the whole choice, and run for its other sides as well.
            starts = {own.span(n)[0] for n in ast.walk(own.tree) if isinstance(n, ast.If)}
            elifs = {(own.file, start) for start in starts if own.text.startswith("elif", start)}
            yield from (edits for edits in edit(case, own, node) if elifs.isdisjoint((e.file, e.start) for e in edits))

    return edit_statement


@dataclass(frozen=True)
class Source:
    """The name and the content of a Python file, with its syntax tree and the offsets in characters of the tree's
    nodes.
    """

    file: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the file. It is empty for a file that cannot be parsed."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError):
            # A file that cannot be parsed is left alone, and the others are still edited.
            return ast.Module([], [])

    @cached_property
    def _starts(self) -> list[int]:
        """The offset in characters of the start of each line, followed by the length of the file."""
        starts = [0]
        for line in split_lines(self.text):
            starts.append(starts[-1] + len(line))
        return starts

    def offset(self, line: int, column: int) -> int:
        """Return the offset in characters of a position in the file. ``line`` counts from 1. ``column`` is in bytes
        from 0 on, as in syntax trees.
        """
        start = self._starts[line - 1]
        return start + len(self.text[start:].encode()[:column].decode(errors="ignore")) if column else start

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Return the offsets in characters of the first character of a syntax node and of the character behind its last
        one.
        """
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno or 0, node.end_col_offset or 0)

    def code(self, node: ast.stmt | ast.expr) -> str:
        """Return the source code of a syntax node."""
        start, end = self.span(node)
        return self.text[start:end]

    def replace(self, node: ast.stmt | ast.expr, text: str) -> Edit:
        """Return the edit of this file that replaces the syntax node ``node`` by ``text``."""
        return Edit(self.file, *self.span(node), text)

    def replace_span(self, start: int, end: int, text: str) -> Edit:
        """Return the edit of this file that replaces the characters from ``start`` up to but without ``end`` by
        ``text``.
        """
        return Edit(self.file, start, end, text)

    def statement(self, line: int) -> ast.stmt | None:
        """Return the syntax node of the innermost statement that covers the line ``line``, or None if there is none."""
        return innermost_statement(self.tree, line)

    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return a dict from each node of the syntax tree except the root to its parent."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def outermost(self, line: int) -> ast.stmt | None:
        """Return the syntax node of the module-level statement that covers ``line``, or None if there is none."""
        return next((n for n in self.tree.body if n.lineno <= line <= (n.end_lineno or n.lineno)), None)

    def before_definition(self, line: int, text: str) -> Edit | None:
        """Return the edit that inserts ``text`` in front of the module-level statement that covers the line ``line``,
        and in front of its decorators.

        The statement is a function or class, for example. Return None if there is no such statement.
        """
        node = self.outermost(line)
        if node is None:
            return None
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        at = self.offset(first, 0)
        return Edit(self.file, at, at, text.rstrip("\n") + "\n\n\n")

    def after_imports(self, text: str) -> Edit:
        """Return the edit that inserts the statements ``text`` below the imports at the head of the file."""
        head = 0
        for node in self.tree.body:
            documented = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not isinstance(node, ast.Import | ast.ImportFrom) and not documented:
                break
            head = node.end_lineno or node.lineno
        at = self._starts[head]
        return Edit(self.file, at, at, text.rstrip("\n") + "\n")

    def imports(self, name: str) -> bool:
        """Return whether the file binds ``name`` by an ``import`` statement of the module level."""
        imports = (n for n in self.tree.body if isinstance(n, ast.Import))
        bound = (a.asname or a.name.partition(".")[0] for n in imports for a in n.names)
        return name in bound

    def assigned_names(self) -> set[str]:
        """Return the names to which statements of the module level assign."""
        assigned = [s for s in self.tree.body if isinstance(s, ast.Assign | ast.AnnAssign | ast.AugAssign)]
        named = (n for s in assigned for n in ast.walk(s) if isinstance(n, ast.Name))
        return {n.id for n in named if isinstance(n.ctx, ast.Store)}

    def with_import(self, edit: Edit, name: str) -> Edits:
        """Return a tuple with ``edit``. If the file does not import the module ``name`` yet, an edit that adds the
        import precedes it.
        """
        return (edit,) if self.imports(name) else (self.after_imports(f"import {name}"), edit)


def indent_of(source: Source, node: ast.stmt) -> str:
    """Return the white space in front of the statement ``node``."""
    start = source.offset(node.lineno, 0)
    return source.text[start : start + len(source.text[start:]) - len(source.text[start:].lstrip(" \t"))]


def reindent(text: str, indent: str) -> str:
    """Return ``text``, lines of code, with their common indentation replaced by ``indent``."""
    lines = [row.rstrip("\r\n") for row in split_lines(text)]
    common = min((len(t) - len(t.lstrip()) for t in lines if t.strip()), default=0)
    return "\n".join(indent + t[common:] if t.strip() else "" for t in lines)


def whole_lines(source: Source, nodes: list[ast.stmt]) -> str:
    """Return the source code of the consecutive statements ``nodes``, from the start of their first line on."""
    return source.text[source.offset(nodes[0].lineno, 0) : source.span(nodes[-1])[1]]


def is_movable(source: Source, block: list[ast.stmt]) -> bool:
    """Return whether the lines of the statements ``block`` hold nothing else, and no text of several lines."""
    code = whole_lines(source, block)
    before = source.text[source.offset(block[0].lineno, 0) : source.span(block[0])[0]]
    return not before.strip() and not re.search(r"\"\"\"|'''|\\\n|;", code)


# --- settings and options of the compiler --------------------------------------------------------------------------


def add_setting(statement: str, *modules: str) -> Editor:
    """Return an editor that inserts the setting ``statement`` below the imports of the main file. Imports of torch and
    ``modules`` that are missing there are added. In ``statement``, ``{subject}`` stands for the call at fault.

    An editor is a function that proposes edits for a break or recompile.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the edit that inserts the setting into the main file of the program. Yield nothing if the setting is
        already there or if the main file is not known.
        """
        # Where the program begins is not known, so a setting could come too late.
        if case.main is None:
            return
        filled = statement.format(subject=case.subject, leaf=case.subject.rpartition(".")[2])
        main = case.source(case.main)
        if filled not in main.text:
            missing = [f"import {m}" for m in ("torch", *modules) if not main.imports(m)]
            yield (main.after_imports("\n".join([*missing, filled])),)

    return edit


def reorder_print(case: Case) -> Iterator[Edits]:
    """Yield edits that let torch move calls of ``print`` behind the graph. The later alternatives also convert printed
    shapes and dtypes to strings, which torch can move. Yield nothing if a print on the line has keyword arguments, such
    as ``end``, since torch moves the call without them.
    """
    node = case.own.statement(case.line) if case.own is not None else None
    calls = calls_on_line(node, case.line) if node is not None else []
    if any(c.keywords and ast.unparse(c.func) == "print" for c in calls):
        return
    for setting in add_setting("torch._dynamo.config.reorderable_logging_functions.add(print)")(case):
        yield setting
        for texts in _print_texts(case):
            yield *setting, *texts


@of_statement
def _print_texts(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that put ``str(...)`` around shapes, dtypes and devices that the statement ``node`` prints."""
    printed = [a for c in calls_on_line(node, case.line) if ast.unparse(c.func) == "print" for a in c.args]
    texts = [a for a in printed if re.search(r"\.(shape|dtype|device)$|\.size\(\)$", ast.unparse(a))]
    if texts:
        yield tuple(source.replace(a, f"str({source.code(a)})") for a in texts)


def add_hinted_settings(case: Case) -> Iterator[Edits]:
    """Yield, for each setting of ``torch._dynamo.config`` that torch's message about the break recommends, the edit
    that inserts the setting.
    """
    # A setting that hides what fails, such as suppress_errors, removes no break.
    kinds = "capture|allow|force|trace|enable|specialize"
    named = re.findall(rf"torch\._dynamo\.config\.((?:{kinds})_\w+)\s*=\s*(True|False)\b", case.text)
    for name, value in dict(named).items():
        yield from add_setting(f"torch._dynamo.config.{name} = {value}")(case)


def add_dynamic_source(setting: str) -> Editor:
    """Return an editor that adds the name of the varied value to ``setting`` of ``torch.compiler.config``.

    An editor is a function that proposes edits for a recompile. ``setting`` is ``dynamic_sources`` or
    ``unbacked_sources``.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the edit that adds the varied value to ``setting`` of the enclosing function, under torch's name for a
        local variable. If the module level of the file assigns to the variable, also yield the edit with torch's name
        for a global one, as an alternative. Yield nothing if the value is no variable, attribute or item.
        """
        subject, _, dim = case.subject.partition(", dim ")
        # torch spells the source of a local variable as L['name'], and of a global one as G['name'].
        if match := re.fullmatch(r"([A-Za-z_]\w*)((?:\.\w+|\[[\w']+\])*)", subject):
            is_global = case.own is not None and match[1] in case.own.assigned_names()
            for scope in ("L", "G") if is_global else ("L",):
                source = f"{scope}['{match[1]}']{match[2]}" + (f":{dim}" if dim else "")
                yield from _add_to_setting(f"torch.compiler.config.{setting}", source)(case)

    return edit


def _add_to_setting(setting: str, source: str) -> Editor:
    """Return an editor that adds ``source`` to the text of ``setting``, a list with commas, in the main file. If the
    main file does not have the setting yet, it is inserted.

    An editor is a function that proposes edits for a break or recompile.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the edit that adds to the setting of the enclosing function, or that inserts it. Yield nothing if the
        main file is not known.
        """
        main = case.source(case.main) if case.main is not None else None
        found = re.search(rf'^{re.escape(setting)} = "(.*)"$', main.text, re.MULTILINE) if main else None
        if main is None or found is None:
            yield from add_setting(f'{setting} = "{source}"')(case)
        elif source not in found[1].split(","):
            yield (Edit(main.file, found.end(1), found.end(1), f",{source}"),)

    return edit


def together(*editors: Editor) -> Editor:
    """Return an editor that combines one proposal of each of ``editors``, in all ways, the first ones first. It
    proposes nothing if one of ``editors`` proposes nothing.

    An editor is a function that proposes edits for a break or recompile.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the proposals that have the edits of one proposal of each of ``editors``."""
        for chosen in itertools.product(*(list(each(case)) for each in editors)):
            yield tuple(e for edits in chosen for e in edits)

    return edit


# --- statements that run in eager mode alone ---------------------------------------------------------------------


# The name of a call that is made for its effect on people and machines.
EFFECT_NAME = r"(?i)print|log|warn|write|report|debug|info|progress|profil|synchronize|empty_cache|collect|flush|show"


@of_statement
def guard_effect(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that puts the statement ``node`` under ``if not torch.compiler.is_compiling():``. Yield nothing
    unless the statement is a call whose result is unused.
    """
    if (guarded := guarded_statement(source, node)) is not None:
        yield source.with_import(guarded, "torch")


def guard_caller(case: Case) -> Iterator[Edits]:
    """Yield edits that put a call which leads to the break under ``if not torch.compiler.is_compiling():``, the
    innermost call first. Calls whose result is used, or whose name is none of ``EFFECT_NAME``, are left out.
    """
    for file, line in case.callers:
        source = case.source(file)
        node = source.statement(line)
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        named = called is not None and re.search(EFFECT_NAME, ast.unparse(called)) is not None
        if node is not None and named and (guarded := guarded_statement(source, node)) is not None:
            yield source.with_import(guarded, "torch")


def guarded_statement(source: Source, node: ast.stmt) -> Edit | None:
    """Return the edit that puts ``node`` under ``if not torch.compiler.is_compiling():``, or None unless it is a call
    whose result is unused.
    """
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    indent = indent_of(source, node)
    body = source.code(node)
    if not re.search(r"\"\"\"|'''|\\\n", body):  # lines of a text are part of it
        body = body.replace("\n", "\n    ")
    return source.replace(node, f"if not torch.compiler.is_compiling():\n{indent}    {body}")


def guard_call(text: str, named: str = "") -> Editor:
    """Return an editor that replaces calls by ``text``, in which ``{call}`` stands for the call. Compiled code does not
    run the call then.

    The call at fault is replaced. If ``named`` is not empty, each call on the line whose name matches this pattern is
    replaced instead. An editor is a function that proposes edits for a graph break.
    """

    @of_statement
    def edit(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
        """Yield the edit that replaces a call by ``text`` of the enclosing function, for each call on the line that is
        at fault. If ``named`` is not empty, the calls whose names match it are replaced instead.
        """
        for call in calls_on_line(node, case.line):
            name = source.code(call.func)
            if re.search(named, name) if named else name == case.subject:
                yield source.with_import(source.replace(call, text.replace("{call}", source.code(call))), "torch")

    return edit


# A question that the compiler cannot answer: ``x.is_inference()``.
guard_predicate = guard_call("(not torch.compiler.is_compiling() and {call})", r"is_inference(_mode_enabled)?$")


@of_statement
def guard_context(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that replaces the context manager of ``node``, a ``with`` statement, by an empty context while the
    compiler traces. Yield nothing if there are several context managers or if ``as`` binds a name.
    """
    if isinstance(node, ast.With) and len(node.items) == 1 and node.items[0].optional_vars is None:
        context = node.items[0].context_expr
        text = f"(contextlib.nullcontext() if torch.compiler.is_compiling() else {source.code(context)})"
        edits = source.with_import(source.replace(context, text), "torch")
        yield edits if source.imports("contextlib") else (source.after_imports("import contextlib"), *edits)


def calls_on_line(node: ast.stmt, line: int) -> list[ast.Call]:
    """Return the syntax nodes of the calls that cover the line ``line``, from the outermost on. Calls in the body of
    the statement ``node`` are left out.
    """
    own = [c for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt | ast.excepthandler)]
    nodes = [n for child in own for n in ast.walk(child) if isinstance(n, ast.Call)]
    return [n for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)]


# --- markers, classes and functions --------------------------------------------------------------------------------


def drop_marker(case: Case) -> Iterator[Edits]:
    """Yield edits that remove a call of ``graph_break()``, or calls and decorators ``torch.compiler.disable`` of the
    function at fault, from the program's own code.
    """
    source = case.own
    node = source.statement(case.line) if source else None
    # pass keeps the block valid if the call is its only statement.
    if source and isinstance(node, ast.Expr) and re.search(r"graph_break\(|skip_frame\(", source.code(node)):
        yield (source.replace(node, "pass"),)
        return
    named = re.search(r"<function ([\w.<>]+) at", case.text)
    name = (named[1] if named else case.subject).rpartition(".")[2]
    for each in case.sources():
        for found in ast.walk(each.tree):
            if isinstance(found, ast.FunctionDef) and found.name == name:
                for mark in filter(_is_disable, found.decorator_list):
                    start = each.offset(mark.lineno, 0)
                    end = each.offset((mark.end_lineno or mark.lineno) + 1, 0)
                    yield (Edit(each.file, start, end, ""),)
            elif isinstance(found, ast.Call) and _is_disable(found) and _ends_in(found.args[:1], name):
                yield (each.replace(found, each.code(found.args[0])),)


def _ends_in(arguments: list[ast.expr], name: str) -> bool:
    """Return whether one of the expressions ``arguments`` is ``name`` or an attribute called ``name``, such as
    ``model.name``.
    """
    return any(ast.unparse(a).rpartition(".")[2] == name for a in arguments)


def _is_disable(node: ast.expr) -> bool:
    """Return whether an expression is ``torch.compiler.disable`` or a call of it."""
    called = node.func if isinstance(node, ast.Call) else node
    return bool(re.fullmatch(r"torch\.(compiler|_dynamo)\.disable", ast.unparse(called)))


@of_statement
def hoist_class(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that moves the class definition ``node`` from a function to the module level. Yield nothing if
    ``node`` is no class, has a decorator or is at the module level already.
    """
    # The edit would leave a decorator behind, in front of the next statement.
    if isinstance(node, ast.ClassDef) and node.col_offset and not node.decorator_list:
        above = source.before_definition(node.lineno, reindent(whole_lines(source, [node]), ""))
        if above:
            yield above, source.replace(node, f"# {node.name} is defined above")


@of_statement
def assume_constant(case: Case, source: Source, _: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that decorates the function around the call at fault with
    ``torch.compiler.assume_constant_result``.

    Yield nothing if the function takes arguments besides ``self``, since its first result would serve all of them.
    """
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef) or node.name != case.function:
            continue
        given = node.args
        named = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
        if named or given.vararg or given.kwarg:  # the first result would serve all later arguments
            continue
        if node.lineno <= case.line <= (node.end_lineno or 0) and node.name not in ("forward", "__call__"):
            mark, at = "@torch.compiler.assume_constant_result\n", source.offset(node.lineno, 0)
            yield source.with_import(Edit(source.file, at, at, indent_of(source, node) + mark), "torch")


@of_statement
def hoist_call(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that moves the call at fault to the module level, where it runs once.

    Yield nothing if the call uses names that the file does not import.
    """
    for call in calls_on_line(node, case.line):
        names = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
        imported = {n for n in names if source.imports(n)}
        if source.code(call.func) == case.subject and names == imported:
            name = "_" + re.sub(r"\W+", "_", case.subject).strip("_").upper()
            above = source.before_definition(node.lineno, f"{name} = {source.code(call)}")
            if above:
                yield above, source.replace(call, name)
