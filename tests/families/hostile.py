"""Wrong calls of every public op of a family: ``python hostile.py MODULE ROUNDS SEED``.

Each round changes one or two arguments of a right call. The result may be anything but a signal, a hang of 30 s, or an
exception that is neither of the catalogue nor torch's own about the call. The last line printed is the call that was
tried, with its seed.
"""

from __future__ import annotations

import faulthandler
import importlib
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap.op import Op, registry
from shiplap.referee.samples import Samples

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
)
NUMBERS = (-1, 0, 1, 7, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1)
OTHERS: tuple[Any, ...] = (None, "", "x", 1.5, float("nan"), float("inf"), True, [], [-1, 0], [2**62], object())


def changed(rng: random.Random, value: Any) -> Any:
    """Another value in place of an argument."""
    if not isinstance(value, Tensor):
        return rng.choice([rng.choice(NUMBERS), rng.choice(OTHERS)])
    ways: tuple[Callable[[Tensor], Tensor | None], ...] = (
        lambda t: t.to(rng.choice(DTYPES)),
        lambda t: t.to("meta"),
        lambda t: t[None],
        lambda t: t[:0] if t.dim() else t,
        lambda t: t[: max(0, len(t) - 1)] if t.dim() else t,
        lambda t: t.reshape(-1),
        lambda t: t.transpose(0, -1) if t.dim() else t,
        lambda t: t.expand(3, *t.shape)[..., :1],
        lambda t: t.to_sparse() if not t.is_sparse and t.dim() else t,
        lambda t: torch.empty_strided(t.shape, [0] * t.dim(), dtype=t.dtype),
        lambda t: t.conj() if t.is_complex() else t.clone().requires_grad_(t.is_floating_point()),
        lambda t: None,
    )
    return rng.choice(ways)(value) if value.layout == torch.strided else None


def attack(op: Op, rounds: int, seed: int) -> int:
    """Call ``op`` wrongly ``rounds`` times; how often it could be tried."""
    try:
        samples = Samples(op, seed, "cpu")
        right = list(samples.build(samples.base).args)
    except ShiplapError:
        return 0
    for number in range(rounds):
        rng = random.Random(f"{op.spec.name} {seed} {number}")
        args = list(right)
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(args))
            if op.spec.args[at].tensor is None or "int" not in str(getattr(args[at], "dtype", "")):
                args[at] = changed(rng, args[at])
        print(op.spec.name, seed, number, flush=True)
        faulthandler.dump_traceback_later(30, exit=True)
        registered = getattr(getattr(torch.ops, op.spec.namespace), op.spec.opname)
        for call in (op, registered):
            try:
                positional, named = op.spec.split(tuple(args))
                call(*positional, **named)
            except (ShiplapError, TypeError, NotImplementedError, MemoryError):
                pass
            except RuntimeError as e:
                if "INTERNAL ASSERT" in str(e):
                    raise
        faulthandler.cancel_dump_traceback_later()
    return rounds


def main(module: str, rounds: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    faulthandler.enable()
    importlib.import_module(module)
    tried = sum(attack(op, rounds, seed) for op in registry.ops())
    print(f"{tried} calls")
    assert tried


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
