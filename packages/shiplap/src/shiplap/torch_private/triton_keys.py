"""The cache keys of Triton's own launches, for kernels that are compiled without a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

_UNREAD = "triton", "math", "copy"  # modules that Triton's keys do not look into


def settle_cache_key(kernel: Any) -> None:
    """Give ``kernel`` the one key that it has in every process, whatever was launched before it.

    Triton's key of a function holds the globals of the functions that it calls, but only of those whose own key was
    computed before (3.6 and 3.7). Two kernels that share a function therefore have other keys in a process that
    launches the second one first, and all are compiled again. Here the keys of called functions are computed first,
    innermost first.
    """
    _settle_called_keys(kernel, set())


def _settle_called_keys(kernel: Any, begun: set[int]) -> None:
    function, known = getattr(kernel, "fn", None), getattr(kernel, "hash", "")
    settled = isinstance(known, str) and not known.startswith("recursion:")  # which is: another thread is at it
    if settled or id(kernel) in begun or not isinstance(function, FunctionType):
        return
    # Functions may call each other in a circle.
    begun.add(id(kernel))
    for called in _called_kernels(function):
        _settle_called_keys(called, begun)
        try:
            _ = called.cache_key
        except Exception:  # Triton raises the error if the kernel really calls it
            with suppress(AttributeError):
                called.hash = None


def _called_kernels(function: FunctionType) -> Iterator[Any]:
    """Yield every Triton function that ``function`` has a name for, in its own scope or in modules that it names."""
    names, cells = function.__code__.co_names, function.__closure__ or ()
    named, entered = [function.__globals__.get(name) for name in names], set[str]()
    for cell in cells:
        with suppress(ValueError):  # it is empty
            named.append(cell.cell_contents)
    for value in named:  # which grows
        if isinstance(value, ModuleType):
            if value.__name__ not in entered and value.__name__.partition(".")[0] not in _UNREAD:
                entered.add(value.__name__)  # modules may name each other
                named += [vars(value).get(name) for name in names]
        elif isinstance(getattr(value, "fn", None), FunctionType) and hasattr(type(value), "cache_key"):
            yield value


def triton_attributes(
    kernel: Any,
    backend: Any,
    signature: Mapping[str, str],
    constants: Mapping[Any, object],
    attributes: Mapping[Any, Any],
) -> dict[Any, Any]:
    """Return ``attributes`` in the form in which Triton's own launches pass them to its compiler, which has them in its
    key.

    Triton 3.7 lists constants among them, without any attribute; Triton 3.6 lists arguments alone. The rest of the key,
    which is the kernel's own, is settled.
    """
    settle_cache_key(kernel)
    special = [
        (kind, constants[(at,)] if kind == "constexpr" else _specialisation_mark(attributes.get((at,))))
        for at, kind in enumerate(signature.values())
    ]
    values = {name: constants.get((at,)) for at, name in enumerate(signature)}
    try:
        *_, packed = kernel._pack_args(backend, {}, values, special, {})
    except AttributeError:
        return dict(attributes)
    return dict(packed)


def _specialisation_mark(attribute: object) -> str | None:
    """Return the mark of Triton's binder for an argument: "D" for a multiple of 16, None where it does not check."""
    return None if attribute is None else "D" if attribute else ""
