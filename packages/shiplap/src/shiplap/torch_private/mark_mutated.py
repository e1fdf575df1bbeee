"""Report to autograd which arguments a call has written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd.graph import increment_version


def writing(call: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
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
