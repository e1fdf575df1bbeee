"""What a call did - results, gradients, arguments that it wrote to, aliases - and how two such observations differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.compare import Reduction, compare_within_tolerance
from shiplap_testing.crossed.arguments import Arguments, flat_tensors

Function = Callable[..., Any]


@dataclass
class Observed:
    """The outcome of one call of a function.

    ``outs`` are its results. ``grads`` are the gradients, with None for a tensor without one. ``written`` are the
    values, after the call, of the arguments to which the function writes. ``aliases`` has for each result the index of
    the tensor argument that shares its memory, or -1. ``requires`` has for each result whether it requires a gradient.
    ``form`` describes the tuples and lists around the results, and is empty if they were not recorded. ``summed`` is
    the size of the terms of a sum over all of ``x`` in float64, or 0 without such a sum.
    """

    outs: list[Any] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)
    requires: list[bool] = field(default_factory=list)
    form: str = ""
    summed: float = 0.0


def flat(result: Any) -> list[Any]:
    """Return ``result``, the return value of a call, as a list of single results in order.

    Elements of nested lists and tuples are results of their own. Tensors, numbers and None are results.
    """
    if isinstance(result, (list, tuple)):
        return [v for part in result for v in flat(part)]
    return [result]


def form_of(result: Any) -> str:
    """Return the nesting of ``result`` as a string. It is ``(.,[..],)`` for a tuple of a tensor and a list of two
    tensors.
    """
    if isinstance(result, tuple):
        return f"({','.join(map(form_of, result))},)"
    return f"[{''.join(map(form_of, result))}]" if isinstance(result, list) else "."


def directions(outs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return a list with a random incoming gradient for each of ``outs``, in its shape, dtype and device. Calls with
    equal ``seed`` and shapes return equal numbers.
    """
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=rng, dtype=torch.float64).to(o.dtype).to(o.device) for o in outs]


def observe(
    fn: Function, given: Arguments, values: list[Any], *, differentiate: bool = False, twice: bool = False
) -> Observed:
    """Call ``fn`` with the tensors in ``values`` themselves, not copies. Return its results, the values of arguments
    that it writes to, and which results share memory with arguments.

    ``given`` says which of ``values`` are passed by keyword. If ``differentiate`` is true, the outcome includes
    gradients. If ``twice`` is true as well, it also includes the gradients of the sum of squares of these gradients.
    """
    positional, named = given.split(values)
    result = fn(*positional, **named)
    outs = flat(result)
    tensors = flat_tensors(values)
    seen = Observed(
        outs=[o.detach().clone() if isinstance(o, Tensor) else o for o in outs],
        aliases=[_alias(o, tensors) for o in outs],
        requires=[isinstance(o, Tensor) and o.requires_grad for o in outs],
        form=form_of(result),
    )
    names = [n for n, v in zip(given.names, values, strict=True) for _ in flat_tensors(v)]
    # The names of the arguments that the op writes to begin with ``acc``.
    seen.written = [t.detach().clone() for n, t in zip(names, tensors, strict=True) if n.startswith("acc")]
    if differentiate:
        seen.grads = _gradients(outs, values, given.case.seed, twice)
    return seen


def _alias(value: Any, tensors: Sequence[Tensor]) -> int:
    """Return the index of the first of ``tensors``, the arguments of a call, that shares memory with the result
    ``value``. Return -1 if there is none.
    """
    if not isinstance(value, Tensor) or not value.numel():
        return -1
    # Views share the storage of their argument, at any offset.
    at = value.untyped_storage().data_ptr()
    return next((i for i, t in enumerate(tensors) if t.numel() and t.untyped_storage().data_ptr() == at), -1)


def _gradients(outs: Sequence[Any], values: Any, seed: int, twice: bool) -> list[Tensor | None]:
    """Return a list with the gradient of the results ``outs`` for each tensor in ``values`` that requires one. An
    element is None if there is no gradient.

    The incoming gradients are drawn from ``seed``. If ``twice`` is true, the gradients of the sum of squares of these
    gradients follow in the list.
    """
    leaves = list({id(t): t for t in flat_tensors(values) if t.requires_grad}.values())
    found = [o for o in outs if isinstance(o, Tensor) and o.requires_grad]
    if not leaves or not found:
        return [None] * len(leaves)
    grads = torch.autograd.grad(found, leaves, directions(found, seed), allow_unused=True, create_graph=twice)
    if not twice:
        return list(grads)
    again = [g for g in grads if g is not None and g.requires_grad]
    if not again:
        return [None if g is None else g.detach() for g in grads] + [None] * len(leaves)
    more = torch.autograd.grad([g.square().sum() for g in again], leaves, allow_unused=True)
    # Where nothing depends on a leaf, autograd says None for one and zero for the other: both are no gradient.
    return [None if g is None else g.detach() for g in grads] + [None if g is None else g for g in more]


def difference(
    got: Observed, own: Observed, wide: Observed, terms: int, *, strides: bool = True, requires: bool = True
) -> str:
    """Return a description of how ``got``, the outcome of a call, differs from that of the reference. It is empty if
    nothing differs.

    ``own`` is the outcome of the reference in the dtype of ``got``, and ``wide`` that in float64. ``terms`` is the
    number of terms of a sum, which widens the tolerance. Strides are compared only if ``strides`` is true. If
    ``requires`` is true, results must require a gradient exactly if those of the reference do.
    """
    if got.form and own.form and got.form != own.form:
        return f"results in the form {got.form}, expected {own.form}"
    if len(got.outs) != len(own.outs):
        return f"{len(got.outs)} results, expected {len(own.outs)}"
    for index, (g, o) in enumerate(zip(got.outs, own.outs, strict=True)):
        if problem := _unlike(g, o, strides and index < len(own.aliases) and own.aliases[index] < 0):
            return f"result {index}: {problem}"
    for what in ("outs", "written"):
        size = own.summed if what == "outs" else 0.0
        if problem := _values(getattr(got, what), getattr(own, what), getattr(wide, what), terms, size):
            return f"{'argument written to' if what == 'written' else 'result'}: {problem}"
    if got.aliases != own.aliases:
        return f"results are arguments {got.aliases}, expected {own.aliases}"
    if requires and got.requires != own.requires:
        return f"results require gradients {got.requires}, expected {own.requires}"
    return _gradient_difference(got.grads, own.grads, wide.grads, terms)


def _unlike(got: Any, own: Any, strides: bool) -> str:
    """Return a description of how the result ``got`` differs from the result ``own`` of the reference in type, shape,
    dtype or device. It is empty if nothing differs.

    Strides are compared only if ``strides`` is true. Results other than tensors are compared by value.
    """
    if not isinstance(own, Tensor) or not isinstance(got, Tensor):
        return "" if type(got) is type(own) and got == own else f"{got!r}, expected {own!r}"
    if got.shape != own.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(own.shape)}"
    if got.dtype != own.dtype or got.device != own.device:
        return f"{got.dtype} on {got.device}, expected {own.dtype} on {own.device}"
    if strides and long_strides(got) != long_strides(own):
        return f"strides {got.stride()}, expected {own.stride()}"
    return ""


def long_strides(t: Tensor) -> list[int]:
    """Return the strides of the dims of ``t`` that are longer than 1, since those of other dims have no meaning. The
    list is empty for a tensor without elements.
    """
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if 0 not in t.shape else []


def _values(got: Sequence[Any], own: Sequence[Any], wide: Sequence[Any], terms: int, size: float = 0.0) -> str:
    """Return a description of how the numbers of the tensors ``got`` differ from those of the reference. It is empty if
    they agree within the tolerance.

    ``own`` is the reference in the dtype of ``got``, and ``wide`` the reference in float64. The tolerance grows with
    ``terms``, the number of terms of a sum, and with ``size``, the size of these terms.
    """
    # Numbers and None were compared before, by ``_unlike``.
    triples = [t for t in zip(got, own, wide, strict=True) if isinstance(t[1], Tensor)]
    mine, theirs, exact = ([t[i].cpu() for t in triples] for i in range(3))
    allowed = [
        torch.full_like(w, size * torch.finfo(o.dtype).eps * 4 if o.is_floating_point() else 0, dtype=torch.float64)
        for o, w in zip(theirs, exact, strict=True)
    ]
    return compare_within_tolerance(mine, theirs, exact, Reduction(terms), allowed=allowed if size else None).problem


def _gradient_difference(
    got: Sequence[Tensor | None], own: Sequence[Tensor | None], wide: Sequence[Tensor | None], terms: int
) -> str:
    """Return a description of how the gradients ``got`` differ from those of the reference in number or values. It is
    empty if they agree. A missing gradient counts as zero.

    ``own`` has the gradients of the reference in the dtype of ``got``, and ``wide`` those in float64. ``terms`` is the
    number of terms of a sum, which widens the tolerance.
    """
    if len(got) != len(own):
        return f"{len(got)} gradients, expected {len(own)}"
    # A gradient that is a sum over what was broadcast may be far smaller than its terms, which are like the other ones.
    # An infinite size would allow everything.
    finite = [w.abs()[w.isfinite()] for w in wide if w is not None]
    size = max((float(w.max()) for w in finite if w.numel()), default=0.0)
    most = max((w.numel() for w in wide if w is not None), default=0)
    for index, (g, o, w) in enumerate(zip(got, own, wide, strict=True)):
        if g is None and o is None:
            continue
        shown = g if g is not None else torch.zeros_like(o)
        expected = o if o is not None else torch.zeros_like(g)
        exact = w if w is not None else torch.zeros_like(expected, dtype=torch.float64)
        if problem := _values([shown], [expected], [exact], terms, size if exact.numel() < most else 0.0):
            return f"gradient {index}: {problem}"
    return ""
