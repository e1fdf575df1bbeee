"""Constants of a graph: inputs that Inductor folds, results of functions that Dynamo does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.fx import Node

Function = TypeVar("Function", bound=Callable[..., object])


def constant_result(function: Function) -> Function:
    """Mark a function whose result a graph takes as a constant: ``torch.compiler.assume_constant_result``.

    The function of torch (2.11 to 2.15) sets this mark and nothing else, and imports all of Dynamo for it, which takes
    as long as the import of torch.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_folded(node: Node) -> bool:
    """Return whether Inductor computes results that depend on ``node`` alone while it compiles: true for frozen
    parameters.

    This holds for graphs ahead of autograd, while they are compiled. Dynamo needs the setting as well:
    ``options={"freezing": True}`` comes too late, and parameters stay inputs.
    """
    from torch._inductor import config

    # Inductor freezes parameters only for inference.
    if not config.freezing or torch.is_grad_enabled():
        return False
    return node.op == "get_attr" or (node.op.startswith("call") and all(map(is_folded, node.all_input_nodes)))
