"""How many of the schemas that torch and installed packages register a declaration can say, and what the others need.

    python tools/count_schemas.py                                ATen's, as the installed torch registers them
    python tools/count_schemas.py --run                          and calls each op, with tensors and with fakes
    python tools/count_schemas.py torchvision torchao --json     those of packages, which are imported

For each schema a declaration is generated, registered in a namespace of its own, and compared with the schema. An
*exact* one has the same text. One that is the *same* differs by the names of alias sets, and by sizes, which are SymInt
in a declaration where older schemas have int. What no declaration says is counted by its reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shiplap as sl
from shiplap.dtypes import DTYPES

TYPES: dict[str, Any] = {
    "Tensor": Shaped[Tensor, "..."],
    "int": int,
    "SymInt": int,
    "float": float,
    "bool": bool,
    "str": str,
    "complex": complex,
    "Scalar": int | float,
    "ScalarType": torch.dtype,
    "Device": torch.device,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Generator": torch.Generator,
}
NUMBERED: dict[str, dict[int, Any]] = {
    "ScalarType": {row.number: getattr(torch, name) for name, row in DTYPES.items()},
    "MemoryFormat": {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last},
    "Layout": {0: torch.strided, 1: torch.sparse_coo},
}
SAMPLES: dict[str, Any] = {
    "int": 1,
    "SymInt": 1,
    "float": 1.0,
    "bool": False,
    "str": "a",
    "complex": 1j,
    "Scalar": 2,
    "ScalarType": torch.float32,
    "Device": torch.device("cpu"),
    "Layout": torch.strided,
    "MemoryFormat": torch.contiguous_format,
}
ALIAS = re.compile(r"\([\w*|$]+!?( -> [\w*|$]*)?\)")


class Unsayable(Exception):
    """Why no declaration has this schema."""


def annotation(kind: str) -> Any:
    """The annotation of an argument whose type, without alias sets, is ``kind``."""
    if kind.endswith("?"):
        return annotation(kind[:-1]) | None
    if listed := re.fullmatch(r"(.+)\[(\d*)\]", kind):
        element, length = annotation(listed[1]), int(listed[2] or 0)
        return tuple[(element,) * length] if length else list[element]  # type: ignore[misc, valid-type] # at run time
    if kind not in TYPES:
        raise Unsayable(f"the type {kind}")
    return TYPES[kind]


def declare(schema: Any, name: str, reference: Callable[..., Any] | None = None) -> Any:
    """The op that a generated declaration of ``schema`` registers as ``name``, with the body ``reference``."""
    arguments, texts = list(schema.arguments), written_types(schema)
    if len(texts) != len(arguments):
        raise Unsayable("any number of arguments")
    hints: dict[str, Any] = {a.name: annotation(kind) for a, kind in zip(arguments, texts, strict=True)}
    mutates = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    kinds = [annotation(kind) for kind in result_types(schema)]
    if not kinds and not mutates:
        raise Unsayable("no result and nothing written to")
    hints["return"] = None if not kinds else kinds[0] if len(kinds) == 1 else tuple[tuple(kinds)]  # type: ignore[misc]
    aliases = [alias_of(r, arguments) for r in schema.returns]
    outputs = [f"result{i}" for i in range(aliases.count(None))]
    static = [a.name for a, kind in zip(arguments, texts, strict=True) if re.match(r"int\b", kind)]
    function = made(arguments, hints, reference)
    declared = sl.op(name, mutates=mutates, aliases=aliases, outputs=outputs, static=static, sizes="reference")
    return declared(function)


def alias_of(result: Any, arguments: list[Any]) -> str | None:
    """The argument that a result may share memory with."""
    if result.alias_info is None:
        return None
    wanted = result.alias_info.before_set
    shared = [a for a in arguments if a.alias_info is not None]
    known = [a.name for a in shared if a.alias_info.before_set & wanted or (not wanted and not a.alias_info.is_write)]
    if not known:
        raise Unsayable("a result that shares memory with no argument")
    return str(known[0])


def written_types(schema: Any) -> list[str]:
    """The types of the arguments as the schema writes them, without alias sets."""
    text = plain(schema).partition("(")[2].rpartition(") -> ")[0]
    return [re.sub(r" \w+(=.*)?$", "", p) for p in parts(text) if p and p != "*"]


def result_types(schema: Any) -> list[str]:
    """The types of the results, without alias sets and names."""
    text = plain(schema).rpartition(") -> ")[2]
    return [re.sub(r" \w+$", "", p) for p in (parts(text[1:-1]) if text.startswith("(") else [text]) if p]


def plain(schema: Any) -> str:
    """The schema without alias sets, as torch shows it."""
    name, opening, rest = str(schema).partition("(")
    return name + opening + ALIAS.sub("", rest)


def parts(text: str) -> list[str]:
    """``text`` cut at the commas between arguments."""
    return [p.strip() for p in re.split(r", (?![^\[]*\])(?![^()]*\))", text)]


def made(arguments: list[Any], hints: dict[str, Any], reference: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function with the names, defaults and annotations of a schema, which calls ``reference``."""
    parts, starred = [], False
    for index, a in enumerate(arguments):
        if a.kwarg_only and not starred:
            parts, starred = [*parts, "*"], True
        parts.append(f"{a.name}=defaults[{index}]" if a.has_default_value() else a.name)
    given = ", ".join(a.name for a in arguments)
    scope: dict[str, Any] = {"defaults": [default(a) for a in arguments], "body": reference}
    exec(f"def generated({', '.join(parts)}): return body({given})", scope)
    function: Callable[..., Any] = scope["generated"]
    function.__annotations__ = hints
    function.__module__ = __name__
    return function


def default(argument: Any) -> Any:
    """The default of an argument, which schemas write as a number where it is one of torch's own types."""
    value, kind = argument.default_value, str(argument.real_type)
    if isinstance(value, int) and kind in ("ScalarType", "MemoryFormat", "Layout"):
        return NUMBERED[kind].get(value, value)
    return value


def normal(schema: str) -> str:
    """A schema without its name and those of its results, with numbered alias sets, and SymInt for int."""
    text, names = schema.partition("(")[2], dict[str, str]()
    text = re.sub(r"\(\$?(\w+)(!?)( -> \*?)?\)", lambda m: f"({names.setdefault(m[1], str(len(names)))}{m[2]})", text)
    text = re.sub(r"(\[\])(\(\d+!?\))", r"\2\1", text)  # of a list, as older schemas have it
    given, arrow, results = re.sub(r"\bint\b", "SymInt", text).rpartition(") -> ")
    return given + arrow + re.sub(r"([^(,]) (\w+)(?=[,)])", r"\1", results)


def verdict(schema: Any, number: int, *, run: bool = False) -> str:
    """``exact``, ``same``, or why the schema cannot be said."""
    try:
        op = declare(schema, f"counted::op{number}", partial(stand_in, schema))
    except Unsayable as e:
        return str(e)
    except Exception as e:
        return f"refused: {type(e).__name__} {str(e).splitlines()[0]}"
    got, want = str(op.overload._schema), str(schema)
    if run and (problem := runs(op, schema)):
        return f"does not run: {problem}"
    if got.partition("(")[2] == want.partition("(")[2]:
        return "exact"
    return "same" if normal(got) == normal(want) else "another schema"


def sample(kind: str, like: Callable[[], Tensor]) -> Any:
    """A value of a type of a schema."""
    if kind.endswith("?"):
        return None
    if listed := re.fullmatch(r"(.+)\[(\d*)\]", kind):
        return [sample(listed[1], like) for _ in range(int(listed[2] or 2))]
    return like() if kind == "Tensor" else torch.Generator() if kind == "Generator" else SAMPLES[kind]


def stand_in(schema: Any, *args: Any) -> Any:
    """A reference with results of the right kinds: arguments that the op writes to, views, and new values."""
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=True)}
    results = []
    for result, kind in zip(schema.returns, result_types(schema), strict=True):
        alias = alias_of(result, list(schema.arguments))
        if alias is None:
            results.append(sample(kind, lambda: torch.ones(2, 3)))
        elif result.alias_info.is_write:
            results.append(given[alias])
        else:
            results.append([given[alias][:1]] if kind.endswith("[]") else given[alias].view(-1))
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def runs(op: Any, schema: Any) -> str:
    """Empty if a call of the op gives the declared results, with tensors and with fakes, else what it gives."""
    kinds = written_types(schema)
    for mode in (nullcontext(), FakeTensorMode()):
        with mode, torch.no_grad():
            values = [sample(kind, lambda: torch.ones(2, 3)) for kind in kinds]
            positional, named = op.spec.split(values)
            try:
                result = op.overload(*positional, **named)
            except Exception as e:
                return f"{type(e).__name__} {str(e).splitlines()[0]}"
        given = () if result is None else (result,) if len(schema.returns) == 1 else result
        if len(given) != len(schema.returns):
            return f"{len(given)} results"
        fake = isinstance(mode, FakeTensorMode)
        if any(isinstance(v, FakeTensor) is not fake for v in given if isinstance(v, Tensor)):
            return "results with data"
    return ""


def schemas(namespaces: set[str]) -> Iterator[Any]:
    """The registered schemas of these namespaces, each once."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.partition("::")[0] in namespaces:
            yield schema


def main() -> None:
    """Count, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="packages to import; their new namespaces are counted")
    parser.add_argument("--namespace", action="append", default=[], help="count this namespace alone")
    parser.add_argument("--text", action="store_true", help="count the schemas on stdin, one a line")
    parser.add_argument("--run", action="store_true", help="call each op as well, with tensors and with fakes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    before = {s.name.partition("::")[0] for s in torch._C._jit_get_all_schemas()}
    for package in options.packages:
        importlib.import_module(package)
    new = {s.name.partition("::")[0] for s in torch._C._jit_get_all_schemas()} - before
    wanted = set(options.namespace) or (new if options.packages else {"aten"})
    counted = [torch._C.parse_schema(line) for line in sys.stdin] if options.text else list(schemas(wanted))
    counts = Counter(verdict(s, i, run=options.run) for i, s in enumerate(counted))
    total = sum(counts.values())
    expressible = counts["exact"] + counts["same"]
    if options.json:
        print(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "namespaces": sorted(wanted),
                    "total": total,
                    "expressible": expressible,
                    "by": counts,
                }
            )
        )
        return
    print(f"torch {torch.__version__}, {', '.join(sorted(wanted))}: {expressible} of {total} schemas are expressible")
    for reason, count in counts.most_common():
        print(f"{count:6}  {reason}")


if __name__ == "__main__":
    main()
