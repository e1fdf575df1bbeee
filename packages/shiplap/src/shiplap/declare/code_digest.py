"""What a function does, as a digest: its code as loaded, with the functions and constants of its package that it uses.

Not its source text: a comment changes nothing, a helper in another file does, and a file edited after the import cannot
lend its new digest to the old code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType, ModuleType

KNOWN = frozenset({"builtins", "math", "operator", "torch", "typing"})  # a version stands for what these hold


def source_digest(*fns: Callable[..., object]) -> str:
    """The same in every process that loaded the same code; another one when it or a helper behaves differently.

    Of several functions together, whose helpers are looked at once.
    """
    seen: set[int] = set()
    return hashlib.sha256("\n".join(line for fn in fns for line in _walk(fn, seen)).encode()).hexdigest()[:16]


def foreign(fn: object, seen: set[int] | None = None) -> str:
    """The first thing that ``fn`` uses and :func:`source_digest` does not look into. Empty if there is none.

    Functions of other packages, objects with methods, modules and custom operators can change while the digest stays.
    Only torch and a few modules of Python are left out: their versions stand for them.
    """
    seen = set() if seen is None else seen
    if id(fn) in seen:
        return ""
    seen.add(id(fn))
    if not isinstance(fn, FunctionType):
        return repr(fn)[:80]
    if "ops" in names_in(fn.__code__):
        return "torch.ops"
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for name, value in (*used(fn), *((f"default {i}", d) for i, d in enumerate(defaults))):
        inside = isinstance(value, FunctionType) and followed(value, fn)
        if what := foreign(value, seen) if inside else "" if _plain(value) or _known(value) else name:
            return what
    return ""


def _plain(value: object) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes)) or _of_torch(value)


def _known(value: object) -> bool:
    """A module, function or class of torch or of Python."""
    owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    callable_or_module = isinstance(value, (ModuleType, type)) or callable(value)
    return callable_or_module and _package(owner if isinstance(owner, str) else "") in KNOWN


def _of_torch(value: object) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device")


def _walk(fn: object, seen: set[int]) -> Iterator[str]:
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, partial):
        yield _value([fn.args, fn.keywords])
        yield from _walk(fn.func, seen)
    elif isinstance(fn, FunctionType):
        yield _value([fn.__defaults__, fn.__kwdefaults__])
        yield from _code(fn.__code__)
        for name, value in used(fn):
            yield f"{name}={_value(value)}"
            yield from _walk(value, seen) if followed(value, fn) else ()
    else:  # a Triton kernel has fn; a bound method has __func__; other callables are known by their class
        yield type(fn).__qualname__
        for inner in (getattr(fn, "fn", None), getattr(fn, "__func__", None), vars(type(fn)).get("__call__")):
            if isinstance(inner, FunctionType):
                yield from _walk(inner, seen)


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _value(constant)


def used(fn: FunctionType) -> Iterator[tuple[str, object]]:
    """Captured variables, and globals that the code names, in modules too (``helpers.scale``)."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = sorted(names_in(fn.__code__))
    for name in names:
        if name in fn.__globals__:
            value = fn.__globals__[name]
            yield name, value
            if isinstance(value, ModuleType) and _package(value.__name__) == _package(fn.__module__):
                yield from ((f"{name}.{n}", vars(value)[n]) for n in names if n in vars(value))


def names_in(code: CodeType) -> set[str]:
    """Names of globals, attributes and modules in the code of a function, and of functions within it."""
    return set(code.co_names).union(*(names_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def followed(value: object, user: FunctionType) -> bool:
    """Functions (and Triton kernels, which wrap one) of the package that uses them."""
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and callable(value) and _package(home) == _package(user.__module__)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _value(value: object) -> str:
    """A text without addresses, so that it is the same in every process."""
    if value is None or value is ... or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_value, value)))}}}"
    if isinstance(value, dict):
        return _value([[k, v] for k, v in value.items()])
    if _of_torch(value):
        return str(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def home(fn: Callable[..., object]) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def same_home(a: Callable[..., object], b: Callable[..., object]) -> bool:
    """Whether ``b`` is ``a`` again: a cell run twice, or a file that is both imported and run as ``__main__``."""
    files = [fn.__code__.co_filename if isinstance(fn, FunctionType) else None for fn in (a, b)]
    return home(a) == home(b) or (files[0] == files[1] is not None and a.__qualname__ == b.__qualname__)
