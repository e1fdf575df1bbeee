"""What a call has written to, told to autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd.graph import increment_version


def writing(call: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """``call``, then tell autograd what it wrote to, the arguments at ``places``: no backward may use what it saved of
    them. Torch's own operators that write do so; kernels behind a C function, and torch's dispatcher, do not."""

    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        for i in places:
            if i < len(args) and args[i] is not None:
                increment_version(args[i])
        return result

    return called
