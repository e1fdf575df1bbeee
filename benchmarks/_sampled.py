"""Where the host's time goes in a call, by looking at the Python stack every half millisecond.

A profiler that sees each call makes programs of many small calls twice as long, and those of one package more than
those of another. A look costs the program nothing while it does not look. A signal is served when a C function
returns, so the time since the look before, a wait for the device included, goes to the line that was at work.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

__all__ = ["kernels", "sampled"]

EVERY = 0.0005
PARTS = [  # of the innermost frame that has one
    ("backward of convolutions", r"<gradient of |spconv/pytorch/functional\.py:backward"),
    ("tables", r"shiplap_sparse3d/(spconv/indices|geometry|steps)\.py|spconv/pytorch/ops\.py:get_indice_pairs"),
    ("convolutions", r"shiplap_sparse3d/plan\.py:conv|spconv/pytorch/(functional\.py|ops\.py)"),
    ("layers around them", r"shiplap_sparse3d/spconv/|spconv/pytorch/|spconv_triton/"),
    ("batch norms", r"modules/batchnorm\.py"),
    ("ReLUs", r"modules/activation\.py"),
    ("compiled code", r"torchinductor|_dynamo/|_functorch/"),
    ("autograd's engine, backward of PyTorch's operations", r"autograd/(__init__|graph)\.py"),
    ("zero_grad", r":zero_grad"),
    ("the network's own code", r"_networks\.py"),
]
_COMPILED = [(label, re.compile(pattern)) for label, pattern in PARTS]


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}"


def _part(frame: FrameType | None) -> str:
    while frame is not None:
        place = _place(frame)
        for label, pattern in _COMPILED:
            if pattern.search(place):
                return label
        frame = frame.f_back
    return "other"


def sampled(run: Callable[[], Any], calls: int = 10, top: int = 12) -> dict[str, dict[str, float]]:
    """Milliseconds of a call by part, and by the function whose frame was the innermost. Backwards run in this thread,
    where they are seen. No call waits for the device but where the program does."""
    parts, own = Counter[str](), Counter[str]()
    last = 0.0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[_part(frame)] += now - last
        if frame is not None:
            own["/".join(_place(frame).split("/")[-2:])] += now - last
        last = time.perf_counter()

    run()
    torch.cuda.synchronize()
    before = signal.signal(signal.SIGALRM, look)
    with torch.autograd.set_multithreading_enabled(False):
        last = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
        for _ in range(calls):
            run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    torch.cuda.synchronize()
    in_all = {"parts": parts.most_common(), "own": own.most_common(top)}
    return {kind: {name: round(s / calls * 1e3, 2) for name, s in each} for kind, each in in_all.items()}


def kernels(run: Callable[[], Any], calls: int = 3, top: int = 10) -> dict[str, Any]:
    """Milliseconds that the GPU works for a call, of how many kernels and copies, and those that take the longest."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    longest = sorted(found, key=lambda e: -e.self_device_time_total)[:top]
    return {
        "ms": round(sum(e.self_device_time_total for e in found) / calls / 1e3, 3),
        "kernels": round(sum(e.count for e in found) / calls, 1),
        "longest": {e.key[:80]: round(e.self_device_time_total / calls / 1e3, 3) for e in longest},
    }
