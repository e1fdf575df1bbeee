"""How many of the schemas that torch and installed packages register a declaration can say, and what the others need.

    python tools/count_schemas.py                                ATen's, as the installed torch registers them
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
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

import shiplap as sl

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
RESULT = Shaped[Tensor, "*s"]
ALIAS = re.compile(r"\(\w+!?( -> \w+)?\)")


class Unsayable(Exception):
    """Why no declaration has this schema."""


def annotation(kind: str) -> Any:
    """The annotation of an argument whose type, without alias sets, is ``kind``."""
    if kind.endswith("?"):
        return annotation(kind[:-1]) | None
    if listed := re.fullmatch(r"(.+)\[\d*\]", kind):
        if listed[1].endswith("?"):
            raise Unsayable("a list with absent members")
        if not kind.endswith("[]"):
            raise Unsayable("a list of fixed length")
        return list[annotation(listed[1])]  # type: ignore[misc] # known at run time only
    if kind not in TYPES:
        raise Unsayable(f"an argument of type {kind}")
    return TYPES[kind]


def declare(schema: Any, name: str) -> Any:
    """The op that a generated declaration of ``schema`` registers as ``name``."""
    arguments = list(schema.arguments)
    texts = written_types(schema)
    returns = [str(r.type) for r in schema.returns]
    if any(r.alias_info is not None for r in schema.returns):
        raise Unsayable("a result that is an argument, or a view of one")
    if any(kind != "Tensor" for kind in returns):
        raise Unsayable("a result that is no tensor")
    mutates = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    hints: dict[str, Any] = {a.name: annotation(kind) for a, kind in zip(arguments, texts, strict=True)}
    first = next((a.name for a, kind in zip(arguments, texts, strict=True) if kind == "Tensor"), None)
    if first is None:
        raise Unsayable("no tensor that is always there")
    hints[first] = RESULT
    hints["return"] = None if not returns else RESULT if len(returns) == 1 else tuple[(RESULT,) * len(returns)]
    if not returns and not mutates:
        raise Unsayable("no result and nothing written to")
    return sl.op(name, mutates=mutates, autocast=None)(function(arguments, hints))


def written_types(schema: Any) -> list[str]:
    """The types of the arguments as the schema writes them, without alias sets."""
    text = str(schema).partition("(")[2].rpartition(") -> ")[0]
    parts = [p.strip() for p in re.split(r", (?![^\[]*\])(?![^()]*\))", ALIAS.sub("", text))]
    return [re.sub(r" \w+(=.*)?$", "", p) for p in parts if p and p != "*"]


def function(arguments: list[Any], hints: dict[str, Any]) -> Callable[..., Any]:
    """A function with the names, defaults and annotations of a schema."""
    parts, starred = [], False
    for index, a in enumerate(arguments):
        if a.kwarg_only and not starred:
            parts, starred = [*parts, "*"], True
        parts.append(f"{a.name}=defaults[{index}]" if a.has_default_value() else a.name)
    scope: dict[str, Any] = {"defaults": [a.default_value for a in arguments]}
    exec(f"def reference({', '.join(parts)}): raise NotImplementedError", scope)
    made: Callable[..., Any] = scope["reference"]
    made.__annotations__ = hints
    made.__module__ = __name__
    return made


def normal(schema: str) -> str:
    """A schema without its name, with numbered alias sets, and SymInt for int."""
    text, names = schema.partition("(")[2], dict[str, str]()
    text = re.sub(r"\((\w+)(!?)\)", lambda m: f"({names.setdefault(m[1], str(len(names)))}{m[2]})", text)
    return re.sub(r"\bint\b", "SymInt", text)


def verdict(schema: Any, number: int) -> str:
    """``exact``, ``same``, or why the schema cannot be said."""
    try:
        op = declare(schema, f"counted::op{number}")
    except Unsayable as e:
        return str(e)
    except Exception as e:
        return f"refused: {type(e).__name__} {str(e).splitlines()[0]}"
    got, want = str(op.overload._schema), str(schema)
    if got.partition("(")[2] == want.partition("(")[2]:
        return "exact"
    return "same" if normal(got) == normal(want) else "another schema"


def schemas(namespaces: set[str]) -> Iterator[Any]:
    """The registered schemas of these namespaces, each once."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.partition("::")[0] in namespaces:
            yield schema


def main() -> None:
    """Count, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="packages to import; their new namespaces are counted")
    parser.add_argument("--namespace", action="append", default=[], help="count this namespace as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    before = {s.name.partition("::")[0] for s in torch._C._jit_get_all_schemas()}
    for package in options.packages:
        importlib.import_module(package)
    new = {s.name.partition("::")[0] for s in torch._C._jit_get_all_schemas()} - before
    wanted = set(options.namespace) | (new if options.packages else set() if options.namespace else {"aten"})
    counts = Counter(verdict(s, i) for i, s in enumerate(list(schemas(wanted))))
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
