"""Sharding: rules by which a call may be cut over the ranks of a mesh, and their registration with DTensor.

An op is registered with DTensor when one of its calls gets a DTensor for the first time. Nothing here runs before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shiplap.declare.spec import OpSpec
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
    listed = [t for v in values if isinstance(v, (list, tuple)) for t in v if hasattr(t, "shape")]
    if not any(map(dtensor.is_dtensor, (*values, *listed))):
        return False
    if listed:
        got = f"DTensors {'in' if any(map(dtensor.is_dtensor, listed)) else 'beside'} a list"
        raise error("SL217", where=op.spec.name, got=got, expected="plain tensors: it takes a list") from None
    if why := _why_never_distributed(op.spec):
        raise error("SL217", where=op.spec.name, got="DTensors", expected=f"plain tensors: {why}") from None
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


def _why_never_distributed(spec: OpSpec) -> str:
    """Return the reason why DTensor can represent no call of the op ``spec``, not even one with whole tensors. Return
    an empty string if there is none.
    """
    if spec.returned:
        return "it returns an argument that it writes to"
    if spec.dynamic:
        return "its sizes depend on data"
    return "it returns a list" if any(r.many for r in spec.made) else ""
