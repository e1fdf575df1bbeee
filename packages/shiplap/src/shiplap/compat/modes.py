"""What runs below autograd: a mode that sees every operator (``torch.utils._python_dispatch``), and its zeros."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "without_memory"]


def without_memory(t: Tensor) -> bool:
    """Whether ``t`` stands for zeros that are nowhere in memory: forward mode makes such tangents of constants.

    To compute with one below autograd ends the process (torch 2.11 to 2.13).
    """
    return bool(t._is_zerotensor())
