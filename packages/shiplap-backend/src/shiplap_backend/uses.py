"""The uses of each argument of an overload, checked so that no value is lost. Raises SL901 and SL903.

An argument is an input of the graph, an attribute, fixed by a guard, shape only, or redundant with a reason. This
module also checks the names in an entry, and the places where a value could be lost: a binding that no expression
reads, a guard that does not fix the argument, or a rule of shapes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence, Set

import torch

from shiplap.dtypes import in_aten
from shiplap.plugin_api import error
from shiplap.torch_private.aten_operators import AtenArgument, AtenDeclaration
from shiplap_backend.entries import MetadataEntry, metadata_error
from shiplap_backend.expression import suggest_nearest
from shiplap_backend.families import FAMILIES, WrapperFamily
from shiplap_backend.hidden import find_calls, find_contradiction, find_negative_size
from shiplap_backend.wrapper import argument_kind

# Arguments on which shapes and dtypes depend and values do not, by kind. All else may hold a value.
_SHAPES = {
    "bool": ("keepdim", "ceil_mode"),
    "bools": ("output_mask",),
    "int": ("C", "N", "HxW"),
    "ints": ("output_size", "size", "sizes", "input_size", "input_sizes", "self_sizes"),
}
_SHAPES |= {"ints?": _SHAPES["ints"]}

# The dtypes of arguments that address elements or choose between them.
_INPUTS = {"index": "i32 i64", "indices": "i32 i64", "mask": "bool", "condition": "bool"}


def shape_only(a: AtenArgument) -> bool:
    """Return whether the argument ``a`` can only affect shapes or dtypes, as ``keepdim`` and ``dtype`` do."""
    return argument_kind(a) in ("dtype", "dtype?") or a.name in _SHAPES.get(argument_kind(a), ())


def names_in(source: str) -> set[str]:
    """Return the names in the expression ``source``.

    The set is empty for an invalid expression, which the compiler reports later.
    """
    try:
        return {n.id for n in ast.walk(ast.parse(source.strip(), mode="eval")) if isinstance(n, ast.Name)}
    except (SyntaxError, RecursionError, MemoryError):
        return set()


def check_names(where: str, d: AtenDeclaration, entry: MetadataEntry, results: Sequence[str]) -> None:
    """Raise ``SL901`` if the metadata entry ``entry`` names an argument that the overload ``d`` does not have, or names
    one under a key that does not suit it.

    For example, only arguments of sizes or dtypes may stand under ``shape_only``. Also raise it if no call can satisfy
    all of the entry's guards, which are conditions on the arguments. ``where`` is the file and line of the entry, and
    ``results`` are the names of its results.
    """
    inputs = {a.name: a for a in d.inputs}
    stated = {"shape_only": entry.shape_only, "inputs": entry.inputs, "redundant": entry.redundant}
    for what, names in stated.items():
        for name in names:
            if name not in inputs:
                got = f"{d.name}, {what}: {name!r}{suggest_nearest(name, list(inputs))}"
                raise metadata_error(where, got, f"one of {', '.join(inputs)}")
    for name in entry.shape_only:
        if not shape_only(inputs[name]):
            got = f"{d.name}, shape_only: {name!r} carries values"
            raise metadata_error(
                where, got, "an argument of sizes or dtypes, such as keepdim; others go into 'graph' or 'guard'"
            )
    for name in entry.redundant:
        # An operand decides the result of every element, so its value cannot follow from others.
        if entry.template in ("unary", "binary") and inputs[name].tensor:
            got = f"{d.name}, redundant: {name!r}, an operand of an elementwise overload"
            raise metadata_error(where, got, "an argument whose value follows from the others")
        if name in ("dim", "dims"):
            got = f"{d.name}, redundant: {name!r}, which no other argument decides"
            raise metadata_error(where, got, f"{name!r} in 'graph', or a guard that fixes it")
        if name == "keepdim" or argument_kind(inputs[name]) in ("dtype", "dtype?"):
            got = f"{d.name}, redundant: {name!r}, which decides sizes or dtypes"
            raise metadata_error(where, got, f"{name!r} in 'shape_only'")
    for name, dtype in entry.inputs.items():
        if not inputs[name].tensor:
            raise metadata_error(where, f"{d.name}, inputs: {name!r} is no tensor", "a tensor argument")
        fits = _INPUTS.get(name, dtype).split()
        if dtype == "raw" and entry.template in ("unary", "binary"):
            got = f"{d.name}, inputs: {name}: 'raw' of an elementwise overload"
            raise metadata_error(where, got, "no dtype: torch's promotion says in which dtype it computes")
        if dtype not in (*fits, "raw"):
            raise metadata_error(where, f"{d.name}, inputs: {name}: {dtype!r}", f"{' or '.join(fits)}, or raw")
    for condition in entry.guard:
        if not names_in(condition) & {*inputs, *results}:
            raise metadata_error(
                where, f"{d.name}, guard: {condition!r} asks for no argument", "a condition of an argument"
            )
        if find_contradiction([f"not ({condition})"]):
            raise metadata_error(where, f"{d.name}, guard: {condition!r} always holds", "a condition that can fail")
    if pair := find_contradiction([*FAMILIES[entry.template].guard, *entry.guard]):
        raise metadata_error(where, f"{d.name}, guard: {pair}", "conditions that hold for some call")
    _check_template(where, d, entry)
    _check_outputs(where, d, entry, results)
    _check_lets(where, d, entry, {*inputs, *results})


def check_constants(where: str, name: str, constants: Sequence[float], dtypes: Sequence[str]) -> None:
    """Raise ``SL901`` if one of ``dtypes`` cannot represent a number in the expressions of the overload ``name``.

    Such a number is out of range or is rounded to zero. ``constants`` are the numbers, and ``dtypes`` are those in
    which the metadata entry computes. ``where`` is its file and line.
    """
    for dtype in (d for d in dtypes if d != "bool"):
        smallest, least, most = _limits(dtype)
        for number in constants:
            lost = 0 < abs(number) <= smallest / 2  # half of the smallest number above zero is rounded to zero
            if not least <= number <= most or lost:
                got = f"{name}: the number {number!r} in the graph, which is {'0' if lost else 'beyond'} in {dtype}"
                raise metadata_error(where, got, f"a number of {dtype}, or 'dtypes' without those that compute in it")


def _limits(dtype: str) -> tuple[float, float, float]:
    """Return the smallest positive number of ``dtype``, its minimum and its maximum.

    The first is 0 for integers.
    """
    wanted = in_aten()[dtype].torch
    if not wanted.is_floating_point:
        whole = torch.iinfo(wanted)
        return 0.0, whole.min, whole.max
    info = torch.finfo(wanted)
    return info.smallest_normal * info.eps, info.min, info.max


def check_dtype_guards(
    where: str, name: str, entry: MetadataEntry, accepted: Sequence[str], gated: Sequence[str]
) -> None:
    """Raise ``SL901`` for a guard of the metadata ``entry`` that tests the dtype of a tensor and holds for none of the
    ``accepted`` dtypes.

    A guard is a condition on the arguments. A call that does not satisfy it runs on the CPU. ``gated`` are the tensors
    whose dtype must be an accepted one. ``where`` is the file and line of the entry, and ``name`` its overload.
    """
    rows = in_aten()
    holding = {
        "is_bool": {d for d in accepted if d == "bool"},
        "is_float": {d for d in accepted if rows[d].torch.is_floating_point},
    }
    # A Python number among the operands of an elementwise overload has a dtype of its own.
    for condition in entry.guard if entry.template != "binary" else ():
        for call, argument, wanted in find_calls(condition):
            found = holding.get(call, {*accepted})
            if call in holding and argument in gated and not (found if wanted else {*accepted} - found):
                got = f"{name}, guard: {condition!r} holds for none of {', '.join(accepted)}"
                raise metadata_error(where, got, "a condition that holds for some call")


def _check_template(where: str, d: AtenDeclaration, entry: MetadataEntry) -> None:
    """Raise ``SL901`` if the overload ``d`` cannot use the template that the metadata ``entry`` names.

    A reduction under the template ``unary`` is an example. A template lacks the code that other kinds of overloads
    need. ``where`` is the file and line of the entry.
    """
    tensors, scalars = sum(a.tensor for a in d.inputs), sum(argument_kind(a) in ("scalar", "scalar?") for a in d.inputs)
    elementwise = d.structured is not None and d.structured.iterator
    fits = {
        "unary": (elementwise and tensors == 1, "an elementwise overload of one tensor"),
        "binary": (elementwise and tensors + scalars > 1, "an elementwise overload of several tensors or numbers"),
        "reduction": (not elementwise, "an overload that is not elementwise"),
        "matmul": (not elementwise and tensors > 1, "a product of two tensors"),
        "inplace": (d.kind == "inplace" or not d.returns, "an overload that writes into its first argument"),
        "factory": (not tensors, "an overload without a tensor"),
    }
    fit, expected = fits.get(entry.template, (True, ""))
    if not fit:
        raise metadata_error(where, f"{d.name}: template {entry.template!r} of {d.schema}", expected)


def _check_outputs(where: str, d: AtenDeclaration, entry: MetadataEntry, results: Sequence[str]) -> None:
    """Raise ``SL901`` if the metadata ``entry`` has an output that the overload ``d`` does not have, or a rule that
    does not suit it.

    ``results`` are the names of the results, and ``where`` is the file and line of the entry.
    """
    for name in (*entry.output, *(entry.graph if isinstance(entry.graph, dict) else ())):
        if name not in results:
            got = f"{d.name}: {name!r} is no output{suggest_nearest(name, results)}"
            raise metadata_error(where, got, f"one of {', '.join(results)}")
    if entry.output and d.kind == "inplace":
        raise metadata_error(
            where, f"{d.name}: 'output', which an in-place overload does not read", "an entry without it"
        )
    conditions = [(n, o.when) for n, o in entry.output.items()] + [(n, u.when) for n, u in entry.updates.items()]
    for name, when in conditions:
        if when and not names_in(when):
            raise metadata_error(
                where, f"{d.name}: {name!r}, when: {when!r} asks for no argument", "a condition, or none"
            )
        for negation, outcome in (("not ", "always"), ("", "never")):
            if when and find_contradiction([f"{negation}({when})"]):
                raise metadata_error(
                    where, f"{d.name}: {name!r}, when: {when!r} {outcome} holds", "a condition, or none"
                )
    for name, rule in entry.output.items():
        for field, value in (("when", rule.when), ("order", rule.order)):
            if value and d.kind == "out":
                got = f"{d.name}: output {name!r}: {field!r} of an output that the caller passes"
                raise metadata_error(where, got, f"no {field!r}")
        if element := find_negative_size(rule.sizes):
            raise metadata_error(
                where, f"{d.name}: output {name!r}, sizes: {element} is negative", "sizes of 0 and more"
            )


def _check_lets(where: str, d: AtenDeclaration, entry: MetadataEntry, taken: Set[str]) -> None:
    """Raise ``SL901`` if a name under ``let`` in the metadata ``entry`` hides another name, or if no result depends on
    it.

    The other names are those in ``taken`` and the functions that the entry calls. ``where`` is the file and line of the
    entry, and ``d`` its overload.
    """
    graphs = list(entry.graph.values()) if isinstance(entry.graph, dict) else [entry.graph]
    reached = set().union(*map(names_in, [*graphs, *(u.graph for u in entry.updates.values())]))
    # Later bindings may read earlier ones. In reverse order one pass finds every binding that is reached.
    for name, source in reversed(entry.let.items()):
        if name in taken:
            raise metadata_error(where, f"{d.name}, let: {name!r} is an argument or an output", "a name of its own")
        if any(re.search(rf"\b{name}\s*\(", text) for text in (*graphs, *entry.let.values())):
            raise metadata_error(where, f"{d.name}, let: {name!r} is a function that it calls", "a name of its own")
        if name not in reached:
            raise metadata_error(
                where, f"{d.name}, let: nothing reads {name!r}", "a binding that 'graph' uses, or none"
            )
        reached |= names_in(source)


def uses_of(
    where: str, d: AtenDeclaration, entry: MetadataEntry, family: WrapperFamily, used: Mapping[str, Set[str]]
) -> dict[str, str]:
    """Return the use of each argument of the overload, by name.

    Raise ``SL903`` if the value of an argument could be lost, and ``SL901`` if the entry contradicts itself.

    Args:
        where: The file and line of the entry.
        d: The overload.
        entry: The metadata entry of the overload.
        family: The family of its wrapper.
        used: The names that the entry's expressions use, by the uses ``graph input``, ``attribute``, ``guard`` and
            ``shape``.
    """
    uses = {a.name: _argument_use(a, entry, family, used) for a in d.inputs}
    lost = [f"{name!r}" for name, use in uses.items() if not use]
    if lost and family.graph:
        raise error(
            "SL903",
            where=f"{where}: {d.name}",
            got=f"{', '.join(lost)} of {d.schema}",
            expected="an argument that is mapped, guarded or shape only",
        )
    for name, use in uses.items():
        if use in ("graph input", "attribute") and name in (*entry.shape_only, *entry.redundant):
            raise metadata_error(
                where, f"{d.name}: {name!r} is stated as unused, and 'graph' uses it", "one of the two"
            )
    for a in d.inputs:
        # A number or a word is chosen by the caller: no other argument says it.
        if a.name in entry.redundant and argument_kind(a) in ("scalar", "scalar?", "str", "str?"):
            got = f"{d.name}, redundant: {a.name!r}, which no other argument decides"
            raise metadata_error(where, got, f"{a.name!r} in 'graph', or a guard that fixes it, such as {a.name} == 1")
    return uses


def _argument_use(a: AtenArgument, entry: MetadataEntry, family: WrapperFamily, used: Mapping[str, Set[str]]) -> str:
    """Return how the metadata ``entry`` uses the argument ``a``, such as ``graph input``, ``guard`` or ``shape only``.

    Return an empty string if the entry does not use it. ``used`` maps each use to the names that the entry's
    expressions use so. ``family`` has the guards (conditions on the arguments) that its entries share.
    """
    for use in ("graph input", "attribute"):
        if a.name in used[use]:
            return use
    if a.name in entry.redundant:
        return f"redundant: {entry.redundant[a.name]}"
    if a.name in entry.shape_only:
        return "shape only"
    # A guard such as ``alpha > 0`` mentions the argument but leaves many values.
    if a.name in used["guard"] and any(pins_argument(c, a.name) for c in (*family.guard, *entry.guard)):
        return "guard"
    if a.name in used["shape"] and shape_only(a):
        return "shape"
    # An argument that is only written carries no value into the op.
    return "result" if a.mutated else ""


def pins_argument(condition: str, name: str) -> bool:
    """Return whether ``condition`` fixes the argument ``name`` to one value, as ``name is None`` and ``name == 2`` do.

    >>> pins_argument("not transposed", "transposed"), pins_argument("alpha != 2", "alpha")
    (True, False)
    """
    try:
        tree = ast.parse(condition.strip(), mode="eval").body
    except SyntaxError:
        return False
    return _condition_pins(tree, name)


def _condition_pins(tree: ast.expr, name: str) -> bool:
    """Return whether the parsed condition ``tree`` fixes the argument ``name`` to one value."""
    match tree:
        # All parts of an ``and`` hold, so that one of them suffices.
        case ast.BoolOp(op=ast.And()):
            return any(_condition_pins(part, name) for part in tree.values)
        case ast.Name(id=found) | ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=found)):
            return found == name
        case ast.Compare(left=ast.Name(id=found), ops=[ast.Is() | ast.Eq()], comparators=[value]):
            return found == name and _is_literal(value)
        case ast.Compare(left=value, ops=[ast.Eq()], comparators=[ast.Name(id=found)]):
            return found == name and _is_literal(value)
        case ast.Call(func=ast.Name(id="all_are"), args=[ast.Name(id=found), value]):
            return found == name and _is_literal(value)
    return False


def _is_literal(tree: ast.expr) -> bool:
    """Return whether the expression ``tree`` contains no name."""
    return not any(isinstance(n, ast.Name) for n in ast.walk(tree))
