"""Count the calls of the CUDA runtime in a call, with torch's profiler: launches, allocations, synchronisations, loads.

The caching allocator makes none of these calls in a warm process, so a raw allocation is the op's own.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shiplap.errors import error_line

# The range in the trace that has the calls, without those of the profiler.
PROFILER_MARK = "shiplap::traced"
PATTERNS_BY_KIND = {  # what a call is counted as → names of the runtime's and the driver's functions
    "raw allocation": r"cu(da)?(Malloc|MemAlloc|MemCreate|HostAlloc|MemHostAlloc|HostRegister|MemHostRegister)",
    "raw release": r"cu(da)?(Free|MemFree|MemRelease)",
    "synchronisation": r"cu(da)?\w*Synchronize|cudaMemcpy(_v\d+)?$|cuMemcpy(DtoH|HtoD)(_v2)?$",
    "host callback": r"cu(da)?(LaunchHostFunc|StreamAddCallback)",
    "module load": r"cu(da)?(ModuleLoad|LibraryLoad)",
    "launch": r"cu(da)?Launch(Cooperative)?Kernel",
}
# Kinds that a captured graph or an overlapping stream cannot afford.
REPORTED_KINDS = ("raw allocation", "synchronisation", "host callback", "module load")


@dataclass(frozen=True)
class CudaCallCounts:
    """The number of CUDA calls by kind (see ``PATTERNS_BY_KIND``) and the ids of the streams on which kernels ran.
    ``reason`` says why nothing was counted, and is empty if the calls were counted.
    """

    calls: Counter[str]
    streams: frozenset[int] = frozenset()
    reason: str = ""

    def __str__(self) -> str:
        """Return a message with the numbers of launches, streams and other CUDA calls, or with the reason why nothing
        was counted.
        """
        if self.reason:
            return f"not counted ({self.reason})"
        counts = [f"{self.calls['launch']} launches on {len(self.streams)} streams"]
        return ", ".join(counts + [f"{self.calls[kind]} {kind}s" for kind in REPORTED_KINDS])


def count_cuda_calls(run: Callable[[], Any]) -> CudaCallCounts:
    """Run ``run()`` under torch's profiler, and return the numbers of CUDA calls that it makes. The calls of the
    profiler itself are left out. If they cannot be counted, the result has a ``reason``.
    """
    activity = torch.profiler.ProfilerActivity
    if activity.CUDA not in torch.profiler.supported_activities():
        return CudaCallCounts(Counter(), reason="this torch has no CUPTI")
    try:
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
            with torch.profiler.record_function(PROFILER_MARK):
                run()
            # Kernels that still run when the profile ends would be missing in it.
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            return parse_chrome_trace(json.loads(file.read_text()))
    except (RuntimeError, OSError, ValueError) as e:
        return CudaCallCounts(Counter(), reason=error_line(e))


def parse_chrome_trace(trace: dict[str, Any]) -> CudaCallCounts:
    """Return the numbers of CUDA calls, and the streams of the kernels that they launched, in a profiler's Chrome
    trace. Only calls in the range that :func:`count_cuda_calls` marks are counted. If they cannot be counted, the
    result has a ``reason``.
    """
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    mark = next((e for e in events if e.get("name") == PROFILER_MARK and "gpu" not in e.get("cat", "")), None)
    if mark is None:
        return CudaCallCounts(Counter(), reason="the profiler lost its mark")
    calls: Counter[str] = Counter()
    launched = set()
    for e in events:
        inside = mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"]
        if inside and e.get("cat") in ("cuda_runtime", "cuda_driver"):
            # The correlation id joins a launch and its kernel, which runs later and outside of the marked range.
            launched.add(e.get("args", {}).get("correlation"))
            calls.update(kind for kind, pattern in PATTERNS_BY_KIND.items() if re.match(pattern, e["name"]))
    if not launched:
        return CudaCallCounts(Counter(), reason="the profiler saw no call of the CUDA runtime")
    kernels = [e.get("args", {}) for e in events if e.get("cat") == "kernel"]
    streams = frozenset(k["stream"] for k in kernels if k.get("correlation") in launched and "stream" in k)
    return CudaCallCounts(calls, streams)
