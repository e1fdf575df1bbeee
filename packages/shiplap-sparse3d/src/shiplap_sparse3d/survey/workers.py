"""The rank of this process among the workers, as launchers state it."""

from __future__ import annotations

import os

from shiplap.plugin_api import error

__all__ = ["local_device", "rank_and_world"]

_NAMES = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def rank_and_world() -> tuple[int, int]:
    """Return ``(rank, workers)`` from the environment, or ``(0, 1)``. Raises SL613 for invalid values."""
    for rank_name, world_name in _NAMES:
        rank, world = os.environ.get(rank_name), os.environ.get(world_name)
        # Half of a pair is no launcher's, such as a RANK of another program.
        if rank is None or world is None:
            continue
        if rank.isdigit() and world.isdigit() and int(rank) < int(world):
            return int(rank), int(world)
        raise error(
            "SL613",
            where=f"{rank_name} and {world_name} in the environment",
            got=f"{rank} and {world}",
            expected="a rank from 0 on that is less than the number of workers",
            fix="start the workers with torchrun or another launcher, or unset both",
        )
    return 0, 1


def local_device(device: str) -> str:
    """Return ``cuda`` as the device of this worker on its machine (``LOCAL_RANK``), and others unchanged."""
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{local}" if device == "cuda" and local.isdigit() else device
