"""Dispatch, which is the registered op and the steps of a call from torch's dispatcher to a kernel or the reference."""

from shiplap.lazy_imports import uncollected

with uncollected():
    from shiplap.dispatch.adopt import AdoptedOp, adopt
    from shiplap.dispatch.op import Op, op

__all__ = ["AdoptedOp", "Op", "adopt", "op"]
