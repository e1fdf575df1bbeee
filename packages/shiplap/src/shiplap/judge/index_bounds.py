"""Indices that lie outside of what they index, which are looked for on the processor before a GPU sees them.

A kernel of torch that reads at such an index on a GPU ends all later use of the device in its process, and the process
that judges runs the reference. On the processor the same call raises an error.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.case import tensors_among, tree_map
from shiplap.sandbox.device_memory import lies_on_device

OUT_OF_RANGE = re.compile(r"out of (range|bounds)", re.IGNORECASE)
ROOM_SHARE = 16  # other draws may have indices that are larger by the inverse of this


def is_index_data(t: Tensor) -> bool:
    """Return whether the integers of ``t`` may be indices or labels, that is whether they are int32 or int64."""
    return t.dtype in (torch.int32, torch.int64)


def would_end_device(call: Callable[..., Any], args: tuple[Any, ...], own: tuple[Any, ...]) -> bool:
    """Return whether a call of the reference with ``args`` could end all use of the GPU on which they lie, since it
    indexes outside of a tensor. The result is False for arguments on the processor. ``own`` is as in
    ``indexes_outside``.
    """
    return any(map(lies_on_device, tensors_among(args))) and indexes_outside(call, args, own)


def indexes_outside(call: Callable[..., Any], args: tuple[Any, ...], own: tuple[Any, ...]) -> bool:
    """Return whether ``call`` would use an index outside of a tensor for ``args`` or for other draws like them. ``own``
    are the reference's own arguments, whose shapes its indices fit.

    The call is made on copies on the processor: once with ``args``, and once with the largest index everywhere. If the
    shape of another tensor is not its own, this index is a little larger than those in ``args``, since other draws may
    have larger ones. The result is False for arguments without indices, and for a call that cannot run on the
    processor.
    """
    given = tensors_among(args)
    if not any(is_index_data(t) and t.numel() for t in given):
        return False
    pairs = zip(given, tensors_among(own), strict=False)
    same = all(a.shape == b.shape for a, b in pairs if not is_index_data(a))
    on_host = copy.deepcopy(call).cpu() if isinstance(call, torch.nn.Module) else call

    def largest(t: Tensor) -> Tensor:
        """Return a copy of ``t`` on the processor. If it holds indices, all of them are the largest one, or a little
        more than it.
        """
        if not is_index_data(t) or not t.numel():
            return t.detach().cpu()
        top = int(t.max())
        return torch.full_like(t, top if same else top + top // ROOM_SHARE + 1, device="cpu")

    return any(_is_refused(on_host, tree_map(to_host, args)) for to_host in (lambda t: t.detach().cpu(), largest))


def _is_refused(call: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether ``call`` raises an error for ``args`` that says that an index is out of range."""
    with torch.no_grad():
        try:
            call(*args)
        except Exception as e:
            return bool(OUT_OF_RANGE.search(str(e)))
    return False
