"""How a broken op gets into the zoo: ``zoo::`` as an outsider writes it and adopted, ``zoo_sl::`` with ``sl.op``."""

from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.specimen import Specimen

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
SPECIMENS: list[Specimen] = []


def bad(name, op, *checks, note=""):
    """Add the broken op ``op`` under ``name`` to ``SPECIMENS``, the ops on which the audit is tested. ``checks`` are
    the names of the audit's checks that must fail on it, and ``note`` is a remark.
    """
    SPECIMENS.append(Specimen(name, op, frozenset(checks), note))


def adopt(name, **declaration):
    """Return the decorator of ``sl.adopt`` for the operator ``name``, which stands for an operator of another library.
    The decorated function becomes its reference. The options ``declaration`` are passed on. If they have no
    ``autocast``, the operator is declared to have no autocast rule.
    """
    # Most of these operators have no autocast rule, so they are declared to be left alone.
    return sl.adopt(name, **{"autocast": None, **declaration})


def declare(name, **declaration):
    """Return a decorator that declares a function as the op ``zoo_sl::<name>`` and returns the op. The function is the
    op's reference. The options ``declaration`` are passed to ``sl.op``.
    """

    def register_reference(fn):
        """Declare the op ``zoo_sl::<name>`` with the reference ``fn`` and return the op. ``name`` is an argument of the
        enclosing function.
        """
        return sl.op(f"zoo_sl::{name}", **declaration)(fn)

    return register_reference
