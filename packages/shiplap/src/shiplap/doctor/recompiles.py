"""The reasons why a function was compiled again: the guard that failed, the property that varied, and the remedy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from shiplap.doctor.diagnosis import Recompile, SourcePlace
from shiplap.doctor.places import definition_line, make_place, methods_around, statement_at
from shiplap.doctor.sightings import Compilation


@dataclass(frozen=True)
class VariationKind:
    """A kind of variation of a value, which makes torch compile a function again. It has a title, the remedy in one
    sentence, and an example in which ``{name}`` and ``{dim}`` stand for the value.
    """

    title: str
    fix: str
    example: str = ""


# torch names the failed guard; the remedy depends on the kind of property that it guards.
VARIATION_KINDS: dict[str, VariationKind] = {
    "size": VariationKind(
        "a tensor's size",
        "mark the dim as dynamic before the first call, or compile with dynamic=True; @sl.op keeps dims symbolic",
        "torch._dynamo.mark_dynamic({name}, {dim})  # before the first call",
    ),
    "parameter": VariationKind(
        "the size of a parameter or buffer",
        "sizes of parameters are fixed unless torch._dynamo.config.force_parameter_static_shapes is False; the other "
        "way is one size for all, by padding",
    ),
    "small": VariationKind(
        "a size of 0 or 1",
        "sizes 0 and 1 get a version of their own; pad to 2, or mark the dim with torch._dynamo.mark_unbacked",
        "torch._dynamo.mark_unbacked({name}, {dim})  # never specialised, not even on 0 and 1",
    ),
    "rank": VariationKind(
        "a tensor's number of dims",
        "reshape to one rank before the compiled function",
        "{name} = {name}.reshape(-1, {name}.shape[-1])",
    ),
    "stride": VariationKind(
        "a tensor's memory layout",
        "call .contiguous() in front of the compiled function",
        "{name} = {name}.contiguous()",
    ),
    "dtype": VariationKind(
        "a tensor's dtype",
        "convert in front of the compiled function: there is one version per dtype",
        "{name} = {name}.to(torch.float32)",
    ),
    "device": VariationKind(
        "a tensor's device, subclass or dispatch keys", "one device and one tensor class per function"
    ),
    "grad": VariationKind(
        "requires_grad of a tensor, or the grad mode",
        "call it under one mode: the same torch.no_grad() or requires_grad each time",
    ),
    "value": VariationKind(
        "a Python number, string or bool",
        "pass it as a tensor, or as an int argument that stays symbolic (SymInt); strings and bools are compiled in",
        "torch.compile(fn, dynamic=True)  # ints stay symbolic; a float: pass torch.tensor({name})",
    ),
    "attribute": VariationKind(
        "an attribute that differs between objects, or is set between calls",
        "pass it as an argument; an int attribute of a module varies freely with "
        "torch._dynamo.config.allow_unspec_int_on_nn_module",
    ),
    "mode": VariationKind(
        "the training mode: train() or eval() between calls",
        "nothing has to change: each of the two modes needs a version, which is compiled once",
    ),
    "counter": VariationKind(
        "an attribute that the function itself changes, such as a counter",
        "count outside the compiled function; an int of a module varies freely with "
        "torch._dynamo.config.allow_unspec_int_on_nn_module",
    ),
    "lazy": VariationKind(
        "a value that is None at first and created later", "create it before the first call of the compiled function"
    ),
    "optional": VariationKind(
        "an argument that is None in some calls",
        "nothing has to change: calls with None and calls without it need a version each; one version serves both if "
        "the caller passes a tensor that changes nothing",
    ),
    "carried": VariationKind(
        "a value that torch carries over a graph break", "it is carried over a graph break; remove that break first"
    ),
    "length": VariationKind(
        "the length or the keys of a list, set or dict",
        "keep its length and keys the same from call to call: pad to one length, and fill a list that grows outside "
        "the compiled function",
    ),
    "type": VariationKind("a Python type", "pass one type: always float, or always int, or always a tensor"),
    "identity": VariationKind(
        "which object it was",
        "create it once, outside the compiled function, and reuse it; nothing has to change for a few objects that "
        "each need code of their own, such as members of an enum",
    ),
    "other": VariationKind("something else", "read the guard; what it names has to stay the same from call to call"),
}


@dataclass(frozen=True)
class GuardFailure:
    """A failure of a guard, which is torch's condition for reusing compiled code. ``cause`` is the kind of the value
    that varied, a key of ``VARIATION_KINDS``. ``subject`` is the argument, dim or attribute, and ``values`` are its
    values before and after, as far as torch says.
    """

    cause: str
    subject: str
    values: tuple[str, ...] = ()


_TENSOR_GUARD = re.compile(
    r"tensor '(?P<name>.+?)' (?P<what>.+?) mismatch(?: at index (?P<dim>\d+))?"
    r"(?:\. expected (?P<old>.+?)(?:, actual (?P<new>.+))?)?$"
)
_EQUALITY_GUARD = re.compile(r"^(?P<name>[^=<>!]+?) (?:==|is) (?P<old>.+)$")
# Torch guards on the outcome of a comparison where a number varies freely.
_ORDER_GUARD = re.compile(r"(?P<name>[A-Za-z_][\w.\[\]']*) (?:<|<=|>|>=|!=) (?P<old>-?[\w.]+)")
# One with a formula, or with two bounds: the guard names a variable among numbers and signs.
_FORMULA_GUARD = re.compile(r"[-+*/%().\d\s]*(?P<name>[A-Za-z_][\w.\[\]']*)[-+*/%().\d\s]*")
# An attribute, and no number such as 1.0.
_OWNED = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])*\.")
_KIND_OF_TENSOR_GUARD = {"size": "size", "rank": "rank", "stride": "stride", "dtype": "dtype", "requires_grad": "grad"}


def parse_failed_guard(reason: str) -> GuardFailure:
    """Return the kind, the name and the values of the value that varied, from torch's text of a failed guard. A guard
    is torch's condition for reusing compiled code.

    An example of ``reason`` is ``0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5``.
    """
    guard = _guard_condition(reason)
    if "Cache line invalidated" in guard or re.match(r"\w*\W*___stack\d", guard):
        return GuardFailure("carried", (re.search(r"___stack\d+", guard) or ["a freed object"])[0])
    if match := _TENSOR_GUARD.search(guard):
        return _parse_tensor_guard(match, reason)
    if match := re.fullmatch(r"not ([\w.\[\]'\"]+)", guard):
        return GuardFailure("length", plain_source(match[1]))
    if match := re.match(r"not ((?:\w|\.|\[|\]|\(|\)|')+cell_contents)$", guard):  # a variable of an enclosing function
        return GuardFailure("length", match[1])
    name = _source_of_guard(guard)
    # Guards on types and objects may contain "==" as well, so they are tried first.
    if match := re.match(r"expected type of '(.+?)' to be ", guard):
        return GuardFailure("type", plain_source(match[1]))
    if "___check_type_id" in guard or "type(" in guard:
        return GuardFailure("type", name)
    if match := re.fullmatch(r"(.+) is None", guard):
        argument = re.fullmatch(r"L\['\w+'\]|\w+", match[1])  # an attribute is filled, and an argument comes anew
        return GuardFailure("optional" if argument else "lazy", plain_source(match[1]), ("None",))
    if "___check_obj_id" in guard or " is " in guard:
        return GuardFailure("identity", name)
    if "GLOBAL_STATE" in guard or "grad_mode" in guard or "requires_grad" in guard:
        return GuardFailure("grad", "the grad mode or another global setting" if "GLOBAL" in guard else name)
    # A layout is compared with sizes, as in x.stride()[0] == x.size()[1].
    if match := re.search(r"([\w.\[\]']+?)\.stride\(\)", guard):
        return GuardFailure("stride", plain_source(match[1]))
    # A module may have an attribute called shape itself.
    if re.search(r"\.size\(\)|\.shape|size\(\)\[", guard) and not re.match(r"(L\['self'\]|self)\.shape\b", guard):
        sized = re.search(r"([\w.\[\]']+?)\.(?:size\(\)|shape)\[(\d+)\]", guard)
        subject = f"{plain_source(sized[1])}, dim {sized[2]}" if sized else guard
        # A size that leaves a range may be below or above it, and torch does not say which.
        small = re.search(r"(^|[^\d\[])[012]( |$)", guard) and not re.search(r"<.*<", guard)
        return GuardFailure("small" if small else "size", subject)
    if guard.startswith("len("):
        return GuardFailure("length", plain_source(guard[4:].partition(")")[0]))
    if match := re.search(r"___\w*contains\(.+, ([^,]+)\)$", guard):
        return GuardFailure("length", plain_source(match[1]))
    if re.search(r"___\w*(contains|keys)", guard) or re.match(r"(not )?.+ (not )?in \S+$", guard):
        return GuardFailure("length", plain_source(re.findall(r"[\w.]+", guard)[-1]) if " in " in guard else name)
    if match := _EQUALITY_GUARD.match(guard) or _ORDER_GUARD.fullmatch(guard):
        name = plain_source(match["name"])
        owned = _OWNED.search(name.removesuffix(".item()"))  # a tensor's value is a number of its own
        kind = "mode" if name.endswith(".training") else "attribute" if owned else "value"
        return GuardFailure(kind, name, (match["old"],))
    sides = [side for side in re.split(r"<=|>=|==|!=|<|>", guard) if re.search(r"[A-Za-z_]", side)]
    if len(sides) == 1 and sides[0] != guard and (match := _FORMULA_GUARD.fullmatch(sides[0])):
        name = plain_source(match["name"])
        return GuardFailure("attribute" if _OWNED.search(name) else "value", name)
    return GuardFailure("other", name or guard)


def plain_source(name: str) -> str:
    """Return the name of a variable as it is written in the program. For torch's ``L['self']._modules['attn']`` it is
    ``self.attn``, and for ``G['__import_package_dot_module'].kept`` it is ``package.module.kept``.
    """
    name = re.sub(r"(?:\bG\[')?__import_(\w+)(?:'\])?", lambda m: m[1].replace("_dot_", "."), name)
    name = name.removeprefix("__main__.")
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)


def _parse_tensor_guard(match: re.Match[str], reason: str) -> GuardFailure:
    """Return the failure of a guard on a tensor, with the property that varied and its values.

    ``match`` is the match of ``_TENSOR_GUARD`` in ``reason``, torch's text of the failed guard.
    """
    values = tuple(v for v in (match["old"], match["new"]) if v)
    cause = _KIND_OF_TENSOR_GUARD.get(match["what"].split()[-1], "device")
    # torch compiles sizes 0 and 1 apart even where a dim is dynamic.
    if cause == "size" and {"0", "1"} & set(values):
        cause = "small"
    if cause in ("size", "small") and ("parameter" in reason or re.search(r"_parameters|_buffers", match["name"])):
        cause = "parameter"
    return GuardFailure(
        cause, plain_source(match["name"]) + (f", dim {match['dim']}" if match["dim"] is not None else ""), values
    )


def _guard_condition(reason: str) -> str:
    """Return the condition that failed, from torch's text of a failed guard. The compile id before it and the source
    line and stack behind it are left out.
    """
    first = re.sub(r"^\d+/\d+: ", "", reason.strip().splitlines()[0])
    return re.split(r"\s+# |\s+\(HINT|\. Guard failed", first)[0].strip()


def _source_of_guard(guard: str) -> str:
    """Return the expression on which ``guard``, a condition for reusing compiled code, depends, as it is written in the
    program. Return an empty string if there is none.
    """
    match = re.search(r"\(([^,()]+)", guard) or re.match(r"(?:not )?([\w.\[\]']+)", guard)
    return plain_source(match[1]) if match else ""


def find_reader(reason: str, file: str) -> SourcePlace | None:
    """Return the source line that read the value which a guard compares, or None if it is not known.

    ``reason`` is torch's text of the failed guard, which names the line as in ``# y = x[n] # model.py:12 in forward``.
    ``file`` is the path of the compiled function, of which torch may print the last parts alone.
    """
    match = re.search(r"#\s+(\S*?):(\d+) in (\w+)", reason)
    if match is None:
        return None
    # torch shortens the paths of files to their last parts.
    path = Path(match[1]) if Path(match[1]).is_file() or not file.endswith(match[1]) else Path(file)
    return make_place(str(path), int(match[2]), match[3]) if path.is_file() else None


def _is_written(subject: str, place: SourcePlace) -> bool:
    """Return whether the function at the line ``place`` assigns the attribute ``subject``, such as ``self.count``. Each
    call then changes it. Methods of the same class that the function calls by ``self`` count as well.
    """
    todo, methods = [statement_at(place)], methods_around(place)
    while todo:
        function = todo.pop()
        for node in ast.walk(function) if function else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node) == subject:
                return True
            called = re.fullmatch(r"self\.(\w+)", ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if called and called[1] in methods:
                todo.append(methods.pop(called[1]))
    return False


def group_recompiles(compiled: Iterable[Compilation]) -> list[Recompile]:
    """Return one recompile for each function, cause and varied value among the compilations ``compiled``. The most
    costly one comes first.
    """
    groups: dict[tuple[str, int, str, str], list[tuple[Compilation, str, GuardFailure]]] = {}
    for c in compiled:
        reason = c.metrics.get("recompile_reason")
        if reason and c.file:
            failure = parse_failed_guard(str(reason))
            start = definition_line(c.file, c.line)  # a function that goes on after a break is the same function
            if failure.cause == "attribute":
                at = find_reader(str(reason), c.file)
                written = _is_written(failure.subject, make_place(c.file, start)) or (
                    at and _is_written(failure.subject, make_place(at.file, definition_line(at.file, at.line)))
                )
                failure = replace(failure, cause="counter") if written else failure
            groups.setdefault((c.file, start, failure.cause, failure.subject), []).append((c, str(reason), failure))
    return sorted(map(_make_recompile, groups.values()), key=lambda r: r.cost, reverse=True)


def _owner_of(place: SourcePlace) -> str:
    """Return whose code has to change, for a recompile whose value is read at the line ``place``. It is the name of a
    library, or ``"yours"``.

    A function of torch reads what the program passes to it, and so does Python.
    """
    return place.package if place.package not in ("", "torch", "python") else "yours"


def _make_recompile(rows: list[tuple[Compilation, str, GuardFailure]]) -> Recompile:
    """Return the recompile that stands for ``rows``, all compilations of one function with the same cause and varied
    value.

    Each row is (compilation, torch's text of the failed guard, its parsed form).
    """
    (first, reason, failure), varied = rows[0], VARIATION_KINDS[rows[0][2].cause]
    subject, _, dim = failure.subject.partition(", dim ")
    example = varied.example.replace("{name}", subject).replace("{dim}", dim or "0")
    # An example names a variable of the program, which only a plain name is.
    example = example if subject.isidentifier() else ""
    place = make_place(first.file, definition_line(first.file, first.line), first.function)
    reader = find_reader(reason, first.file)
    carried = failure.cause == "carried" or subject.startswith("___")
    return Recompile(
        place=place,
        cause=failure.cause,
        title=varied.title,
        subject=failure.subject,
        values=tuple(dict.fromkeys(v for _, _, f in rows for v in f.values)),
        guard=_guard_condition(reason),
        fix=VARIATION_KINDS["carried"].fix if carried else varied.fix,
        example="" if carried else example,
        reason=reason,
        reader=reader,
        owner=_owner_of(reader or place),
        follows="a graph break in the same function" if carried else "",
        times=len(rows),
        seconds=sum(c.seconds for c, _, _ in rows),
        limit=any("recompile limit" in str(c.metrics.get("fail_reason")) for c, _, _ in rows),
        observers=tuple(dict.fromkeys(c.observer for c, _, _ in rows if c.observer)),
    )
