"""Torch's profiler on the device: each kernel has a time of its own, and belongs to the operator that asked for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.backend.profiling import NATIVE, NO_KERNELS


@pytest.mark.skipif(not NATIVE, reason=NO_KERNELS)
def test_kernels_have_times_and_callers(dev: Any, device: str, tmp_path: Path) -> None:
    x = torch.randn(40, 40, device=device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
        (x @ x).relu()
    events = list(profiled.events())
    kernels = {e.name: e for e in events if e.device_type == DeviceType.PrivateUse1}
    assert kernels.keys() == {"aten::mm.out", "aten::relu"}
    for name, kernel in kernels.items():
        assert kernel.time_range.elapsed_us() > 0
        callers = [e for e in events if e.device_type == DeviceType.CPU and e.kernels]
        assert [k.name for e in callers for k in e.kernels].count(name) == 1
    assert kernels["aten::mm.out"].time_range.end <= kernels["aten::relu"].time_range.start
    total = next(a for a in profiled.key_averages() if a.key == "aten::mm.out")
    assert total.device_time_total > 0
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"aten::mm.out", "aten::relu"} <= {e["name"] for e in trace["traceEvents"] if e.get("cat") == "kernel"}


@pytest.mark.skipif(not NATIVE, reason=NO_KERNELS)
def test_what_runs_outside_is_not_recorded(dev: Any, device: str) -> None:
    x = torch.ones(4, device=device)
    x.relu()
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as profiled:
            x.exp()
        x.relu()
        names = [e.name for e in profiled.events() if e.device_type == DeviceType.PrivateUse1]
        assert names == ["aten::exp.out"]


def test_events_around_operators(dev: Any, device: str) -> None:
    """The older profiler, which torch 2.11 has as well."""
    x = torch.randn(40, 40, device=device)
    with torch.autograd.profiler.profile(use_device=device, use_kineto=False) as profiled:
        x @ x
    assert next(a for a in profiled.key_averages() if a.key == "aten::mm").device_time_total > 0
