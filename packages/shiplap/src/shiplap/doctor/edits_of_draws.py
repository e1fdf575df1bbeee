"""Edits of random numbers that are drawn in a compiled function: an op draws them when the graph runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from shiplap.doctor.edits import Case, Edits, Source, of_statement
from shiplap.doctor.edits_of_values import enclosing_function, names_before, where_for_branch
from shiplap.doctor.scratch import Edit, apply_edits

# Functions whose result is one number, by its dtype. NumPy's return arrays if they are given a size.
_DRAWS = {
    "float64": r"random\.(random|uniform|gauss|normalvariate|betavariate|expovariate|triangular)"
    r"|(np|numpy)\.random\.(rand|random|random_sample|uniform|normal|randn|beta|exponential)",
    "int64": r"random\.(randint|randrange|getrandbits)|(np|numpy)\.random\.randint",
}
_COUNTER = "RANDOM_DRAWS"


@of_statement
def draw_as_op(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that draw a random number of Python or NumPy in an op, whose result is a tensor. One alternative
    takes the number out of the tensor, for example for a slice. If the statement is a choice by that number, another
    one picks with ``torch.where``.

    The op counts its calls in a tensor. This keeps the calls apart and in their order.
    """
    drawn = [n for n in _evaluated_once(node) if isinstance(n, ast.Call) and _dtype_of(n)]
    drawn = [n for n in drawn if n.lineno <= case.line <= (n.end_lineno or n.lineno)] or _draws_of_names(source, node)
    if len(drawn) != 1:
        return
    (call,) = drawn
    dtype = f"torch.{_dtype_of(call)}"
    made, fake = f"torch.tensor({source.code(call)}, dtype={dtype})", f"torch.empty((), dtype={dtype})"
    name, lines = _op_that_draws(source, call, "count: torch.Tensor", made, fake)
    above = source.after_imports("\n".join(lines))
    edits = above, source.replace(call, f"{name}({_COUNTER})")
    yield edits
    setting = "torch._dynamo.config.capture_scalar_outputs = True"
    captured = source.after_imports("\n".join([*lines, "", setting])) if setting not in source.text else above
    yield captured, source.replace(call, f"{name}({_COUNTER}).item()")
    changed = apply_edits({source.file: source.text}, case.root, edits)
    if changed is not None:
        text = changed[source.file]
        moved = replace(case, texts={**case.texts, **changed}, line=case.line + len("\n".join(lines).splitlines()))
        for more in where_for_branch(moved):
            both = apply_edits(changed, case.root, more)
            if both is not None and both[source.file] != text:
                yield (Edit(source.file, 0, len(source.text), both[source.file]),)


def _op_that_draws(source: Source, call: ast.Call, parameters: str, made: str, fake: str) -> tuple[str, list[str]]:
    """Return the name and the source lines of an op with ``parameters``, which is called in place of the draw ``call``.
    It counts its calls and returns the value of the expression ``made``. In a trace it returns that of ``fake``.
    """
    name = re.sub(r"\W+", "_", ast.unparse(call.func)) + "_op"
    while f"def {name}(" in source.text:
        name += "_"
    lines = [] if source.imports("torch") else ["import torch"]
    lines += [] if f"{_COUNTER} =" in source.text else ["", f"{_COUNTER} = torch.zeros((), dtype=torch.int64)"]
    return name, [
        *(*lines, "", ""),
        f'@torch.library.custom_op("program::{name}", mutates_args=("count",))',
        f"def {name}({parameters}) -> torch.Tensor:",
        "    count += 1",
        f"    return {made}",
        *("", ""),
        f"@{name}.register_fake",
        f"def _{name}({re.sub(': torch.Tensor', '', parameters)}):",
        f"    return {fake}",
        "",
    ]


def _draws_of_names(source: Source, node: ast.stmt) -> list[ast.Call]:
    """Return the draws whose results are assigned, in the same function, to variables that the statement ``node``
    reads. Torch may break the graph only where such a number is used.
    """
    function = enclosing_function(source, node)
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    found = []
    for each in function.body if function is not None else ():
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.value, ast.Call):
            target = each.targets[0]
            if isinstance(target, ast.Name) and target.id in read and _dtype_of(each.value):
                found.append(each.value)
    return found


def _dtype_of(call: ast.Call) -> str:
    """Return the dtype of the number that ``call`` draws. Return an empty string for other calls, for arguments that
    are no numbers in the source code, and for integers that may lie beyond 64 bits.
    """
    called = ast.unparse(call.func)
    dtype = next((dtype for dtype, names in _DRAWS.items() if re.fullmatch(names, called)), "")
    if not dtype or any(k.arg in (None, "size") for k in call.keywords):
        return ""
    try:
        given = [ast.literal_eval(value) for value in (*call.args, *(k.value for k in call.keywords))]
    except (ValueError, TypeError):
        return ""
    # NumPy draws an array for a list of bounds.
    if any(type(value) not in (int, float) for value in given):
        return ""
    of_numpy, name = called.startswith("n"), called.rpartition(".")[2]
    # Arguments of NumPy's functions from this position on are sizes.
    sizes = 0 if re.fullmatch(r"rand|randn|random|random_sample", name) else 1 if name == "exponential" else 2
    if of_numpy and len(given) > sizes:
        return ""
    if dtype == "int64" and any(abs(value) >= (64 if name == "getrandbits" else 2**63) for value in given):
        return ""
    return dtype


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
    parameters = "count: torch.Tensor" + (", like: torch.Tensor" if sizes else "")
    name, lines = _op_that_draws(source, call, parameters, made, f"torch.empty({', '.join([*given, *options])})")
    passed = f"{_COUNTER}, {sizes[1]}" if sizes else _COUNTER
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
