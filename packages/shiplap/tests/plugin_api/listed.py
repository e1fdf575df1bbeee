"""An op whose configs no declaration lists: importable, so that a process of the tuner finds the source by its name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api.tuning import ConfigSource, Value


# --8<-- [start:source]
@sl.op("extend_test::twice")
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    time.sleep(0.2)  # never the fastest
    return 2 * x


@twice.kernel("cpu", name="library", configs=[{"ALGORITHM": 0}])
def library(x: Tensor, *, out: Tensor, ALGORITHM: int) -> None:
    time.sleep(0.05 / (1 + ALGORITHM) ** 2)
    torch.mul(x, 3 if ALGORITHM == 3 else 2, out=out)


class Algorithms(ConfigSource):
    """As many algorithms as there are elements.

    The third is wrong, and the fifth takes no odd size.
    """

    def configs(
        self,
        op: sl.Op,
        device: torch.device,
        sizes: Mapping[str, Any],
    ) -> list[dict[str, int]]:
        return [{"ALGORITHM": a} for a in range(min(sizes["n"], 6))]

    def refusal(
        self,
        op: sl.Op,
        config: Mapping[str, Value],
        args: tuple[Any, ...],
    ) -> str:
        return "an odd size" if config["ALGORITHM"] == 5 and len(args[0]) % 2 else ""


ALGORITHMS = Algorithms(f"{__name__}:ALGORITHMS", "cpu", "library")
# --8<-- [end:source]
