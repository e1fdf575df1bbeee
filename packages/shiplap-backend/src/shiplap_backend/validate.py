"""The checks of a metadata file that need neither torch's declarations nor the vendor's headers. Raise SL901."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from shiplap import ShiplapError
from shiplap.dtypes import in_aten
from shiplap_backend.entries import MetadataEntry, MetadataTarget, OutputRule, metadata_error, target_dtypes
from shiplap_backend.expression import DTYPES, OPERATORS, suggest_nearest
from shiplap_backend.families import FAMILIES
from shiplap_backend.versions import empty_range, is_range

At = Callable[..., str]  # the keys that lead to a value -> "file:line"
Problem = tuple[tuple[str, ...], str, str]  # keys, what was found, what is expected

# Fields of an output rule, by the modes that read them; the others would be ignored without a word.
_READ = {
    "sizes": ("sizes",),
    "dtype": ("bypass", "broadcast", "matmul", "reduce", "concat", "transpose", "sizes"),
    "when": ("bypass", "matmul", "reduce", "concat", "transpose", "sizes"),
    "format": ("matmul", "reduce", "concat", "transpose", "sizes", "meta"),
    "order": ("bypass", "sizes"),
    "of": ("bypass", "matmul", "reduce", "concat", "transpose", "sizes", "iterator"),
}
_NEEDED = {"sizes": "sizes", "broadcast": "dtype", "iterator": "of", "meta": "format"}


def check_target(target: MetadataTarget, at: At) -> None:
    """Raise ``SL901`` for the first invalid field of ``target``.

    The function ``at`` returns the file and line of nested keys.
    """
    _raise_first(_target_problems(target), at)


def check_entry(entry: MetadataEntry, target: MetadataTarget, at: At) -> None:
    """Raise ``SL901`` for the first field of the metadata ``entry`` that is invalid for ``target``.

    The function ``at`` returns the file and line of nested keys.
    """
    _raise_first(_entry_problems(entry, target), at)


def _raise_first(problems: Iterator[Problem], at: At) -> None:
    """Raise the first of ``problems`` as ``SL901``, if there is one.

    A problem has nested keys, a mistake, and what is expected. The function ``at`` returns the file and line of the
    keys.
    """
    for keys, got, expected in problems:
        problem: ShiplapError = metadata_error(at(*keys), got, expected)
        raise problem


def _target_problems(target: MetadataTarget) -> Iterator[Problem]:
    """Yield the keys, the mistake and the expected value of each invalid field of ``target``."""
    for name, members in target.dtypes.items():
        keys = ("dtypes", name)
        if name in DTYPES:
            yield keys, f"dtypes: a set that is called {name!r}, as a dtype is", "a name of its own"
        yield from _dtype_problems(keys, members, DTYPES)
    for symbol in target.operators:
        if symbol not in OPERATORS:
            got = f"operators: {symbol!r}{suggest_nearest(symbol, OPERATORS)}"
            yield ("operators", symbol), got, f"one of {' '.join(OPERATORS)}"
    yield from _duplicate_problems(("index_parameters",), "index_parameters", target.index_parameters)
    for package, versions in target.requires.items():
        if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", package):
            yield ("requires", package), f"requires: {package!r}", "the name of a Python package"
        yield from _version_problems(("requires", package), f"requires: {package}", versions)
    for pattern, why in target.falls_back.items():
        # A pattern such as ``*`` would give one reason for every overload.
        if not re.search(r"\w", pattern):
            got = f"falls_back: {pattern!r} fits every overload"
            yield ("falls_back", pattern), got, "a pattern with a part of a name: no one reason is that of all"
        yield from _reason_problems(("falls_back", pattern), f"falls_back: {pattern}", why)


def _entry_problems(entry: MetadataEntry, target: MetadataTarget) -> Iterator[Problem]:
    """Yield the keys, the mistake and the expected value of each field of the metadata ``entry`` that is invalid for
    ``target``.
    """
    sets = {**target.dtypes}
    if entry.dtypes != "":
        chosen = [entry.dtypes] if isinstance(entry.dtypes, str) else entry.dtypes
        yield from _dtype_problems(("dtypes",), chosen, {**sets, **DTYPES})
    for argument, dtype in entry.inputs.items():
        if dtype not in DTYPES and dtype not in ("raw", "compute"):
            got = f"inputs: {argument}: {dtype!r}{suggest_nearest(dtype, [*DTYPES, 'raw', 'compute'])}"
            yield ("inputs", argument), got, "raw, compute or a dtype"
        # Elementwise overloads promote their operands, so a fixed dtype would override the result's.
        elif dtype in DTYPES and entry.template in ("unary", "binary"):
            got = f"inputs: {argument}: {dtype!r} of an elementwise overload"
            yield ("inputs", argument), got, "no dtype: torch's promotion says in which dtype it computes"
    for name in entry.let:
        if not re.fullmatch(r"[A-Za-z]\w*", name) or name in ("inf", "nan", "compute"):
            yield ("let", name), f"let: {name!r}", "a name: letters, digits and underscores"
    bound = list(entry.let.items())
    for i, (name, expression) in enumerate(bound):
        # Two names for one expression suggest a difference that does not exist.
        same = [other for other, text in bound[:i] if "".join(text.split()) == "".join(expression.split())]
        if same:
            yield ("let", name), f"let: {name!r} is {same[0]!r} again", "one name for one expression"
    yield from _narrowing_problems(entry, target)
    for field in ("guard", "redundant"):
        for key, why in getattr(entry, field).items():
            yield from _reason_problems((field, key), f"{field}: {key}", why)
    for name in sorted({*entry.shape_only} & {*entry.redundant}):
        yield ("redundant", name), f"{name!r} is shape_only and redundant", "one of the two"
    yield from _duplicate_problems(("shape_only",), "shape_only", entry.shape_only)
    for name, rule in entry.output.items():
        yield from _output_problems(name, rule)
    for key, range_ in (("torch", entry.torch), ("vendor", entry.vendor)):
        if range_:
            yield from _version_problems((key,), key, range_)


def _narrowing_problems(entry: MetadataEntry, target: MetadataTarget) -> Iterator[Problem]:
    """Yield a problem for each dtype in the metadata ``entry`` that ``target`` does not have.

    Yield another one if the dtype of the computation cannot represent the values of an accepted dtype.
    """
    stated = [(("compute",), entry.compute), *((("inputs", name), dtype) for name, dtype in entry.inputs.items())]
    there = target_dtypes(target)
    for keys, dtype in stated:
        if dtype in DTYPES and dtype not in there:
            got = f"{': '.join(keys)}: {dtype!r}, which no set of the target's dtypes holds"
            yield keys, got, f"one of {', '.join(there)}, or {dtype} in a set of the target"
    if entry.compute not in DTYPES or entry.template not in FAMILIES:
        return
    if entry.compute == "bool":
        if "bool" not in entry.inputs.values() and not any("is_bool(" in condition for condition in entry.guard):
            got = "compute: 'bool' of an entry that does not say that only zero or not is asked"
            yield ("compute",), got, "inputs: {<argument>: bool}, or a guard with is_bool(<output>)"
        return
    rows = in_aten()
    into = rows[entry.compute]
    chosen = entry.dtypes or FAMILIES[entry.template].dtypes
    names = [chosen] if isinstance(chosen, str) else chosen
    for dtype in dict.fromkeys(d for n in names for d in target.dtypes.get(n, [n])):
        row = rows.get(dtype)
        if row is None or row.kind != "float" or dtype == entry.compute:
            continue
        # The width in bits decides: float16 and bfloat16 have values that the other lacks.
        if into.kind != "float" or into.dlpack[1] <= row.dlpack[1]:
            yield ("compute",), f"compute: {entry.compute!r}, which cannot hold the values of {dtype}", "a wider dtype"


def _output_problems(name: str, rule: OutputRule) -> Iterator[Problem]:
    """Yield the problems of ``rule``, the rule for the output ``name``. A problem has nested keys, a mistake, and what
    is expected.

    Examples are fields that the rule's mode does not read, and fields that are missing.
    """
    for field, modes in _READ.items():
        if getattr(rule, field) and rule.mode not in modes:
            yield (
                ("output", name),
                f"output: {name}: {field!r}, which mode {rule.mode!r} does not read",
                "a rule without it",
            )
    yield from _duplicate_problems(("output", name), f"output: {name}: format", rule.format)
    if sorted(rule.order) != list(range(len(rule.order))):
        yield ("output", name), f"output: {name}: order {rule.order}", "each dim once, counted from 0"
    if rule.order and rule.format:
        yield ("output", name), f"output: {name}: 'order' and 'format'", "one of the two"
    needed = _NEEDED.get(rule.mode)
    if needed and not getattr(rule, needed):
        yield ("output", name), f"output: {name}: mode {rule.mode!r} without {needed!r}", f"the field {needed!r}"


def _dtype_problems(keys: tuple[str, ...], chosen: Sequence[str], known: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of ``chosen``, a list of dtypes at the nested keys ``keys``.

    The list may be empty, have a dtype that is not in ``known``, or repeat one.
    """
    what = ": ".join(keys)
    if not chosen:
        yield keys, f"{what}: no dtype at all", "at least one dtype, or no such field"
    for dtype in chosen:
        if dtype not in known:
            yield keys, f"{what}: {dtype!r}{suggest_nearest(dtype, known)}", f"one of {', '.join(known)}"
    yield from _duplicate_problems(keys, what, chosen)


def _duplicate_problems(keys: tuple[str, ...], what: str, names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each of ``names`` that is repeated.

    ``keys`` are the nested keys of the list, and ``what`` is its name for the error.
    """
    for i, name in enumerate(names):
        if name in names[:i]:
            yield keys, f"{what}: {name!r} twice", "each name once"


def _reason_problems(keys: tuple[str, ...], what: str, why: str) -> Iterator[Problem]:
    """Yield a problem if the reason ``why`` is empty.

    ``keys`` are its nested keys, and ``what`` is its name for the error.
    """
    if not why.strip():
        yield keys, f"{what}: no reason", "a text that says why"


def _version_problems(keys: tuple[str, ...], what: str, versions: str) -> Iterator[Problem]:
    """Yield a problem if ``versions`` is no version range, or if no version lies in it.

    ``keys`` are its nested keys, and ``what`` is its name for the error.
    """
    if not is_range(versions):
        yield keys, f"{what}: {versions!r}", "a version range such as '>=2.11,<2.14'"
    elif empty_range(versions):
        yield keys, f"{what}: {versions!r}, in which no version lies", "a lower bound below the upper one"
