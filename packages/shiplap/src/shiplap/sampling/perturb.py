"""Values that look like earlier ones by their sums, shapes or single elements, and cheap new values.

All choices here use a secret generator, since torch's own generator starts alike in every process.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

MANY = 1 << 18  # elements above which an eighth of so many pairs are exchanged
_secret = random.SystemRandom()


def perturb_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with pairs of elements of each floating-point tensor exchanged.

    Shapes, sums, and half of the elements or more stay the same. A candidate that caches results by these returns a
    wrong result.
    """
    return tuple(_exchange_pairs(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _exchange_pairs(t: Tensor) -> Tensor:
    """Return a copy of ``t`` in which randomly chosen pairs of elements are exchanged, at most half of all elements.
    Return ``t`` itself if it has fewer than four elements, has elements of one byte, or is not contiguous.
    """
    if not _can_exchange(t):
        return t
    flat = t.detach().clone().reshape(-1)
    if flat.numel() > MANY:  # a permutation of all places takes longer than most kernels
        drawn = torch.randint(0, flat.numel(), (MANY // 4,), device=flat.device).unique()
        # An even number, so that each place has a partner.
        places = drawn[torch.randperm(drawn.numel() // 2 * 2, device=flat.device)]
    else:
        places = torch.randperm(flat.numel(), device=flat.device)[: 2 * max(1, flat.numel() // 4)]
    flat[places] = flat[places.flip(0)]
    return flat.reshape(t.shape)


def swap_stretches(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with two random stretches (runs of neighbouring elements) of each floating-point tensor
    exchanged.

    A stretch has at most a quarter of all elements. Shapes, sums, and often most elements stay the same. A candidate
    that caches results by these returns a wrong result. The exchange takes no longer than a copy.
    """
    return tuple(_swap_two_stretches(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def _swap_two_stretches(t: Tensor) -> Tensor:
    """Return a copy of ``t`` in which two random stretches of equal length, which do not overlap, are exchanged. Return
    ``t`` itself if it has fewer than four elements, has elements of one byte, or is not contiguous.
    """
    if not _can_exchange(t):
        return t
    flat = t.detach().clone().reshape(-1)
    most = flat.numel() // 4
    # Half of the lengths are drawn on a logarithmic scale, so that short stretches occur, too.
    length = most if _secret.random() < 0.5 else int(most ** _secret.random())
    first = _secret.randrange(flat.numel() - 2 * length + 1)
    second = _secret.randrange(first + length, flat.numel() - length + 1)
    # A copy, since the next line overwrites these elements.
    kept = flat[first : first + length].clone()
    flat[first : first + length] = flat[second : second + length]
    flat[second : second + length] = kept
    return flat.reshape(t.shape)


def _can_exchange(t: Tensor) -> bool:
    """Return whether elements of ``t`` can be exchanged. It must be contiguous and have at least four elements of at
    least two bytes each.
    """
    return t.numel() >= 4 and t.itemsize >= 2 and t.is_contiguous()
