"""sglang, pytorch #142050: a batch carries a mode, an enum with methods."""

from dataclasses import dataclass
from enum import IntEnum, auto

import torch


class Mode(IntEnum):
    PREFILL = auto()
    DECODE = auto()

    def is_decode(self):
        return self == Mode.DECODE


@dataclass
class Batch:
    mode: Mode
    positions: torch.Tensor


@torch.compile(backend="eager")
def forward(x, batch):
    if batch.mode.is_decode():
        return x * batch.positions[:, None].cos()
    return x.cumsum(0) * batch.positions[:, None].sin()


torch.manual_seed(0)
for mode, length in ((Mode.PREFILL, 6), (Mode.DECODE, 6), (Mode.PREFILL, 6), (Mode.DECODE, 6)):
    forward(torch.randn(length, 4), Batch(mode, torch.arange(length).float()))
