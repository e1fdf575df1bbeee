"""Values that a family computes once and keeps: tables, packed weights, constants.

``built_outside_modes`` decorates a function whose result is kept. ``outside_modes`` is a block with the same purpose.
Values that are built there stay valid after inference mode, fake tensors, autocast or a transform of ``torch.func``
have ended.
"""

from shiplap.torch_private.dispatcher_calls import built_outside_modes, outside_modes

__all__ = ["built_outside_modes", "outside_modes"]
