"""Report to autograd which arguments a call has written to, and read torch's counts of writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_COUNTS: Any = torch._C.DispatchKey.ADInplaceOrView  # under which torch counts writes
_is_off: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_switch_off: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded


def with_write_counts(call: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return ``call``, followed by a report to autograd that the arguments at ``places`` were written to.

    No backward may use values of them that it saved. Torch's own operators that write report this themselves; kernels
    behind a C function, and torch's dispatcher, do not.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        for i in places:
            if i < len(args) and args[i] is not None:
                increment_version(args[i])
        return result

    return called


def version_of(tensor: Tensor) -> int:
    """Return the number of writes to ``tensor`` that torch has counted. A tensor made in inference mode has no count:
    0.
    """
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def counting_writes() -> Iterator[None]:
    """Make torch count writes within the block, as in eager code. Below a compiled graph torch does not count them."""
    if not _is_off(_COUNTS):
        yield
        return
    _switch_off(_COUNTS, False)
    try:
        yield
    finally:
        _switch_off(_COUNTS, True)
