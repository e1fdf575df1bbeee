"""The memory that is free on a device, so that what cannot fit is refused before any work."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that are free on ``device``, or None if it is not known. For a GPU it includes memory
    that torch has reserved and does not use. For the CPU it includes swap, and is at most the memory limit of the
    container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator has reserved and does not use is free for tensors.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
        # A container may have less memory than the machine.
        limit = Path("/sys/fs/cgroup/memory.max")
        bound = limit.read_text().strip() if limit.exists() else "max"
        return free if bound == "max" else min(free, int(bound))
    except (OSError, KeyError, ValueError):
        return None
