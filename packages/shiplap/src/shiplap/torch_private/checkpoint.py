"""Whether ``torch.utils.checkpoint`` keeps objects in the graphs of this torch."""

from __future__ import annotations

from shiplap.torch_private.graph_constants import constant_result

_KEEPS_OBJECTS = (2, 13)  # since then Dynamo makes outputs of the tensors in an object that a checkpoint returns


@constant_result
def checkpoints_keep_objects() -> bool:
    """Return whether a function that is checkpointed in a graph may return objects of its own that hold tensors.

    The result is a constant of the graph. Before torch 2.13 this needs
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint``, and without it the graph does not run.
    """
    import torch._dynamo

    major, minor = torch.__version__.split(".")[:2]
    allowed = getattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)
    return bool(allowed) or (int(major), int(minor)) >= _KEEPS_OBJECTS
