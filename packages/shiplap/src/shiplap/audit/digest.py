"""The digest of a function: its own code and all code and data that it reaches inside the author's package.

``op.identity`` decides what a compiled artefact may be reused for and is kept quick. This one decides whether evidence
still holds. It follows helpers in sibling modules, bound methods and the attributes of their instances, containers,
partial functions, and the values of tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.code_digest import names_in
from shiplap.dispatch import Op

FOREIGN = (
    "torch",
    "numpy",
    "builtins",
    "triton",
    "jaxtyping",
    "typing",
    "functools",
    "collections",
    "shiplap.declare",
    "shiplap.plan",
    "shiplap.dispatch",
)
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
DEEPEST = 24


def deep_digest(value: Any) -> str:
    """The digest of ``value``, equal in every process that loaded the same code and data."""
    digest = hashlib.sha256()
    for part in _walk(value, {}, DEEPEST):
        digest.update(part.encode() + b"\n")
    return digest.hexdigest()[:16]


def _walk(value: Any, seen: dict[int, int], depth: int) -> Iterator[str]:
    if isinstance(value, PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in seen or depth < 0:
        yield f"again {seen.get(id(value), -1)}"
        return
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)} {_bytes(value)}"
    elif isinstance(value, (torch.dtype, torch.device)):
        yield str(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield f"key {key!r}" if isinstance(key, PLAIN) else "key"
            yield from _walk(value[key], seen, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield type(value).__name__
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            yield from _walk(item, seen, depth - 1)
    elif isinstance(value, CodeType):
        yield from _code(value, seen, depth)
    elif isinstance(value, FunctionType):
        yield from _function(value, seen, depth)
    elif isinstance(value, MethodType):
        yield from _walk(value.__func__, seen, depth - 1)
        yield from _walk(value.__self__, seen, depth - 1)
    elif isinstance(value, partial):
        yield from _walk([value.func, value.args, value.keywords], seen, depth - 1)
    elif isinstance(value, ModuleType):
        yield f"module {value.__name__}"
    elif isinstance(value, Op):  # what is attached to it changes while it is called
        yield f"op {value.spec!r}"
        yield from _walk(value.reference, seen, depth - 1)
    else:
        yield from _instance(value, seen, depth)


def _bytes(t: Tensor) -> str:
    if t.device.type != "cpu" or t.numel() > 1 << 24:
        return "not read"
    return hashlib.sha256(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _code(code: CodeType, seen: dict[int, int], depth: int) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        yield from _walk(constant, seen, depth - 1)


def _function(fn: FunctionType, seen: dict[int, int], depth: int) -> Iterator[str]:
    yield f"function {fn.__qualname__}"
    if not _own(fn):
        return
    yield from _code(fn.__code__, seen, depth)
    yield from _walk([fn.__defaults__, fn.__kwdefaults__], seen, depth - 1)
    for cell in fn.__closure__ or ():
        try:
            yield from _walk(cell.cell_contents, seen, depth - 1)
        except ValueError:  # not assigned yet
            continue
    names = names_in(fn.__code__)
    for name in sorted(names):
        if name not in fn.__globals__:
            continue
        used = fn.__globals__[name]
        yield f"global {name}"
        yield from _walk(used, seen, depth - 1)
        if isinstance(used, ModuleType) and not used.__name__.startswith(FOREIGN) and _sibling(used, fn):
            for inner in sorted(names & vars(used).keys()):
                yield f"{name}.{inner}"
                yield from _walk(vars(used)[inner], seen, depth - 1)


def _instance(value: Any, seen: dict[int, int], depth: int) -> Iterator[str]:
    """An object of the author's: its class's functions and its own attributes; of others the name of the class."""
    kind = value if isinstance(value, type) else type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if not _own(value):
        return
    if isinstance(inner := getattr(value, "fn", None), FunctionType):  # a Triton kernel wraps its function
        yield from _walk(inner, seen, depth - 1)
    for base in kind.__mro__:
        if _own(base) and base is not object:
            for name, member in sorted(vars(base).items()):
                if isinstance(member, FunctionType) or (
                    isinstance(member, (*PLAIN, list, tuple, dict)) and not name.startswith("__")
                ):
                    yield from _walk(member, seen, depth - 1)
    if not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from _walk(dict(vars(value)), seen, depth - 1)


def _own(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return not str(module).startswith(FOREIGN)


def _sibling(module: ModuleType, fn: FunctionType) -> bool:
    """Of the same package, or a file in the same folder."""
    if module.__name__.partition(".")[0] == (fn.__module__ or "").partition(".")[0]:
        return True
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent == Path(fn.__code__.co_filename).parent


def packages(op: Op) -> dict[str, str]:
    """Distribution → version, for the packages that the op's functions name."""
    functions = [op.reference, op.sampler, op.gradient.function if op.gradient else None]
    functions += [k.function for ks in op.kernels.values() for k in ks]
    modules: set[str] = set()
    for fn in (f for f in functions if isinstance(f, FunctionType)):
        used = [fn, *(fn.__globals__.get(name) for name in names_in(fn.__code__))]
        for value in used:
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            modules.add(str(name or "").partition(".")[0])
    owners = packages_distributions()
    versions = {}
    for distribution in sorted({d for m in modules for d in owners.get(m, ())}):
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions


def libraries() -> dict[str, str]:
    """Libraries that registered operators in this process, by name. An adopted op may come from any of them."""
    paths = sorted(Path(p) for p in torch.ops.loaded_libraries)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths if p.is_file()}
