"""``torch.utils.checkpoint`` in the graphs of this torch."""

from __future__ import annotations

from shiplap.torch_private.graph_constants import constant_result

_KEEPS_OBJECTS = (2, 13)  # since then Dynamo makes outputs of the tensors in an object that a checkpoint returns


@constant_result
def checkpoints_keep_objects() -> bool:
    """Whether a function that is checkpointed in a graph may return objects of its own that hold tensors.

    A constant of the graph. Releases before do what is needed if ``skip_fwd_side_effects_in_bwd_under_checkpoint`` of
    ``torch._dynamo.config`` is set, and make a graph that does not run without it.
    """
    import torch._dynamo

    major, minor = torch.__version__.split(".")[:2]
    allowed = getattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False)
    return bool(allowed) or (int(major), int(minor)) >= _KEEPS_OBJECTS
