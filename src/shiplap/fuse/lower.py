"""The one lowering of every op that has templates: call → verified candidates → choice → node of the graph.

A candidate that was not proven is never submitted, whoever proposes it; what is left when none is proven is the floor:
the op's own kernel as an opaque call, or the reference inlined, for Inductor to fuse as it does any PyTorch code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiplap.compat import lowering
from shiplap.errors import notice
from shiplap.fuse.call import Call
from shiplap.fuse.candidate import candidates
from shiplap.fuse.decide import Decision, Verdict, remember
from shiplap.fuse.prove import prove
from shiplap.fuse.switch import in_force
from shiplap.op import Op

__all__ = ["lower"]


def lower(op: Op, overload: Any, *args: Any, **kwargs: Mapping[str, Any]) -> Any:
    """Lower one call of ``op``."""
    call, switch = Call.bind(op, args, kwargs), in_force(op)
    found, refused = candidates(call) if switch.templates else ([], {"every template": "switched off"})
    verdicts = [Verdict(label, "refused", why) for label, why in refused.items()]
    found = [c for c in found if not switch.only or switch.only in c.label]
    for candidate in found:
        verdicts.append(prove(candidate))
        if verdicts[-1].status == "ok":
            _decided(call, candidate.label, "the first candidate that is proven", verdicts)
            return candidate.node(switch.fusion)
        _warn(op, verdicts[-1])
    node, label = floor(call, overload, args, kwargs)
    _decided(call, label, "no template is proven for this call" if found else "no template takes this call", verdicts)
    return node


def floor(call: Call, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
    """What is always right: the op's own kernel, called as a whole, or the reference, inlined."""
    if call.op.kernels.get(call.device.type):
        return lowering.extern(overload, args, dict(kwargs)), "op"
    try:
        graph = lowering.trace(call.op.reference, call.values)
    except Exception:  # a reference that cannot be traced is called as it stands
        return lowering.extern(overload, args, dict(kwargs)), "op"
    tensors = [n for n, v in zip(call.args, call.values, strict=True) if v is not None]
    return lowering.inline(graph, tensors), "reference"


def _warn(op: Op, verdict: Verdict) -> None:
    notice(
        f"template {op.identity} {verdict.candidate}",
        f"{op.spec.name}: {verdict.candidate} is {verdict.status} and is not used ({verdict.detail})",
    )


def _decided(call: Call, chosen: str, reason: str, verdicts: list[Verdict]) -> None:
    sizes = ", ".join(f"{k}={v}" for k, v in call.hints.items())
    dtypes = ", ".join(f"{k} {str(v).removeprefix('torch.')}" for k, v in call.dtypes.items())
    node = lowering.current_node().name
    remember(Decision(call.op.spec.name, node, sizes, dtypes, chosen, reason, tuple(verdicts)))
