"""``torch.utils.checkpoint`` in the graphs of this torch."""

from __future__ import annotations

import torch

__all__ = ["checkpoints_keep_objects"]

_KEEPS_OBJECTS = (2, 13)  # since then Dynamo makes outputs of the tensors in an object that a checkpoint returns


@torch.compiler.assume_constant_result
def checkpoints_keep_objects() -> bool:
    """Whether a function that is checkpointed in a graph may return objects of its own that hold tensors.

    Earlier releases do what is needed for that where ``skip_fwd_side_effects_in_bwd_under_checkpoint`` of
    ``torch._dynamo.config`` is set. Without it they make a graph that does not run.
    """
    import torch._dynamo

    major, minor = torch.__version__.split(".")[:2]
    allowed = getattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)
    return bool(allowed) or (int(major), int(minor)) >= _KEEPS_OBJECTS
