"""Wrong uses of every public layer of the families: ``python hostile_layers.py ROUNDS SEED [NAME NUMBER]``.

Each round makes a layer with right or wrong arguments and calls it with a right or a wrong input: other feature dtypes
and shapes, coordinates outside of the grid or twice, grids of no cells or of 2**40. It may raise an error of the
catalogue, or what Python and torch raise themselves for a wrong type or shape. A signal, a hang, an internal assertion,
or an error that our own code did not mean (IndexError, KeyError, ZeroDivisionError, ...) is wrong.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiplap_slidesparse
import shiplap_sparse3d as s3
from shiplap.errors import ShiplapError
from shiplap_sparse3d import spconv

sys.path.insert(0, str(Path(__file__).parent))
from hostile import HANG, NUMBERS, OTHERS, bound_memory, changed, watch

MEANT = (ShiplapError, TypeError, NotImplementedError, MemoryError, AttributeError)
SIZES = (*NUMBERS[:4], 2, 3, 100, 2**40, 2**63 - 1)


def of_ours(dims: int) -> Callable[[random.Random], Any]:
    """What makes a SparseTensor of so many axes: right, or wrong in one respect."""

    def made(rng: random.Random) -> Any:
        feats, coords, grid, batch = parts(rng, dims)
        return s3.SparseTensor(feats, coords, grid, batch, padded=rng.random() < 0.1)

    return made


def of_spconv(dims: int) -> Callable[[random.Random], Any]:
    """The same as a SparseConvTensor."""

    def made(rng: random.Random) -> Any:
        feats, coords, grid, batch = parts(rng, dims)
        return spconv.SparseConvTensor(feats, coords, grid, batch)

    return made


def parts(rng: random.Random, dims: int) -> tuple[Any, Any, Any, Any]:
    """Features, coordinates, grid and batch size: each of them wrong in one of six cases."""
    count = rng.choice([0, 1, 5, 20])
    cells = torch.randperm(8**dims)[:count]
    axes = [(cells // 8**axis) % 8 for axis in range(dims)]
    given: list[Any] = [
        torch.randn(len(cells), 4),
        torch.stack([torch.zeros_like(cells), *axes], 1).int(),
        [8] * dims,
        1,
    ]
    if rng.random() < 0.7:
        at = rng.randrange(4)
        if at == 2 and rng.random() < 0.7:
            given[2] = [rng.choice(SIZES) for _ in range(rng.choice([dims, dims, 0, 1, 4]))]
        else:
            given[at] = changed(rng, given[at])
    return given[0], given[1], given[2], given[3]


def dense(rng: random.Random) -> Any:
    """Rows for a linear layer."""
    return changed(rng, torch.randn(3, 64)) if rng.random() < 0.7 else torch.randn(3, 64)


def layers() -> dict[str, tuple[Callable[..., nn.Module], list[Any], Callable[[random.Random], Any]]]:
    """By name: what makes the layer, its right arguments, and what makes an input."""
    listed: dict[str, tuple[Callable[..., nn.Module], list[Any], Callable[[random.Random], Any]]] = {
        "slidesparse.Linear": (shiplap_slidesparse.Linear, [64, 32], dense),
        "GlobalPool": (s3.GlobalPool, ["avg"], of_ours(3)),
        "BatchNorm": (s3.BatchNorm, [4], of_ours(3)),
        "spconv.ToDense": (spconv.ToDense, [], of_spconv(3)),
    }
    for n in (1, 2, 3):
        for kind in ("SubMConv", "SparseConv", "SparseConvTranspose", "GenerativeConv", "SparseInverseConv"):
            listed[f"{kind}{n}d"] = (getattr(s3, f"{kind}{n}d"), [4, 6, 3], of_ours(n))
        for kind in ("SparseMaxPool", "SparseAvgPool"):
            listed[f"{kind}{n}d"] = (getattr(s3, f"{kind}{n}d"), [2, 2], of_ours(n))
            listed[f"spconv.{kind}{n}d"] = (getattr(spconv, f"{kind}{n}d"), [2, 2], of_spconv(n))
        for kind in ("SubMConv", "SparseConv", "SparseConvTranspose"):
            listed[f"spconv.{kind}{n}d"] = (getattr(spconv, f"{kind}{n}d"), [4, 6, 3], of_spconv(n))
        listed[f"spconv.SparseInverseConv{n}d"] = (
            getattr(spconv, f"SparseInverseConv{n}d"),
            [4, 6, 3, "k"],
            of_spconv(n),
        )
    return listed


def used(name: str, seed: int, number: int) -> str:
    """What is wrong with one use of a layer, or nothing."""
    make, right, inputs = layers()[name]
    rng = random.Random(f"{name} {seed} {number}")
    torch.manual_seed(rng.randrange(2**31))
    arguments = list(right)
    if arguments and rng.random() < 0.5:
        arguments[rng.randrange(len(arguments))] = rng.choice(
            [rng.choice(SIZES[:7]), rng.choice(OTHERS), (3, 0, 1), [2]]
        )
    watch(HANG)
    try:
        made = make(*arguments)(inputs(rng))
        for tensor in (made, getattr(made, "feats", None), getattr(made, "features", None)):
            if isinstance(tensor, Tensor):
                tensor.sum().item()
    except MEANT:
        return ""
    except Exception as e:
        frames = traceback.extract_tb(e.__traceback__)
        ours = "shiplap" in frames[-1].filename and "/tests/" not in frames[-1].filename
        fine = isinstance(e, (RuntimeError, ValueError)) and "INTERNAL ASSERT" not in str(e)
        return "" if fine or not ours else "".join(traceback.format_exception(e, limit=-3))
    finally:
        watch(0)
    return ""


def main(rounds: int, seed: int, name: str = "", number: str = "0") -> int:
    warnings.simplefilter("ignore")
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)
    bound_memory()
    torch.set_num_threads(1)
    numbers = range(int(number), int(number) + 1) if name else range(rounds)
    calls, wrong = 0, list[str]()
    for each in [name] if name else layers():
        for at in numbers:
            print(each, seed, at, flush=True)
            if problem := used(each, seed, at):
                wrong.append(f"{each} {seed} {at}: {problem}")
            calls += 1
    for line in wrong:
        print(f"WRONG {line}")
    print(f"{calls} uses, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
