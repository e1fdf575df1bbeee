"""Whether calls of an op inside of each other have used up Python's recursion limit, or code around the op has."""

from __future__ import annotations

import sys
from types import FrameType

from shiplap.dispatch.execute import Executor
from shiplap.torch_private.dispatcher_calls import DirectCall

# The functions with which a call of an op begins in Python: one for callers of the op, one for torch's dispatcher.
ENTRIES = (DirectCall.__call__.__code__, Executor.execute.__code__)


def op_calls_itself(op: object, cause: RecursionError) -> bool:
    """Return whether ``op`` is called inside of its own calls, and these calls take more than half of the stack at
    ``cause``, an error of too deep recursion.

    A function that recurses deeply around the op, or a kernel whose own helper recurses, leaves one call of the op on
    the stack at most, or few beside many other frames. The op is not at fault there.
    """
    frames = [*reversed(_outer_frames(sys._getframe(1))), *_frames_of(cause)]
    places = {code: [at for at, f in enumerate(frames) if f.f_code is code and _is_of(op, f)] for code in ENTRIES}
    nested = [found for found in places.values() if len(found) > 1]
    return any(len(frames) - found[0] > len(frames) / 2 for found in nested)


def _is_of(op: object, frame: FrameType) -> bool:
    """Return whether ``frame``, of a method, belongs to a call of ``op``."""
    return frame.f_locals.get("self") is op


def _outer_frames(frame: FrameType | None) -> list[FrameType]:
    """Return ``frame`` and the frames of its callers, the innermost first."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _frames_of(cause: BaseException) -> list[FrameType]:
    """Return the frames that ``cause`` has left, the outermost first. That which has caught it is not among them."""
    trace, found = cause.__traceback__, list[FrameType]()
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found[1:]
