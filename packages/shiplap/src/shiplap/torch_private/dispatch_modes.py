"""What runs below autograd: a mode that sees every operator (``torch.utils._python_dispatch``), and its zeros."""

from contextlib import AbstractContextManager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "without_memory", "without_modes"]


def without_modes() -> AbstractContextManager[object]:
    """A block in which no mode is in force: a compiler's fake tensors are not made in it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def without_memory(t: Tensor) -> bool:
    """Whether ``t`` stands for zeros that are nowhere in memory: forward mode makes such tangents of constants.

    To compute with one below autograd ends the process (torch 2.11 to 2.13).
    """
    return bool(t._is_zerotensor())
