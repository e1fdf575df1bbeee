"""Operators that plant one fault in a kernel's source: Python and Triton by syntax tree, C and C++ by token."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

__all__ = ["Mutant", "c_mutants", "python_mutants", "sync_mutants"]


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
NAMES = {  # of functions, methods and attributes that take and give the same
    "amax": "amin",
    "amin": "amax",
    "maximum": "minimum",
    "minimum": "maximum",
    "sum": "mean",
    "mean": "sum",
    "exp": "exp2",
    "cos": "sin",
    "sin": "cos",
    "square": "abs",
    "abs": "neg",
    "rsqrt": "sqrt",
    "clamp_min": "clamp_max",
    "cdiv": "minimum",
    "round": "floor",
    "max": "min",
    "zeros": "ones",
    "T": "real",
    "contiguous": "detach",
    "atomic_add": "store",
}
CHANGED = (
    *(ast.Compare, ast.BinOp, ast.Constant, ast.Attribute, ast.IfExp),
    *(ast.keyword, ast.UnaryOp, ast.AugAssign, ast.Slice),
)
WIDE = {"float64": "float32", "float32": "float16", "int64": "int32"}


def python_mutants(source: str) -> Iterator[Mutant]:
    """One mutant for each place and operator; ``source`` is a function or a module."""
    tree = ast.parse(source)
    operators = (
        *("comparison", "arithmetic", "constant", "dropped term", "dtype", "negated", "default", "zeroed"),
        *("name", "sign", "overwritten", "slice", "one less", "left out"),
    )
    for index, original in enumerate(ast.walk(tree)):
        if not isinstance(original, CHANGED):
            continue
        for operator in operators:
            if not _change(copy.deepcopy(original), operator):
                continue
            changed = copy.deepcopy(tree)
            node = next(islice(ast.walk(changed), index, None))
            before = ast.unparse(node)
            _change(node, operator)
            yield Mutant(operator, getattr(node, "lineno", 0), before, ast.unparse(node), ast.unparse(changed))


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
    if operator == "name" and isinstance(node, ast.Attribute) and node.attr in NAMES:
        node.attr = NAMES[node.attr]
        return True
    if operator == "sign" and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node.op = ast.UAdd()
        return True
    if operator == "one less" and isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1:
        node.value = node.value - 1
        return True
    return _changed_statement(node, operator) or _changed_keyword(node, operator)


def _changed_statement(node: ast.AST, operator: str) -> bool:
    if operator == "overwritten" and isinstance(node, ast.AugAssign):
        node.op = ast.Mult() if isinstance(node.op, ast.Add) else ast.Add()
        return True
    if operator == "slice" and isinstance(node, ast.Slice) and node.upper is not None:
        node.upper = ast.BinOp(node.upper, ast.Sub(), ast.Constant(1))
        return True
    if operator == "left out" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        node.right = node.left
        return True
    return False


def _changed_keyword(node: ast.AST, operator: str) -> bool:
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
        if token == ";" and (dropped := _without_statement(source, match.end())):
            yield dropped
        if token[0] in "\"'#" or token.startswith(("//", "/*")):
            continue
        after = list(SWAPS.get(token, ()))
        if token.isdigit():
            after += [str(int(token) + 1)] + ([str(int(token) - 1)] if int(token) else [])
        for text in after:
            line = source.count("\n", 0, match.start()) + 1
            changed = source[: match.start()] + text + source[match.end() :]
            yield Mutant("token", line, token, text, changed)


STATEMENT = re.compile(
    r"[ ]+(?!const|int|float|double|return|pthread_t|share|for|if|else)([\w>&\[\].*-]+\s*(\(|[-+*/]?=)[^;{}]*;)"
)


def _without_statement(source: str, end: int) -> Mutant | None:
    """The source without the statement that ends here, if it is a call or an assignment on a line of its own."""
    start = source.rfind("\n", 0, end) + 1
    if not (statement := STATEMENT.fullmatch(source, start, end)):
        return None
    line = source.count("\n", 0, start) + 1
    return Mutant("statement", line, statement[1], ";", source[:start] + ";" + source[end:])


BARRIERS = r"__syncthreads|__syncwarp|__threadfence|__pipeline_wait_prior|cudaStreamWaitEvent|cudaMemsetAsync"
SYNC = (  # what keeps threads, blocks and streams in order, and the same without it
    (re.compile(rf"\b(?:{BARRIERS})\(.*?\);"), ";"),
    (re.compile(r"atomicAdd\(&(.*?), ([\w\[\].]+)\);"), r"\1 += \2;"),
    (re.compile(r"= atomicAdd\((\w+), (\w+)\)"), r"= (*\1)++"),
    (re.compile(r"\bSTREAM(?=[>)])"), "0"),
    (re.compile(r"tl\.debug_barrier\(\)"), "pass"),
    (re.compile(r"tl\.atomic_add\((.*?), (\w+), (mask=.*?)\)\n"), r"tl.store(\1, tl.load(\1, \3) + \2, \3)\n"),
    (re.compile(r"while tl\.atomic_cas\(.*?\) == 1:"), "while False:"),
)


def sync_mutants(source: str) -> Iterator[Mutant]:
    """One mutant for each barrier, fence, atomic update and use of the caller's stream: the kernel without it."""
    for pattern, replacement in SYNC:
        for match in pattern.finditer(source):
            after = match.expand(replacement)
            line = source.count("\n", 0, match.start()) + 1
            changed = source[: match.start()] + after + source[match.end() :]
            yield Mutant("synchronisation", line, match.group().strip(), after.strip(), changed)
