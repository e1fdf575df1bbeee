"""Wrong calls of every public op of a family, through every door: ``python hostile.py MODULE ROUNDS SEED [FROM]``.

Each round changes one or two arguments of a right call: dtypes, shapes, layouts, devices, numbers, and values of
integer tensors such as row numbers and coordinates. The same call is made as the op, through ``torch.ops``, into
``out=`` and, in some rounds, compiled; served by Python first, then by native code. Whatever comes of it, there is no
signal, no hang, no exception but one of the catalogue or torch's own about the call, and the doors agree: on
the values, or on the error.

Fewer than 20 rounds are a sample: nothing is compiled, neither graphs nor bindings.
The last line printed before a crash is the call that was tried; ``FROM`` repeats it: ``"sparse3d::conv 17 42"``.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op, registry
from shiplap.dispatch.out import has_out_variant
from shiplap.errors import ShiplapError
from shiplap.kernels.native import binding
from shiplap.sampling.samples import Samples

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.int32),
    *(torch.int64, torch.bool, torch.complex64, torch.uint8),
)
NUMBERS = (-1, 0, 1, 7, 2**31, -(2**31), 2**62, -(2**63), 2**63 - 1)
OTHERS: tuple[Any, ...] = (None, "", "x", 1.5, float("nan"), float("inf"), True, [], [-1, 0], [2**62], object())
HANG = 60.0  # seconds of processor time of one round
MEMORY = (
    4 << 30
)  # bytes of a process: where 2**31 rows can be allocated, their zeros take minutes and the memory of others
SAMPLE = 20  # rounds
COMPILED = 50  # rounds, of which one is compiled as well
REFUSED = "torch refuses"


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
        lambda t: torch.empty_strided(t.shape, [0] * t.dim(), dtype=t.dtype).zero_(),
        lambda t: t.conj() if t.is_complex() else t.clone().requires_grad_(t.is_floating_point()),
        lambda t: None,
        *([lambda t: other_values(rng, t)] * (0 if value.is_floating_point() or value.is_complex() else 8)),
    )
    try:
        return rng.choice(ways)(value) if value.layout == torch.strided else None
    except (RuntimeError, NotImplementedError):  # torch has no such tensor: sparse ones of eight bits
        return None


def other_values(rng: random.Random, t: Tensor) -> Tensor:
    """Some integers of ``t`` beyond what they may be: row numbers of nothing, coordinates outside of the grid."""
    made = t.clone()
    flat, limits = made.reshape(-1), torch.iinfo(t.dtype) if t.dtype != torch.bool else None
    for _ in range(rng.randint(1, 4)):
        if len(flat) and limits is not None:
            value = rng.choice([-1, -2, 0, 1, 5, 1000, limits.min, limits.max, limits.max - 1])
            flat[rng.randrange(len(flat))] = max(limits.min, min(limits.max, value))
    return flat.reshape(t.shape)


def attacked(op: Op, right: list[Any], seed: int, number: int) -> list[Any]:
    """The arguments of round ``number``, made anew for each door: an op may write to them."""
    rng = random.Random(f"{op.spec.name} {seed} {number}")
    args = [a.clone() if isinstance(a, Tensor) else a for a in right]
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(args))
        args[at] = changed(rng, args[at])
    return args


def outcome(call: Callable[[], Any]) -> Any:
    """The tensors of a call, or what it raised: the id of the catalogue, or that torch refuses it."""
    try:
        made = call()
    except ShiplapError as e:
        return e.id
    except (TypeError, NotImplementedError, MemoryError):
        return REFUSED
    except RuntimeError as e:
        if "INTERNAL ASSERT" in str(e):
            raise
        ids = [f"SL{part[:3]}" for part in str(e).split("SL")[1:] if part[:3].isdigit()]
        return ids[0] if ids else REFUSED  # Dynamo wraps what a fake raises, and quotes it
    return [t.detach() for t in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(t, Tensor)]


def agree(a: Any, b: Any) -> bool:
    """Whether two doors say the same. Torch's own parser may refuse what ours would have named, and the other way."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, list) or isinstance(b, list):
        return False
    return a == b or REFUSED in (a, b)


def equal(a: Tensor, b: Tensor) -> bool:
    """The same values, NaN included, and the same kind of tensor."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.is_meta or a.layout != torch.strided:
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())


def doors(op: Op, right: list[Any], seed: int, number: int, *, compiled: bool) -> dict[str, Any]:
    """What every door makes of one round."""
    registered = getattr(getattr(torch.ops, op.spec.namespace), op.spec.opname)

    def through(call: Callable[..., Any]) -> Any:
        positional, named = op.spec.split(tuple(attacked(op, right, seed, number)))
        return outcome(lambda: call(*positional, **named))

    answers = {"op": through(op), "torch.ops": through(registered), "default": through(registered.default)}
    if has_out_variant(op.spec) and op.variant is not None and isinstance(answers["op"], list):
        outs = [torch.empty_like(t) for t in answers["op"]]
        with torch.no_grad():
            answers["out"] = through(lambda *a, **k: op.out(*a, **k, out=outs if len(outs) != 1 else outs[0]))
    if compiled:
        torch._dynamo.reset()
        answers["compiled"] = through(torch.compile(lambda *a, **k: op(*a, **k), backend="aot_eager"))
        if answers["compiled"] == "SL304" and isinstance(answers["op"], list):
            answers["compiled"] = answers["op"]  # a graph holds its gradient; a call says that there is none when asked
    return answers


def attack(op: Op, rounds: range, seed: int) -> tuple[int, list[str]]:
    """Call ``op`` wrongly, served by Python and natively; how many calls there were, and what should not have been."""
    try:
        samples = Samples(op, seed, "cpu")
        right = list(samples.build(samples.base).args)
    except ShiplapError:
        return 0, []
    calls, wrong, before = 0, list[str](), dict[int, Any]()
    for served in ("python", "native") if len(rounds) >= SAMPLE else ("python",):
        os.environ["SHIPLAP_NATIVE"] = "1" if served == "native" else "0"
        for each in registry.declared_op_list():  # a binding serves every op of its library
            each.drop_native()
        if served == "native":
            try:
                binding.build(op)
            except ShiplapError:
                break
        for number in rounds:
            print(op.spec.name, seed, number, served, flush=True)
            watch(HANG)
            try:
                answers = doors(op, right, seed, number, compiled=number % COMPILED == 1 and len(rounds) >= SAMPLE)
            except Exception:
                wrong.append(f"{op.spec.name} {seed} {number} {served}: {traceback.format_exc(limit=-3)}")
                print(f"WRONG {wrong[-1]}", flush=True)
                continue
            finally:
                watch(0)
            calls += len(answers)
            first = before.setdefault(number, answers["op"])
            answers["before"] = first
            odd = {door: shown(each) for door, each in answers.items() if not agree(answers["op"], each)}
            if odd:
                wrong.append(f"{op.spec.name} {seed} {number} {served}: op {shown(answers['op'])}, {odd}")
                print(f"WRONG {wrong[-1]}", flush=True)
        op.drop_native()
    return calls, wrong


def watch(seconds: float) -> None:
    """End the process, with its stack, after so many seconds of processor time, or thirty times as many of the clock:
    what waits for ever uses no processor, and a machine may have much else to do. 0: no longer.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if seconds:
        faulthandler.dump_traceback_later(30 * seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def bound_memory() -> None:
    """Let this process and its compilers allocate at most ``MEMORY`` bytes each. A call for more is refused at once.
    A sanitizer has reserved more already, and gets no bound.
    """
    reserved = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    if reserved < MEMORY:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def shown(answer: Any) -> str:
    return answer if isinstance(answer, str) else str([(tuple(t.shape), str(t.dtype)) for t in answer])


def main(module: str, rounds: int, seed: int, only: str = "") -> int:
    warnings.simplefilter("ignore")
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)
    bound_memory()
    torch.set_num_threads(1)
    importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # takes seconds: no part of a call
    name, _, rest = only.partition(" ")
    calls, wrong = 0, list[str]()
    for op in [op for op in registry.declared_op_list() if not only or op.spec.name == name]:
        at = int(rest.split()[-1]) if rest else None
        made, odd = attack(op, range(rounds) if at is None else range(at, at + 1), seed)
        calls, wrong = calls + made, wrong + odd
    print(f"{calls} calls, {len(wrong)} wrong")
    assert calls
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
