"""Changes of the numbers that a builder of samples has drawn: some zeros, or equal numbers in several tensors.

A builder draws numbers that mean something. What holds between the elements of a tensor, such as their order, therefore
holds after a change, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.case import tensors_among, tree_map
from shiplap.sampling.values import SHARED_NUMBERS, SOME_ZEROS

UNIT_ERROR = 1e-2  # by which rows of bfloat16 with a sum or a norm of 1 may miss it


def change_values(args: tuple[Any, ...], kind: str, rng: torch.Generator) -> tuple[Any, ...]:
    """Return ``args``, which a builder of samples has made, with the change of values that ``kind`` names. They are
    returned as they are if it names none.
    """
    if kind == SOME_ZEROS:
        return tree_map(partial(_with_some_zeros, rng=rng), args)
    if kind != SHARED_NUMBERS:
        return args
    drawn = [t for t in tensors_among(args) if _is_drawn(t)]
    kept = min(drawn, key=Tensor.numel, default=None)  # so that the others have numbers of it
    return tree_map(lambda t: _with_numbers_of(drawn, t, rng) if t is not kept else t, args)


def _with_some_zeros(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return a copy of the float tensor ``t`` with a random tenth of its elements, and at least one, set to zero.
    Return ``t`` itself if it is an integer, float8 or empty tensor.
    """
    if not _can_be_changed(t):
        return t
    chosen = torch.rand(t.shape, generator=rng) < 0.1
    chosen.view(-1)[int(torch.randint(t.numel(), (1,), generator=rng))] = True
    return _related_as(t, t.masked_fill(chosen.to(t.device), 0))


def _with_numbers_of(drawn: Sequence[Tensor], t: Tensor, rng: torch.Generator) -> Tensor:
    """Return a copy of ``t``, one of the tensors ``drawn``, in which at most half of the elements are numbers of the
    others. They lie between its smallest and its largest element, and all elements stay distinct and zeros where they
    are. Return ``t`` itself if it is none of these tensors, or if no number lies there.
    """
    if not any(t is one for one in drawn):
        return t
    numbers = torch.cat([one.detach().cpu().double().flatten() for one in drawn if one is not t] or [torch.empty(0)])
    numbers = numbers[(numbers > float(t.min())) & (numbers < float(t.max())) & (numbers != 0)].to(t.dtype).unique()
    numbers = numbers[~torch.isin(numbers, t.cpu())]
    places = t.flatten().nonzero()[:, 0].cpu()
    places = places[torch.randperm(len(places), generator=rng)][: min(len(numbers), t.numel() // 2)]
    changed = t.clone(memory_format=torch.contiguous_format).flatten()
    changed[places] = numbers[torch.randperm(len(numbers), generator=rng)][: len(places)].to(t.device)
    return _related_as(t, changed.reshape(t.shape))


def _is_drawn(t: Tensor) -> bool:
    """Return whether ``t`` is a float tensor of distinct numbers beside zeros, as a builder draws them. Codes, masks
    and rows of one-hot vectors have equal ones, and a symmetric matrix is more than its numbers.
    """
    if not _can_be_changed(t) or _is_symmetric(t):
        return False
    numbers = t[t != 0]
    return len(numbers) > 0 and len(numbers.unique()) == len(numbers) and bool(torch.isfinite(numbers).all())


def _is_symmetric(t: Tensor) -> bool:
    """Return whether ``t`` has matrices of several rows that are symmetric."""
    return t.dim() > 1 and t.shape[-1] == t.shape[-2] > 1 and torch.equal(t, t.mT)


def _can_be_changed(t: Tensor) -> bool:
    """Return whether ``t`` is a float tensor that has elements, of more than one byte each."""
    return t.is_floating_point() and t.itemsize > 1 and bool(t.numel())


def _related_as(own: Tensor, changed: Tensor) -> Tensor:
    """Return ``changed``, a copy of the float tensor ``own`` with some other elements, such that what holds between the
    elements of ``own`` holds again.

    Matrices that are symmetric stay so. Elements that ascend or descend along a dim are sorted. If all rows have a sum
    or a norm of 1, rows are divided by theirs, and those without one are as they were.
    """
    if _is_symmetric(own):
        either = torch.where(changed == own, changed.mT, changed)
        return torch.tril(either) + torch.tril(either, -1).mT
    for dim, size in enumerate(own.shape):
        steps = own.double().diff(dim=dim)
        up, down = bool((steps >= 0).all()), bool((steps <= 0).all())
        if size > 1 and up != down:  # both are true of equal elements
            changed = changed.sort(dim, descending=down).values
    for measure in (torch.sum, torch.linalg.vector_norm) if own.dim() and own.shape[-1] > 1 else ():
        before, after = (measure(t.double(), dim=-1, keepdim=True) for t in (own, changed))
        if bool(((before - 1).abs() < UNIT_ERROR).all()):
            return torch.where(after > UNIT_ERROR, changed / after, own).to(own.dtype)
    return changed
