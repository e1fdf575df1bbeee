"""An op of a crossed declaration with its arguments and its reference, and the errors that a call of it may raise."""

from __future__ import annotations

import re
from typing import Any

import torch

from shiplap_testing.crossed.arguments import Arguments, flat_tensors
from shiplap_testing.crossed.declared import Declared
from shiplap_testing.crossed.observe import Function, Observed, difference, observe

TERMS = 4  # an element is a product and a sum of a few


class NotMetError(Exception):
    """The exception that is raised if a way of calling an op, such as under ``vmap``, does not apply to its
    declaration. Nothing is compared then.
    """


class Calls:
    """The calls of one op and their comparison with its reference. ``op`` is the op, ``case`` its declaration,
    ``device`` the device of its arguments, ``given`` the arguments, and ``reference`` the function to compare it with.
    ``terms`` is the number of terms of the largest sum in a result.
    """

    def __init__(self, op: Any, case: Declared, device: str = "cpu") -> None:
        """Store ``op``, draw arguments of its declaration ``case`` on ``device``, and find its reference."""
        self.op, self.case, self.device = op, case, device
        self.given = Arguments(case, device)
        self.reference: Function = _in_tuple(op.reference) if case.tuple_of_one else op.reference
        # Sums over all elements round once for each of them.
        self.terms = max(TERMS, self.given.values[self.given.names.index("x")].numel())

    @property
    def differentiable(self) -> bool:
        """Whether the gradients of the op are compared with those of the reference."""
        return self.case.differentiable

    def expected(
        self, given: Arguments | None = None, *, differentiate: bool = False, twice: bool = False
    ) -> tuple[Observed, Observed]:
        """Return the outcomes of two calls of the reference with the arguments ``given``, as a pair. If ``given`` is
        None, the arguments are ``self.given``. The first call is in the dtypes of the arguments, and the second in
        float64.

        An outcome holds the results, and the values of the arguments to which the reference writes. If
        ``differentiate`` is true, it also holds gradients. If ``twice`` is true, it also holds second gradients.
        """
        given = given or self.given
        found = []
        # The result in float64 shows how far that in the dtype itself may be off.
        for dtype in (None, torch.float64):
            # A view of an argument has strides that follow from those of the argument.
            values = given.fresh(gradients=differentiate, dtype=dtype, contiguous=self.case.state != "view")
            found.append(observe(self.reference, given, values, differentiate=differentiate, twice=twice))
        found[0].summed = self.bound_of_sum(given.values)
        return found[0], found[1]

    def bound_of_sum(self, values: list[Any]) -> float:
        """Return the size by which the tolerance of the result ``total``, a sum over all of ``x``, grows.

        It is the square root of the number of terms times the square of the largest number in the arguments ``values``,
        or of 1 if that is larger. Only float64 needs it, since the results of narrower dtypes are also compared with
        the reference in float64. Return 0 if the op has no such result or another dtype.
        """
        if "total" not in self.case.outs or self.case.dtype != "float64":
            return 0.0
        sizes = [v.double().abs() for v in flat_tensors(values)]
        largest = max((float(v[v.isfinite()].max()) for v in sizes if v.isfinite().any()), default=0.0)
        return float(self.terms**0.5 * max(1.0, largest) ** 2)

    def compare(
        self,
        fn: Function,
        given: Arguments | None = None,
        *,
        differentiate: bool | None = None,
        twice: bool = False,
        strides: bool = True,
        requires: bool = True,
    ) -> str:
        """Call ``fn`` on copies of the arguments ``given``, and return a description of how the call differs from one
        of the reference. The description is empty if nothing differs.

        If ``given`` is None, the arguments are ``self.given``. Results and the values of arguments that are written to
        are compared. Gradients are compared if ``differentiate`` is true, or if it is None and the op has a gradient.
        Second gradients are compared only if ``twice`` is true, and strides only if ``strides`` is. If ``requires`` is
        true, results must require a gradient exactly if those of the reference do.
        """
        given = given or self.given
        differentiate = self.differentiable if differentiate is None else differentiate
        own, wide = self.expected(given, differentiate=differentiate, twice=twice)
        values = given.fresh(gradients=differentiate)
        got = observe(fn, given, values, differentiate=differentiate, twice=twice)
        return difference(got, own, wide, self.terms, strides=strides, requires=requires)


def _in_tuple(fn: Function) -> Function:
    """Return a function that calls the reference ``fn`` and returns its result in a tuple of one element. The op itself
    returns such a tuple if its declaration says so.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the result of ``fn`` (argument of ``_in_tuple``) in a tuple."""
        return (fn(*args, **kwargs),)

    return called


def function_of(op: Any) -> Function:
    """Return a Python function that passes its arguments to ``op`` and returns the result, for ``torch.compile``."""

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the result of ``op`` (argument of ``function_of``) for these arguments."""
        return op(*args, **kwargs)

    return called


class Model(torch.nn.Module):
    """A module that calls an op."""

    def __init__(self, op: Any) -> None:
        """Create a module that calls the op ``op``."""
        super().__init__()
        self.op = op

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's op for the arguments of this call."""
        return self.op(*args, **kwargs)


# Errors that say that a kernel or a declaration is wrong. Those of this package are right, so they are no refusals.
WRONG = ("SL211", "SL301", "SL302", "SL303", "SL305", "SL402", "SL403", "SL405")
_ID = re.compile(r"\bSL\d{3}\b")


def refusal_id(cause: BaseException) -> str:
    """Return the id, such as ``SL208``, of the first of shiplap's documented errors among ``cause`` and the chain of
    exceptions that led to it. Return an empty string if there is none.

    An exception whose message quotes an id counts as well.
    """
    seen: BaseException | None = cause
    while seen is not None:
        if found := getattr(seen, "id", None) or next(iter(_ID.findall(str(seen))), ""):
            return str(found)
        # torch wraps errors that are raised while it compiles.
        seen = seen.__cause__ or seen.__context__
    return ""


def one_line(e: BaseException) -> str:
    """Return the first eight lines of the message of the exception ``e`` as one line, joined by bars. It is cut at 500
    characters.
    """
    return " | ".join(line.strip() for line in str(e).strip().splitlines()[:8])[:500]
