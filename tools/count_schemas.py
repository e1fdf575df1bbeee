"""How many of the schemas that torch and installed packages register a declaration can say, and what the others need.

    python tools/count_schemas.py                                ATen's, as the installed torch registers them
    python tools/count_schemas.py --run                          and calls each op, with tensors and with fakes
    python tools/count_schemas.py torchvision torchao --json     those of packages, which are imported
    pip install --no-deps -r tools/count_schemas.txt             the packages of the record, in its versions
    python tools/count_schemas.py --pinned --minimum 95         fails below that share, or for another version

An op of a package counts if its declaration is registered and a call of it runs, with tensors and under its fake. For
each schema a declaration is generated, registered in a namespace of its own, and compared with the schema. An
*exact* one has the same text. One that is the *same* differs by the names of alias sets, and by sizes, which are SymInt
in a declaration where older schemas have int. What no declaration says is counted by its reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shiplap as sl
from shiplap.scaffold.package import find_package_ops, installed_version
from shiplap.scaffold.schema import SchemaForm, UndeclarableSchema, parse_schema, types_in_schema

SCOPE = {"Shaped": Shaped, "Tensor": Tensor, "torch": torch, "inf": float("inf"), "nan": float("nan")}
PINNED = Path(__file__).with_name("count_schemas.txt")
MODULES = {"fbgemm-gpu-cpu": "fbgemm_gpu"}  # imported under another name than that of the distribution
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


def declare(schema: Any, name: str, reference: Callable[..., Any] | None = None) -> Any:
    """The op that a generated declaration of ``schema`` registers as ``name``, with the body ``reference``."""
    form = parse_schema(schema)
    hints: dict[str, Any] = {a.name: value(a.annotation()) for a in form.arguments}
    results = [value(r.annotation()) for r in form.results]
    hints["return"] = None if not results else results[0] if len(results) == 1 else tuple[tuple(results)]  # type: ignore[misc]
    aliases = [r.alias or None for r in form.results]
    outputs = [f"result{i}" for i in range(aliases.count(None))]
    function = made(form, hints, reference)
    declared = sl.op(
        name, mutates=form.mutates, aliases=aliases, outputs=outputs, specialize=form.specialize, fake="reference"
    )
    return declared(function)


def value(source: str) -> Any:
    """An annotation or a default, as ``shiplap init`` writes it."""
    return eval(source, dict(SCOPE))


def made(form: SchemaForm, hints: dict[str, Any], reference: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function with the names, defaults and annotations of a schema, which calls ``reference``."""
    parts, starred = [], False
    for index, a in enumerate(form.arguments):
        if a.keyword_only and not starred:
            parts, starred = [*parts, "*"], True
        parts.append(f"{a.name}=defaults[{index}]" if a.default is not None else a.name)
    given = ", ".join(a.name for a in form.arguments)
    defaults = [None if a.default is None else value(a.default) for a in form.arguments]
    scope: dict[str, Any] = {"defaults": defaults, "body": reference}
    exec(f"def generated({', '.join(parts)}): return body({given})", scope)
    function: Callable[..., Any] = scope["generated"]
    function.__annotations__ = hints
    function.__module__ = __name__
    return function


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
    except UndeclarableSchema as e:
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
    form = parse_schema(schema)
    given = {a.name: v for a, v in zip(form.arguments, args, strict=True)}
    results = []
    for result in form.results:
        if not result.alias:
            results.append(sample(result.kind, lambda: torch.ones(2, 3)))
        elif result.alias in form.mutates:
            results.append(given[result.alias])
        else:
            results.append([given[result.alias][:1]] if result.many else given[result.alias].view(-1))
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def runs(op: Any, schema: Any) -> str:
    """Empty if a call of the op gives the declared results, with tensors and with fakes, else what it gives."""
    wanted = types_in_schema(schema)[0]
    for mode in (nullcontext(), FakeTensorMode()):
        with mode, torch.no_grad():
            values = [sample(kind, lambda: torch.ones(2, 3)) for kind in wanted]
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


def schemas(packages: Sequence[str]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """By package the schemas that it registers, and by package the reason why there are none; ATen's without any."""
    if not packages:
        return {"aten": [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]}, {}
    counted, missing = dict[str, list[Any]](), dict[str, str]()
    for package in packages:
        try:
            ops = find_package_ops(MODULES.get(package, package.replace("-", "_")), importlib.import_module)
            counted[package] = [op._schema for op in ops.values()]
        except Exception as e:  # of a package that is not there, or was built for another torch
            missing[package] = f"{type(e).__name__}: {e}".splitlines()[0]
    return counted, missing


def pins() -> dict[str, str]:
    """The versions for which a count is recorded."""
    lines = (line.partition("#")[0].strip() for line in PINNED.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def unlike(packages: Sequence[str]) -> dict[str, str]:
    """Packages of another version than the pinned one."""
    return {
        p: v
        for p in packages
        if p in pins() and (v := installed_version(MODULES.get(p, p.replace("-", "_")))) != pins()[p]
    }


def main() -> None:
    """Count, and print a table or JSON. Exit status 1 below ``--minimum``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="packages to import, whose ops are counted")
    parser.add_argument("--pinned", action="store_true", help=f"the packages of {PINNED.name}, in those versions")
    parser.add_argument("--text", action="store_true", help="count the schemas on stdin, one a line")
    parser.add_argument("--run", action="store_true", help="call each op as well; always for packages")
    parser.add_argument("--minimum", type=float, default=0.0, metavar="PERCENT", help="fail below this share")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    packages = [*options.packages, *(pins() if options.pinned else ())]
    if options.text:
        given, missing = {"stdin": [torch._C.parse_schema(line) for line in sys.stdin]}, dict[str, str]()
    else:
        given, missing = schemas(packages)
    other, number, by_package = unlike(list(given)), count(), dict[str, Counter[str]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a reference runs in place of a kernel is known
        for package, listed in given.items():
            run = options.run or bool(packages)
            by_package[package] = Counter(verdict(s, next(number), run=run) for s in listed)
    show(by_package, missing, other, json_wanted=options.json)
    total = sum(c.total() for c in by_package.values())
    low = total and 100 * sum(map(expressible, by_package.values())) < options.minimum * total
    sys.exit(1 if low or (options.pinned and (missing or other)) else 0)


def expressible(counted: Counter[str]) -> int:
    """How many of these a declaration can say."""
    return counted["exact"] + counted["same"]


def show(
    by_package: dict[str, Counter[str]], missing: dict[str, str], other: dict[str, str], *, json_wanted: bool
) -> None:
    """The counts of each package and of all."""
    everything = sum(by_package.values(), Counter[str]())
    if json_wanted:
        rows = {p: {"total": c.total(), "expressible": expressible(c), "by": c} for p, c in by_package.items()}
        whole = {"total": everything.total(), "expressible": expressible(everything), "by": everything}
        about = {"torch": torch.__version__, "packages": rows, "missing": missing, "other_versions": other}
        print(json.dumps({**about, **whole}))
        return
    print(f"torch {torch.__version__}")
    for package, counted in {**by_package, "all": everything}.items():
        version = installed_version(MODULES.get(package, package.replace("-", "_"))) if package != "all" else ""
        print(f"{package} {version}: {expressible(counted)} of {counted.total()} schemas are expressible")
        for reason, number in counted.most_common() if package != "all" else ():
            print(f"{number:6}  {reason}")
    for package, reason in missing.items():
        print(f"{package}: not counted: {reason}")
    for package, version in other.items():
        print(f"{package}: version {version or 'none'}, pinned is {pins()[package]}")


if __name__ == "__main__":
    main()
