"""A time limit for launches of Triton's interpreter, which runs one program after another in Python.

An audit draws sizes for which that would take minutes. Such a kernel is slow, but does not hang. Inside
:func:`limit_launch_time`, a launch that would take too long is therefore refused before it begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

_second_limits: list[float] = []  # seconds of processor time for one launch, if there is a limit
_seconds_per_program: dict[object, list[float]] = {}  # of each kernel the seconds for one program, launch by launch
WARMUP_LAUNCHES = 3  # launches before an estimate counts: the first one prepares the kernel


class LaunchTooLong(BaseException):
    """The error for a launch for which the interpreter would need too much time.

    It derives from ``BaseException``. A check that catches every ``Exception`` of a kernel therefore does not report
    it.
    """


@contextmanager
def limit_launch_time(seconds: float) -> Iterator[None]:
    """Raise ``LaunchTooLong``, inside the ``with`` block, at a launch of Triton's interpreter that would take longer
    than ``seconds`` of processor time. The time is estimated from earlier launches of the same kernel. The first three
    launches of a kernel are never refused.
    """
    _second_limits.append(seconds)
    try:
        yield
    finally:
        _second_limits.pop()


@contextmanager
def measure_launch_time(kernel: object, grid: tuple[int, ...]) -> Iterator[None]:
    """Measure the processor time of the launch of ``kernel`` with ``grid`` inside the ``with`` block, for estimates of
    later launches. Raise ``LaunchTooLong`` before the block runs if the launch would take longer than
    :func:`limit_launch_time` allows.
    """
    programs = prod(grid)
    paces = _seconds_per_program.setdefault(kernel, [])
    # The fastest launch counts, since the first ones prepare the kernel.
    expected = programs * min(paces) if len(paces) >= WARMUP_LAUNCHES else 0.0
    if _second_limits and expected > _second_limits[-1]:
        raise LaunchTooLong(
            f"Triton's interpreter would run {programs:,} programs for about {expected:.0f} s:"
            " audit on a GPU for such sizes"
        )
    # Processor time, which other processes do not lengthen.
    began = time.thread_time()
    yield
    paces.append((time.thread_time() - began) / programs)
    del paces[: -2 * WARMUP_LAUNCHES]
