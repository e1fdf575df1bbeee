"""Edits of random numbers that are drawn in a compiled function: an op draws them when the graph runs."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from shiplap.doctor.edits import Case, Edits, Source, of_statement
from shiplap.doctor.edits_of_values import enclosing_function, names_before, where_for_branch
from shiplap.doctor.scratch import Edit, apply_edits

# Functions whose result is one number, by its dtype. NumPy's return arrays if they are given a size.
_DRAWS = {
    "float64": r"random\.(random|uniform|gauss|normalvariate|betavariate|expovariate|triangular)"
    r"|(np|numpy)\.random\.(rand|random|random_sample|uniform|normal|randn|beta|exponential)",
    "int64": r"random\.(randint|randrange|getrandbits)|(np|numpy)\.random\.randint",
}
CALL_COUNTER = "CALLS_OF_OPS"


@of_statement
def draw_as_op(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that draw a random number of Python or NumPy in an op, whose result is a tensor. One alternative
    takes the number out of the tensor, for example for a slice. If the statement is a choice by that number, another
    one picks with ``torch.where``.

    The op counts its calls in a tensor. This keeps the calls apart and in their order.
    """
    drawn = [n for n in _evaluated_once(node) if isinstance(n, ast.Call) and _dtype_of(source, n)]
    drawn = [n for n in drawn if n.lineno <= case.line <= (n.end_lineno or n.lineno)] or _draws_of_names(source, node)
    if len(drawn) != 1:
        return
    (call,) = drawn
    dtype = f"torch.{_dtype_of(source, call)}"
    given = _computed_arguments(call)
    text = ast.unparse(_Named({value: name for name, value in given.items()}).visit(copy.deepcopy(call)))
    made, fake = f"torch.tensor({text}, dtype={dtype})", f"torch.empty((), dtype={dtype})"
    kind = "int" if dtype.endswith("int64") else "float"
    parameters = ", ".join(f"{name}: {kind}" for name in given)
    name, lines = counting_op(source, call, parameters, [f"return {made}"], fake)
    above = source.after_imports("\n".join(lines))
    drawn_text = f"{name}({', '.join([CALL_COUNTER, *given.values()])})"
    edits = above, source.replace(call, drawn_text)
    yield edits
    setting = "torch._dynamo.config.capture_scalar_outputs = True"
    captured = source.after_imports("\n".join([*lines, "", setting])) if setting not in source.text else above
    yield captured, source.replace(call, f"{drawn_text}.item()")
    changed = apply_edits({source.file: source.text}, case.root, edits)
    if changed is not None:
        text = changed[source.file]
        moved = replace(case, texts={**case.texts, **changed}, line=case.line + len("\n".join(lines).splitlines()))
        for more in where_for_branch(moved):
            both = apply_edits(changed, case.root, more)
            if both is not None and both[source.file] != text:
                yield (Edit(source.file, 0, len(source.text), both[source.file]),)


def counting_op(
    source: Source, call: ast.Call, parameters: str, body: Sequence[str], fake: str = ""
) -> tuple[str, list[str]]:
    """Return the name and the source lines of an op that stands for ``call``. It counts its calls in its first argument
    and then runs the lines ``body``. ``parameters`` are its further ones, each with an annotation.

    In a trace the op returns the value of the expression ``fake``. If that is empty, the op returns nothing.
    """
    name = re.sub(r"\W+", "_", ast.unparse(call.func)).strip("_") + "_op"
    while f"def {name}(" in source.text:
        name += "_"
    counter = "count"
    while re.search(rf"\b{counter}\b", "\n".join([parameters, *body, fake])):
        counter += "_"
    parameters = ", ".join(p for p in (f"{counter}: torch.Tensor", parameters) if p)
    # Each file of the program has ops of its own.
    unique = re.sub(r"\W+", "_", f"{name}_of_{source.file.removesuffix('.py')}")
    lines = [] if source.imports("torch") else ["import torch"]
    lines += [] if f"{CALL_COUNTER} =" in source.text else ["", f"{CALL_COUNTER} = torch.zeros((), dtype=torch.int64)"]
    lines += [
        *("", ""),
        f'@torch.library.custom_op("program::{unique}", mutates_args=("{counter}",))',
        f"def {name}({parameters}) -> {'torch.Tensor' if fake else 'None'}:",
        f"    {counter} += 1",
        *(f"    {row}" for row in body),
        "",
    ]
    if fake:
        names = ", ".join(p.partition(":")[0] for p in parameters.split(", "))
        lines += ["", f"@{name}.register_fake", f"def _{name}({names}):", f"    return {fake}", ""]
    return name, lines


def _draws_of_names(source: Source, node: ast.stmt) -> list[ast.Call]:
    """Return the draws whose results are assigned, in the same function, to variables that the statement ``node``
    reads. Torch may break the graph only where such a number is used.
    """
    function, parents = enclosing_function(source, node), source.parents()
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    found = []
    # The statements that run before this one does, whichever way conditions and loops go.
    before, around = list[ast.stmt](), cast(ast.AST, node)
    while function is not None and around is not function:
        above = parents[around]
        for body in _bodies(above):
            before += body[: body.index(around)] if around in body else []
        around = above
    for each in before:
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.value, ast.Call):
            target = each.targets[0]
            if isinstance(target, ast.Name) and target.id in read and _dtype_of(source, each.value):
                found.append(each.value)
    return found


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the lists of statements that the syntax node ``node`` has, such as the two of an ``if``."""
    return [getattr(node, name) for name in ("body", "orelse", "finalbody") if isinstance(getattr(node, name, 0), list)]


def _dtype_of(source: Source, call: ast.Call) -> str:
    """Return the dtype of the number that ``call`` draws. Return an empty string for other calls, for arguments that
    are no numbers as far as the source code shows, and for integers that may lie beyond 64 bits.
    """
    called = ast.unparse(call.func)
    dtype = next((dtype for dtype, names in _DRAWS.items() if re.fullmatch(names, called)), "")
    if not dtype or any(k.arg in (None, "size") for k in call.keywords):
        return ""
    arguments = [*call.args, *(k.value for k in call.keywords)]
    if not all(_constant(value) is not None or _is_number(source, value) for value in arguments):
        return ""
    given = [_constant(value) for value in arguments]
    # NumPy draws an array for a list of bounds. The op takes an argument that is computed as a number.
    if any(type(value) not in (int, float, type(None)) for value in given):
        return ""
    if called.endswith("getrandbits") and None in given:
        return ""
    of_numpy, name = called.startswith("n"), called.rpartition(".")[2]
    # Arguments of NumPy's functions from this position on are sizes.
    sizes = 0 if re.fullmatch(r"rand|randn|random|random_sample", name) else 1 if name == "exponential" else 2
    if of_numpy and len(given) > sizes:
        return ""
    limit = 64 if name == "getrandbits" else 2**63
    return "" if dtype == "int64" and any(v is not None and abs(v) >= limit for v in given) else dtype


def _constant(value: ast.expr) -> Any:
    """Return the constant that the expression ``value`` is in the source code. Return None for an expression that has
    to be computed, and an empty string for the constant None, which is no number.
    """
    try:
        found = ast.literal_eval(value)
    except (ValueError, TypeError):
        return None
    return "" if found is None else found


def _is_number(source: Source, value: ast.expr) -> bool:
    """Return whether ``value`` is computed from sizes of tensors, lengths, attributes of ``self``, variables of the
    module level and constants. A variable of the function may be a tensor.
    """
    text = ast.unparse(value)
    if isinstance(value, ast.BinOp):
        return _is_number(source, value.left) and _is_number(source, value.right)
    if isinstance(value, ast.Name):
        return value.id in source.assigned_names() - names_before(source, value)
    sized = re.fullmatch(r"[\w.]+\.shape\[-?\d+\]|[\w.]+\.size\(-?\d+\)|len\([\w.]+\)|self(\.\w+)+", text)
    return isinstance(value, ast.Constant) or sized is not None


def _computed_arguments(call: ast.Call) -> dict[str, str]:
    """Return the source code of each argument of ``call`` that is no constant, in order and without repetitions, by the
    name of the parameter of the op that gets it.
    """
    computed = [ast.unparse(v) for v in (*call.args, *(k.value for k in call.keywords)) if _constant(v) is None]
    return {f"bound_{i}": code for i, code in enumerate(dict.fromkeys(computed))}


class _Named(ast.NodeTransformer):
    """A converter of a call in which the arguments that are computed get names."""

    def __init__(self, names: dict[str, str]) -> None:
        """Store ``names``, the name of each argument by its source code."""
        self.names = names

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the name that stands for the expression ``node``, or ``node`` with names in it."""
        name = self.names.get(ast.unparse(node)) if isinstance(node, ast.expr) else None
        return ast.Name(name, ast.Load()) if name else self.generic_visit(node)


def _evaluated_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions of the statement ``node`` that one execution evaluates exactly once. Bodies of the
    statement are left out, and so is what a condition or a loop may leave out or repeat.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            continue
        yield child
        inner = ast.Expr(child.values[0]) if isinstance(child, ast.BoolOp) else child
        inner = ast.Expr(child.test) if isinstance(child, ast.IfExp) else inner
        yield from _evaluated_once(inner)


@of_statement
def draw_tensor_as_op(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that draw a tensor from a generator of the module level in an op, since a graph holds no
    generator.

    The tensor has the sizes of another tensor, as in ``torch.randn(x.shape, generator=g)``, or sizes that are numbers
    in the source code. The op counts its calls in a tensor, which keeps them apart and in their order.
    """
    calls = [n for n in _evaluated_once(node) if isinstance(n, ast.Call) and _is_drawn_from(source, n)]
    if len(calls) != 1 or not calls[0].lineno <= case.line <= (calls[0].end_lineno or 0):
        return
    (call,) = calls
    sizes = re.fullmatch(r"(.+)\.(shape|size\(\))", source.code(call.args[0])) if len(call.args) == 1 else None
    given = ["like.shape"] if sizes else [source.code(a) for a in call.args]
    options = [f"{k.arg}={source.code(k.value)}" for k in call.keywords if k.arg != "generator"]
    generator = next(source.code(k.value) for k in call.keywords if k.arg == "generator")
    made = f"{source.code(call.func)}({', '.join([*given, f'generator={generator}', *options])})"
    fake = f"torch.empty({', '.join([*given, *options])})"
    name, lines = counting_op(source, call, "like: torch.Tensor" if sizes else "", [f"return {made}"], fake)
    passed = f"{CALL_COUNTER}, {sizes[1]}" if sizes else CALL_COUNTER
    yield source.after_imports("\n".join(lines)), source.replace(call, f"{name}({passed})")


def _is_drawn_from(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` draws a tensor by ``torch.rand`` or ``torch.randn`` from a generator that is a variable
    of the module level. Its sizes have to be those of a tensor, or numbers, and its options attributes of torch.
    """
    if ast.unparse(call.func) not in ("torch.rand", "torch.randn") or any(k.arg is None for k in call.keywords):
        return False
    options = {k.arg: k.value for k in call.keywords}
    generator = options.pop("generator", None)
    plain = all(re.fullmatch(r"torch\.\w+", ast.unparse(value)) for value in options.values())
    sizes = [ast.unparse(a) for a in call.args]
    sized = len(sizes) == 1 and re.fullmatch(r"\w+(\.shape|\.size\(\))|\([\d, ]*\)", sizes[0])
    function = enclosing_function(source, call)
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)] if function is not None else []
    local = names_before(source, call) | {n.id for n in names if isinstance(n.ctx, ast.Store)}
    named = isinstance(generator, ast.Name) and generator.id in source.assigned_names() and generator.id not in local
    return bool(named and plain and (sized or (sizes and all(map(str.isdecimal, sizes)))))
