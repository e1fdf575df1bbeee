"""The instances of classes that the options of verbs name, such as the network of ``--model ground.py:model``."""

from __future__ import annotations

from types import ModuleType
from typing import TypeVar

from shiplap import ShiplapError
from shiplap.plugin_api import error, verbs
from shiplap_sparse3d.errors import failure_text

__all__ = ["named_instance"]

Kind = TypeVar("Kind")


def named_instance(module: ModuleType, name: str, kind: type[Kind], id: str, where: str) -> Kind:
    """Return the instance of ``kind`` that is called ``name`` in ``module``. If a function has this name, return the
    instance that it returns. Raise the error ``id``, with ``where`` as its place, for anything else and if the function
    raises an exception. An error of shiplap passes unchanged.
    """
    made = getattr(module, name, None)
    got = f"no {name!r}" if made is None else f"a {type(made).__name__}"
    if callable(made) and not isinstance(made, kind):
        try:
            made = made()
            got = f"a {type(made).__name__}"
        except ShiplapError:
            raise
        except Exception as failure:  # the user's function, as for missing weights
            got = failure_text(failure)
    if isinstance(made, kind):
        return made
    names = [n for n, value in vars(module).items() if isinstance(value, kind)]
    a_kind = f"a {kind.__name__}"
    near = verbs.near_miss(name, names, a_kind) if made is None else f"{a_kind}, or a function that returns one"
    raise error(id, where=where, got=got, expected=near)
