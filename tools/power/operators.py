"""Operators that plant one fault in a kernel's source: Python and Triton by syntax tree, C and C++ by token."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "c_mutants", "python_mutants"]


@dataclass(frozen=True)
class Mutant:
    """A changed source, and what was changed where."""

    operator: str
    line: int
    before: str
    after: str
    source: str


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
WIDE = {"float64": "float32", "float32": "float16", "int64": "int32"}


def python_mutants(source: str) -> Iterator[Mutant]:
    """One mutant for each place and operator; ``source`` is a function or a module."""
    tree = ast.parse(source)
    count = sum(1 for _ in ast.walk(tree))
    operators = ("comparison", "arithmetic", "constant", "dropped term", "dtype", "negated", "default", "zeroed")
    for index in range(count):
        for operator in operators:
            changed = copy.deepcopy(tree)
            node = next(n for i, n in enumerate(ast.walk(changed)) if i == index)
            if not hasattr(node, "lineno"):
                continue
            before = ast.unparse(node)
            if _change(node, operator):
                yield Mutant(operator, node.lineno, before, ast.unparse(node), ast.unparse(changed))


def _change(node: ast.AST, operator: str) -> bool:
    """Change ``node`` in place; whether the operator applies to it."""
    if operator == "comparison" and isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
        return True
    if operator == "arithmetic" and isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        node.op = ARITHMETIC[type(node.op)]()
        return True
    if operator == "dropped term" and isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        node.right = ast.Constant(0 if not isinstance(node.op, ast.Mult) else 1)
        return True
    if operator == "constant" and isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = node.value + 1
        return True
    if operator == "zeroed" and isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value:
        node.value = type(node.value)(0)
        return True
    if operator == "dtype" and isinstance(node, ast.Attribute) and node.attr in WIDE:
        node.attr = WIDE[node.attr]
        return True
    if operator == "negated" and isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
        return True
    if operator == "default" and isinstance(node, ast.keyword) and node.arg in ("mask", "other", "dim", "keepdim"):
        node.value = ast.Constant(None if node.arg == "mask" else 0)
        return True
    return False


COMMENT, STRING = r"//[^\n]*|/\*.*?\*/|#[^\n]*", r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''
TOKEN = re.compile(rf"{COMMENT}|{STRING}|\w+|<<=|>>=|[-+*/<>=!&|]=|[<>&|+-]{{2}}|\S", re.S)
SWAPS = {
    "<": ("<=",),
    "<=": ("<",),
    ">": (">=",),
    ">=": (">",),
    "==": ("!=",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "+=": ("=", "-="),
    "*=": ("=",),
    "double": ("float",),
    "int64_t": ("int32_t",),
    "size_t": ("unsigned short",),
    "&&": ("||",),
    "||": ("&&",),
    "max": ("min",),
    "min": ("max",),
    "break": ("continue",),
    "__syncthreads": ("(void)",),
}


def c_mutants(source: str) -> Iterator[Mutant]:
    """One mutant for each token and replacement, comments, strings and preprocessor lines left alone."""
    for match in TOKEN.finditer(source):
        token = match.group()
        if token[0] in "\"'#" or token.startswith(("//", "/*")):
            continue
        after = list(SWAPS.get(token, ()))
        if token.isdigit():
            after += [str(int(token) + 1)] + ([str(int(token) - 1)] if int(token) else [])
        for text in after:
            line = source.count("\n", 0, match.start()) + 1
            changed = source[: match.start()] + text + source[match.end() :]
            yield Mutant("token", line, token, text, changed)
