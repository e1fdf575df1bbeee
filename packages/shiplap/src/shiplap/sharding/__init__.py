"""Sharding: rules by which a call may be cut over the ranks of a mesh, and their registration with DTensor.

An op is registered with DTensor when one of its calls gets a DTensor for the first time. Nothing here runs before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error
from shiplap.torch_private import dtensor

__all__ = ["on_refused"]


def on_refused(op: Op, values: Sequence[Any], cause: Exception) -> bool:
    """Register the sharding rules of ``op`` with DTensor if a call with the arguments ``values`` failed with ``cause``
    because they were missing. Return whether the call may be tried again. If another error of Shiplap is the cause of
    ``cause``, raise that error. Return False for any other failure.

    Raises:
        ArgumentError: ``SL216`` for tensors among DTensors, ``SL217`` where no sharding rule is known.
    """
    for given in values:
        if isinstance(given, (list, tuple)) and any(map(dtensor.is_dtensor, given)):
            raise error(
                "SL217", where=op.spec.name, got="DTensors in a list", expected="plain tensors in lists"
            ) from None
    if not any(dtensor.is_dtensor(v) for v in values):
        return False
    if dtensor.lacks_strategy(cause):
        from shiplap.sharding.place import register_with_dtensor  # here: the samples and DTensor take long to import

        return register_with_dtensor(op)
    # DTensor wraps errors of the op in errors of its own. The first error of the catalogue in the chain is the useful
    # one.
    behind: BaseException | None = cause
    while behind is not None:
        if isinstance(behind, ShiplapError) and behind is not cause:
            raise behind from None
        behind = behind.__cause__ or behind.__context__
    if dtensor.has_plain_tensors(cause):
        plain = [
            a.name
            for a, v in zip(op.spec.args, values, strict=False)
            if hasattr(v, "shape") and not dtensor.is_dtensor(v)
        ]
        got = f"DTensors, and plain tensors as {', '.join(plain)}"
        raise error("SL216", where=op.spec.name, got=got, expected="DTensors of one mesh, or plain tensors") from None
    return False
