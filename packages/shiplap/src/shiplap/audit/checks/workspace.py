"""``workspace``: results do not depend on the contents of uninitialised memory.

Workspaces that shiplap provides are filled with several bytes. Memory from ``torch.empty``, outputs above all, is
filled with NaN or the largest integer by torch itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.dispatch.launch import poisoned_workspace
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.pairwise import large_samples
from shiplap.sampling.run import run_op
from shiplap.sampling.samples import Samples

# Zero, all bits set (NaN in floating dtypes), large numbers, and a mixed pattern.
FILL_BYTES = (0x00, 0xFF, 0x7F, 0xA5)


def workspace_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``workspace`` calls the op. They are the base sample, larger and very large
    ones, and samples without optional arguments.
    """
    yield from samples.plain()
    yield from samples.grown(2)
    yield from samples.optionals()
    yield from large_samples(samples)


def observe_workspace(op: Op, case: SampleCase) -> Observation:
    """Compare calls whose workspaces (scratch memory) and newly allocated tensors are filled with different bytes. The
    returned observation has a problem if the bits of the results depend on them.
    """

    def filled(byte: int) -> tuple[Tensor, ...]:
        """Return the results of a call in which workspaces are filled with ``byte``, and new tensors with NaN or the
        largest integer.
        """
        with poisoned_workspace(byte), _deterministic_algorithms(fill=True):
            return run_op(op, case)

    first = filled(FILL_BYTES[0])
    # Results that vary with one byte would vary with another, too.
    if any(bitwise_difference(filled(FILL_BYTES[0]), first) for _ in range(3)):
        return Observation(skip="results vary by themselves, see determinism")
    for byte in FILL_BYTES[1:]:
        if problem := bitwise_difference(filled(byte), first, f"with 0x{FILL_BYTES[0]:02X}"):
            return Observation(f"workspace filled with 0x{byte:02X}: {problem}")
    # In the same mode, since torch has other algorithms there, with other roundings (sums by index on a GPU).
    with poisoned_workspace(FILL_BYTES[0]), _deterministic_algorithms(fill=False):
        if problem := bitwise_difference(first, run_op(op, case), "with memory as it comes"):
            return Observation(
                f"fresh memory filled with NaN: {problem}",
                fix="write every element of the output, or allocate it with torch.zeros",
            )
    wants = any(k.workspace is not None for ks in op.kernels.values() for k in ks)
    return Observation(note="" if wants else "no kernel declares a workspace")


@contextmanager
def _deterministic_algorithms(fill: bool) -> Iterator[None]:
    """Return a context manager in whose body torch uses deterministic algorithms. If ``fill`` is true, ``torch.empty``
    fills new tensors with NaN, or with the largest integer.
    """
    settings: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    # Torch fills new memory only in this mode. An operator without a deterministic algorithm must not raise here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = filled


CHECK = Check(
    "workspace",
    order=140,
    observes="the bits are the same for workspaces full of 00, FF, 7F and A5 and for torch.empty full of NaN",
    observe=observe_workspace,
    cases=workspace_cases,
    obligations=("value", "determinism"),
    fix="initialise the part of the workspace that is read before it is written",
)
