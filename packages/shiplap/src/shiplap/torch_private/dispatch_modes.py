"""Code below autograd: the mode that sees every operator (``torch.utils._python_dispatch``), and tensors without
memory.
"""

from contextlib import AbstractContextManager

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "without_memory", "without_modes"]


def without_modes() -> AbstractContextManager[object]:
    """Return a context without dispatch modes, in which a compiler's fake tensors are not made."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def without_memory(t: Tensor) -> bool:
    """Return whether ``t`` stands for zeros that have no memory. Forward mode makes such tangents of constants.

    Computing with such a tensor below autograd ends the process (torch 2.11 to 2.13).
    """
    return bool(t._is_zerotensor())
