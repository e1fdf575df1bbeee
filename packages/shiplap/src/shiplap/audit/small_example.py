"""A small example of a fault, with round numbers and whole results, for the reader of a finding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.kernels.triton.interpreter_budget import LaunchTooLong
from shiplap.sampling.case import SampleCase, arguments_by_name, is_float8, plain_copies, tensors_among, tree_map
from shiplap.sampling.layouts import clone_exactly
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import (
    call_op,
    floating_args,
    gradients_or_zeros,
    reference_effects,
    run_op,
    surrogate_results,
)
from shiplap.sampling.samples import Samples

MOST_SHOWN = 16  # elements of a tensor that is shown
FEW_SIZES = (2, 3, 4)  # sizes to which larger dims are reduced
EXAMPLE_S = 2.0  # seconds of processor time for the search
VALUE_CHECKS, GRADIENT_CHECK = ("numerics", "edges", "special", "sizes"), "gradient"


def describe_example(op: Op, check: str, case: SampleCase, fails: Callable[[SampleCase], bool]) -> str:
    """Return a text with small arguments on which the check named ``check`` fails, the result of the op, and the
    expected one. Return an empty string for checks that compare neither results nor gradients, and if no example is
    found.

    ``case`` is a failing sample. ``fails(tried)`` says whether the sample ``tried`` fails as well.
    """
    if check not in (*VALUE_CHECKS, GRADIENT_CHECK) or op.spec.random:
        return ""
    show = _show_gradients if check == GRADIENT_CHECK else _show_results
    end = time.process_time() + EXAMPLE_S
    for tried in _smaller_cases(op, case):
        if time.process_time() > end:
            return ""
        try:
            few = all(t.numel() <= MOST_SHOWN for t in tensors_among(tried.args))
            text = show(op, tried) if few and fails(tried) else ""
        except (Exception, LaunchTooLong):  # round numbers may be no valid arguments
            continue
        if text:
            return text
    return ""


def _smaller_cases(op: Op, case: SampleCase) -> Iterator[SampleCase]:
    """Yield samples like ``case`` whose larger dims have two to four elements, then ``case`` itself. Each comes with
    round numbers first, unless a builder decides on the values, and then with its own numbers.
    """
    samples = Samples(op, case.seed, case.device)
    for most in FEW_SIZES:
        small = samples.make(_with_few(case.recipe, most))
        if small is not None:
            yield from _with_round_numbers(op, small)
    yield from _with_round_numbers(op, case)


def _with_few(recipe: SampleRecipe, most: int) -> SampleRecipe:
    """Return ``recipe`` with each size of more than ``most`` elements reduced to ``most``."""
    return recipe.but(sizes={n: min(v, most) if type(v) is int else v for n, v in recipe.sizes})


def _with_round_numbers(op: Op, case: SampleCase) -> Iterator[SampleCase]:
    """Yield ``case`` with its floating-point numbers rounded to integers from -4 to 4, unless a builder of samples
    decides on them. Then yield ``case`` itself.
    """
    if op.sampler is None and case.recipe.values == "normal":
        yield case.with_args(tree_map(_round, case.args))
    yield case


def _round(t: Tensor) -> Tensor:
    """Return a copy of ``t``, with the same strides, whose numbers are integers from -4 to 4. A tensor that is not of
    floating-point numbers is only copied.
    """
    copy = clone_exactly(t)
    # Elements of an expanded tensor share memory, so its whole storage is rounded.
    if t.is_floating_point() and not is_float8(t):
        whole = copy.as_strided((copy.untyped_storage().nbytes() // copy.itemsize,), (1,), 0)
        whole.mul_(2).round_().clamp_(-4, 4)
    return copy


def _show_results(op: Op, case: SampleCase) -> str:
    """Return a text with the arguments of ``case``, the first result of the op that is wrong, and the expected one.
    Return an empty string if all results look right.
    """
    own = reference_effects(op, case.args)
    return _show_difference(f"for {_show_arguments(op, case)}: ", ["result"] * len(own), run_op(op, case), own)


def _show_gradients(op: Op, case: SampleCase) -> str:
    """Return a text with the arguments of ``case``, the gradients of its results, the first gradient of an argument
    that is wrong, and the expected one. Return an empty string if all gradients look right.
    """
    names = floating_args(op, case)
    shown: list[str] = []

    def derived(forward: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
        """Return the gradients of the arguments ``names`` if those of the results are 1, 2, 3 and so on."""
        given = arguments_by_name(op, args)
        wanted = [given[n].requires_grad_() for n in names]
        outs = [o for o in forward(args) if o.requires_grad]
        directions = [(torch.arange(o.numel(), device=o.device) + 1.0).view(o.shape).to(o.dtype) for o in outs]
        shown[:] = map(_show_tensor, directions)
        return gradients_or_zeros(outs, wanted, directions)

    want = derived(partial(surrogate_results, op), plain_copies(case.args))
    got = derived(partial(call_op, op), case.fresh())
    start = f"for {_show_arguments(op, case)} and the gradient {', '.join(shown)} of the result: "
    return _show_difference(start, [f"d/d{n}" for n in names], got, want)


def _show_difference(start: str, names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """Return the text ``start``, followed by the first tensor of ``got`` that differs from that of ``want``, with its
    name, and the expected tensor. Return an empty string if none differs visibly or if a tensor is large.
    """
    for name, g, w in zip(names, got, want, strict=True):
        mine, expected = _show_tensor(g), _show_tensor(w)
        if mine != expected:
            return f"{start}{name} {mine}, expected {expected}" if max(g.numel(), w.numel()) <= MOST_SHOWN else ""
    return ""


def _show_arguments(op: Op, case: SampleCase) -> str:
    """Return the arguments of a sample with all their values as a text."""
    pairs = [(n, v) for n, v in arguments_by_name(op, case.args).items() if v is not None]
    return ", ".join(f"{n}={_show_tensor(v)}" if isinstance(v, Tensor) else f"{n}={v!r}" for n, v in pairs)


def _show_tensor(t: Tensor) -> str:
    """Return the values of a tensor as nested lists in a text, with four digits."""
    wide = t.detach().float().cpu() if t.is_floating_point() else t.detach().cpu()
    return _show_values(wide.tolist())


def _show_values(value: Any) -> str:
    """Return a number, or a nested list of numbers, as a text. Numbers have four digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_show_values, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)
