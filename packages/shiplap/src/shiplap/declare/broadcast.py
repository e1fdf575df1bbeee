"""The sizes that broadcast, ``#n`` in a declaration.

The module finds the size to which they broadcast, and which of them have names.
"""

from __future__ import annotations

from collections.abc import Iterable

from shiplap.declare.spec import Arg, OpSpec
from shiplap.errors import error


def broadcast_dims(args: Iterable[Arg], dims: Iterable[str] = ()) -> dict[str, str]:
    """Return a dict from each size ``n`` of dims annotated ``#n`` (1 or ``n``) to an expression for it. For arguments
    ``x`` and ``y`` with ``#n``, it is ``{"n": "broadcast(x_n, y_n)"}``.

    Optional arguments are not counted. A size ``n`` is left out if an argument has the dim ``n`` or is called ``n``, or
    if ``n`` is among the names ``dims``.
    """
    sure = [a for a in args if not a.optional]
    given = {d.text for a in sure if a.tensor for d in a.tensor.dims} | {a.name for a in sure} | {*dims}
    owns: dict[str, list[str]] = {}
    for own, of in ((own, of) for a in sure for own, of in a.broadcasts.items() if of not in given):
        owns.setdefault(of, []).append(own)
    return {of: f"broadcast({', '.join(names)})" for of, names in owns.items()}


def check_broadcasts(spec: OpSpec, known: set[str]) -> None:
    """Raise ``SL105`` unless the size ``n`` of each dim annotated ``#n`` (1 or ``n``) is in ``known``, the names that
    have a value in every call.

    Such a dim of an argument ``x`` is called ``x_n``. Raise ``SL105`` also if another dim, an argument or a computed
    size has that name. Raise ``SL104`` for ``#n`` in an output.
    """
    names = [d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if not d.of]
    taken = {*names, *(a.name for a in spec.args), *(k for k, _ in spec.dims)}
    for arg in spec.tensors:
        for own, of in arg.broadcasts.items():
            where = f"{spec.name}, argument {arg.name!r}"
            if of not in known:
                fix = f"let an argument that is always there have {of}, or #{of}"
                raise error("SL105", where=where, got=f"#{of}", expected=f"a size among {sorted(known)}", fix=fix)
            if own in taken:
                fix = f"rename that, or {of}"
                raise error(
                    "SL105",
                    where=where,
                    got=f"#{of}, whose size is {own!r} as another is",
                    expected="one meaning a name",
                    fix=fix,
                )
    # A result has one size, to which all of its sources were broadcast.
    kinds = [*((o.name, o.tensor) for o in spec.outputs), *((r.name, r.tensor) for r in spec.made)]
    for name, kind in kinds:
        if repeated := next((d for d in kind.dims if d.of), None) if kind else None:
            where = f"{spec.name}, output {name!r}"
            fix = f"write {repeated.of}, the size that all together have"
            raise error("SL104", where=where, got=str(repeated), expected="a size", fix=fix)
