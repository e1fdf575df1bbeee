"""Edits of the calls of ``torch.compile``, and where they are in a program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shiplap.doctor.edits import Case, Edits, Source
from shiplap.doctor.scratch import Edit


def compile_dynamic(case: Case) -> Iterator[Edits]:
    """Yield the edits that pass ``dynamic=True`` to the decorator of the compiled function, if it has one. Then yield,
    as an alternative, the edits that pass it to the calls of ``torch.compile`` that compiled the function.
    """
    sites = list(find_compile_sites(case))
    decorated = [
        with_option(source, node, "dynamic", "True") for source, node, function in sites if function is not None
    ]
    called = [with_option(source, node, "dynamic", "True") for source, node, function in sites if function is None]
    for group in (decorated, called):
        if group:
            yield tuple(group)


def find_compile_sites(case: Case) -> Iterator[tuple[Source, ast.expr, ast.FunctionDef | None]]:
    """Yield (file, expression, function) of each use of ``torch.compile`` in the program that compiled the function of
    the break or recompile.

    A decorator is yielded with its function. For a call of ``torch.compile`` the function is None. Those in the file of
    the break or recompile come first. If it is not known which of them compiled it, yield those in that file, and of
    the decorators that of the function alone.
    """
    for source in sorted(case.sources(), key=lambda s: s.file != case.file):
        parents = source.parents()
        for node in ast.walk(source.tree):
            call, parent = node if isinstance(node, ast.Call) else None, parents.get(node)
            if not isinstance(node, ast.expr) or not _is_compile(call.func if call else node, call):
                continue
            # A bare torch.compile that is no decorator is passed on as a value, or is the function of a call.
            function = parent if isinstance(parent, ast.FunctionDef) and node in parent.decorator_list else None
            if call is None and function is None:
                continue
            if case.compiled_at is not None:
                found = any(_is_at(source, node, site) for site in case.compiled_at)
            else:
                found = source.file == case.file and (function is None or function.name == case.function)
            if found:
                yield source, node, function


def _is_at(source: Source, node: ast.expr, site: tuple[str, int, int]) -> bool:
    """Return whether ``node`` of the file ``source`` is at ``site``, a file, line and column. Where the line is that of
    the node's first character, the columns have to agree, too, unless that of ``site`` is -1.
    """
    file, line, column = site
    inside = file == source.file and node.lineno <= line <= (node.end_lineno or node.lineno)
    return inside and (line != node.lineno or column in (-1, node.col_offset))


# The keywords of torch.compile, by which its calls differ from other methods called compile.
_COMPILE_OPTIONS = frozenset({"fullgraph", "dynamic", "backend", "mode", "options", "disable"})


def _is_compile(node: ast.expr, call: ast.Call | None) -> bool:
    """Return whether an expression is ``torch.compile``, or ``call`` is a call of the method ``compile`` of a module.
    ``call`` is None if the expression is not called.

    Other classes have methods called ``compile`` with other arguments, so a call with such arguments does not count.
    """
    if not isinstance(node, ast.Attribute) or node.attr != "compile":
        return False
    if ast.unparse(node.value) == "torch":
        return True
    return call is not None and not call.args and {k.arg for k in call.keywords} <= _COMPILE_OPTIONS


def with_option(source: Source, node: ast.expr, name: str, value: str) -> Edit:
    """Return the edit that adds the argument ``name=value`` to ``node``, a call or a decorator without parentheses. An
    argument ``name`` that is already there is replaced.
    """
    if not isinstance(node, ast.Call):
        return source.replace(node, f"{source.code(node)}({name}={value})")
    for keyword in node.keywords:
        if keyword.arg == name:
            return source.replace(keyword.value, value)
    end = source.span(node)[1] - 1
    given = [*node.args, *(k.value for k in node.keywords)]
    last = max((source.span(each)[1] for each in given), default=end)
    # The last argument may have a comma behind it already.
    comma = ", " if given and "," not in re.sub(r"#.*", "", source.text[last:end]) else ""
    return Edit(source.file, end, end, f"{comma}{name}={value}")
