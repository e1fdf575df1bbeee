"""How a broken op gets into the zoo: ``zoo::`` as an outsider writes it and adopted, ``zoo_sl::`` with ``sl.op``."""

from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.specimen import Specimen

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
SPECIMENS: list[Specimen] = []


def bad(name, op, *checks, note=""):
    """Add the broken op ``op`` to ``SPECIMENS``, the ops on which the audit is tested, under ``name``. ``checks`` are
    those of the audit that must fail on it, and ``note`` is a remark.
    """
    SPECIMENS.append(Specimen(name, op, frozenset(checks), note))


def adopt(name, **declaration):
    """Return the decorator ``sl.adopt`` for the operator ``name``, which stands for one of another library. The
    decorated function is the reference. If ``declaration`` has no ``autocast`` rule, the op has none.
    """
    # Most of these operators have no autocast rule, so they are declared to be left alone.
    return sl.adopt(name, **{"autocast": None, **declaration})


def declare(name, **declaration):
    """Return a decorator that declares a function as the op ``zoo_sl::name`` and returns the op. The function is the
    reference.
    """

    def register_reference(fn):
        """Declare the op ``name`` (argument of ``declare``) with the reference ``fn`` and return it."""
        return sl.op(f"zoo_sl::{name}", **declaration)(fn)

    return register_reference
