"""A mode that sees every operator below autograd (``torch.utils._python_dispatch``; torch 2.11 to 2.15)."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
