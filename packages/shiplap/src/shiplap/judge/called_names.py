"""The names of the functions of torch that a reference calls."""

from __future__ import annotations

from typing import Any

import torch

PRODUCT_NAMES = "mm mat mv conv linear dot inner einsum attention lstm gru rnn ops."
"""Parts of the names of functions that may be matrix products. Those of an operator of others are not known."""


class CalledNames(torch.overrides.TorchFunctionMode):
    """A context manager that records, in ``names``, the names of the torch functions that are called in its body."""

    def __init__(self) -> None:
        """Start with an empty set of names."""
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the torch function ``func``, return its result, and add its name to ``names``. For a custom operator,
        which may compute anything, add ``ops.`` instead.
        """
        # An operator of others may be anything, a product too.
        custom = type(func).__module__.startswith("torch._ops")
        self.names.add("ops." if custom else str(getattr(func, "__name__", "ops.")))
        return func(*args, **(kwargs or {}))
