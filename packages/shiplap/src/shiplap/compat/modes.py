"""A mode that sees every operator below autograd (``torch.utils._python_dispatch``)."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
