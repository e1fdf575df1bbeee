"""Which inputs of a graph Inductor turns into constants."""

from __future__ import annotations

import torch
from torch.fx import Node

__all__ = ["folded"]


def folded(node: Node) -> bool:
    """Whether Inductor computes what depends on ``node`` alone once, while it compiles: true for frozen parameters.

    Graphs ahead of autograd, while they are compiled. Dynamo has to know of it: ``options={"freezing": True}`` comes
    too late, and parameters stay inputs.
    """
    from torch._inductor import config

    if not config.freezing or torch.is_grad_enabled():
        return False
    return node.op == "get_attr" or (node.op.startswith("call") and all(map(folded, node.all_input_nodes)))
