"""Functions of an author, called by the names of their parameters.

A function may list its parameters in another order than the declaration. If it were called by position, it would get
the wrong values, and no error would be raised.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from shiplap.errors import ShiplapError, error

_VARIADIC = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class NamedParameters:
    """The parameters of a function.

    ``shown`` is the signature as text, for errors. ``named`` maps each name to its parameter, without ``*args`` and
    ``**kwargs``. ``open`` states whether the function takes any keyword (``**kwargs``).
    """

    shown: str
    named: Mapping[str, inspect.Parameter]
    open: bool

    @property
    def optional(self) -> frozenset[str]:
        """The names of the parameters that have a default."""
        return frozenset(name for name, p in self.named.items() if p.default is not p.empty)

    def split(self, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return ``names`` as ``(positional, keyword)``. ``positional`` holds the names that a call can pass by
        position, in the order of the function's parameters. ``keyword`` holds all other names.
        """
        wanted = dict.fromkeys(names)
        positional: list[str] = []
        for name, p in self.named.items():
            # Behind a parameter that is left out, no other can be passed by position.
            if p.kind is p.KEYWORD_ONLY or name not in wanted:
                break
            positional.append(name)
        return tuple(positional), tuple(name for name in wanted if name not in positional)


def callable_name(source: object) -> str:
    """Return the name of a function or a class, or of the class of another object."""
    if isinstance(source, functools.partial):  # counts as a routine in Python 3.14, and has no name
        return type(source).__name__
    named = source if inspect.isroutine(source) or isinstance(source, type) else type(source)
    return str(named.__name__)


def read_parameters(function: Callable[..., object], refuse: Callable[[str, str], ShiplapError]) -> NamedParameters:
    """Return the parameters of ``function`` by name, with its signature as text. Raise the error that ``refuse(got,
    fix)`` returns if the function has ``*args``, or if its signature cannot be read.
    """
    name = callable_name(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        fix = f"write a function with named parameters that calls {name}" if callable(function) else "pass a function"
        raise refuse(f"{name}, whose parameters cannot be read", fix) from None
    parameters = signature.parameters.values()
    bare = [p.replace(annotation=p.empty) for p in parameters]
    shown = f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
    if rest := next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None):
        fix = f"name each parameter in place of *{rest.name}"
        homes = type(function).__module__, (function.__module__ or "") if inspect.isfunction(function) else ""
        if any(home.startswith("triton.") for home in homes):  # a kernel of Triton, or kernel[grid]
            fix = (
                'bind a kernel of Triton by sl.triton(kernel, grid="cdiv(n, BLOCK)", arguments={"rows": "n"}, '
                'constants={"BLOCK": 128}), where rows is a parameter of the kernel that is no argument of the op'
            )
        raise refuse(f"{shown}: *{rest.name} has no names", fix)
    named = {p.name: p for p in parameters if p.kind not in _VARIADIC}
    return NamedParameters(shown, named, len(named) < len(signature.parameters))


def bind_names(
    function: Callable[..., Any], names: Sequence[str], *, id: str, where: str, required: Iterable[str] = ()
) -> Callable[..., Any]:
    """Return ``function`` as a function that takes values for ``names`` by position in this order. ``function`` itself
    receives each value at the parameter of that name.

    If ``function`` takes all names in this order, return ``function`` itself. Raise the catalogue error ``id`` for a
    parameter of another name, and if one of ``required`` is missing.
    """

    def refuse(got: str, fix: str = "") -> ShiplapError:
        """Return the error with the catalogue number ``id`` for a function whose parameters do not have the expected
        names. ``got`` describes them, and ``fix`` is the remedy, if there is one.
        """
        return error(id, where=where, got=got, expected=f"parameters among {', '.join(names)}", fix=fix)

    takes = read_parameters(function, refuse)
    for name in takes.named:
        if name not in names and name not in takes.optional:
            raise refuse(f"{takes.shown}: nothing is called {name!r}", f"rename {name!r}, or give it a default")
    for name in required:
        if name not in takes.named and not takes.open:
            raise refuse(f"{takes.shown}: no parameter {name!r}", f"add the parameter {name!r}")
    taken = [name for name in names if name in takes.named or takes.open]
    positional, keywords = takes.split(taken)
    # The function itself is returned where it fits, so that a call takes no further frame.
    if positional == tuple(names):
        return function
    places, named = [names.index(n) for n in positional], [(n, names.index(n)) for n in keywords]

    @wraps(function)  # digests and audits read the code of the author
    def called(*values: Any) -> Any:
        """Return the result of the author's function, called with the ``values`` whose names it takes."""
        return function(*[values[i] for i in places], **{n: values[i] for n, i in named})

    return called
