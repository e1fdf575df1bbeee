"""A mode that sees every operator below autograd (``torch.utils._python_dispatch``). Run on torch 2.11, 2.13 and 2.15."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
