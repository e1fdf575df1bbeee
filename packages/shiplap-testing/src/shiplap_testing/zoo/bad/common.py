"""How a broken op gets into the zoo: ``zoo::`` as an outsider writes it and adopted, ``zoo_sl::`` with ``sl.op``."""

from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.specimen import Specimen

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
SPECIMENS: list[Specimen] = []


def bad(name, op, *checks, note=""):
    SPECIMENS.append(Specimen(name, op, frozenset(checks), note))


def adopt(name, **declaration):
    return sl.adopt(name, **{"autocast": None, **declaration})


def declare(name, **declaration):
    """Return a decorator that declares a function as ``zoo_sl::name`` and returns the op."""

    def register_reference(fn):
        return sl.op(f"zoo_sl::{name}", **declaration)(fn)

    return register_reference
