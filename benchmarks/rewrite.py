"""Group fusions on and off: many small linear layers, and layers of one input in blocks like Llama's.

Contestants of a case: ``off`` (torch.compile), ``again`` (the control: the same, timed once more, and where kernels are
tuned compiled once more), ``on`` (with the rewrite as it ships; where it declines it is the graph of ``off``),
``forced`` (merged although the model of costs declines), ``inductor`` (torch's own ``batch_linear``, off by default)
and ``eager``. All have the same parameters: where they lie in memory costs up to 2 %. In a round each is timed once, in
random order, and those that decide nothing (``forced``, ``inductor``, ``eager``) in each fourth round. ``off over`` are
the medians of ratios taken inside a round, ``us`` the least of all rounds, and ``off over least`` the ratios of these.
``same code`` says whether the code of ``on`` is that of ``off`` but for names and comments: then nothing is on. CPU:
process time on one thread. CUDA: wall time of calls that are waited for together.

    python benchmarks/rewrite.py [--json benchmarks/results/rewrite.json] [--rounds 60] [--only NAME]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import random
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a graph from a cache is merged already: it counts nothing

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _record  # noqa: E402

import shiplap as sl  # noqa: E402
from shiplap.rewrite import Match, Rewrite  # noqa: E402
from shiplap.rewrite.group import StackedLinears, WideLinears  # noqa: E402

GROUP = "packages/shiplap/src/shiplap/rewrite/group"
SOURCES = ("benchmarks/rewrite.py", f"{GROUP}/linear.py", f"{GROUP}/cost.py", f"{GROUP}/base.py")
UNDECIDING = ("forced", "inductor", "eager")
TORCHS_OWN = {"batch_linear": {"min_fuse_set_size": 2}}


class Towers(nn.Module):
    """``count`` features, a small layer for each: recommenders, per-sensor encoders, heads of an ensemble."""

    def __init__(self, count: int, k: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, k) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(layer(x[i])) for i, layer in enumerate(self.layers)], 1)


class Block(nn.Module):
    """Projections of a decoder's block: query, key and value of one input, gate and up of another."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(k, k, bias=False), nn.Linear(k, k, bias=False)
        self.key, self.value = nn.Linear(k, k // 4, bias=False), nn.Linear(k, k // 4, bias=False)
        self.gate, self.up = nn.Linear(k, 3 * k, bias=False), nn.Linear(k, 3 * k, bias=False)
        self.down = nn.Linear(3 * k, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) * torch.cat([self.key(x).tanh()] * 2 + [self.value(x).sigmoid()] * 2, -1)
        x = x + self.out(scores)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Case:
    """``rewrites(always)``: as they ship, or without asking whether they pay. ``mode``: of ``torch.compile``.

    ``fused``: the same model with torch's fused call of attention, as users have it by default.
    """

    name: str
    model: Callable[[], nn.Module]
    x: tuple[int, ...]
    rewrites: Callable[[bool], Sequence[Rewrite]]
    train: bool = False
    frozen: bool = False
    mode: str | None = None
    dtype: torch.dtype = torch.float32
    layout: torch.memory_format = torch.contiguous_format
    peer: dict[str, Any] = field(default_factory=dict)
    fused: Callable[[], nn.Module] | None = None


def named(name: str, how: dict[str, Any]) -> str:
    return ", ".join([name, *(str(v) if isinstance(v, str) else k for k, v in how.items())])


def towers(count: int, rows: int, k: int, **how: Any) -> Case:
    name, peer = named(f"{count} layers, {rows} rows, {k}x{k}", how), {"pre_grad_fusion_options": TORCHS_OWN}
    return Case(
        name,
        lambda: Towers(count, k),
        (count, rows, k),
        lambda always: [StackedLinears(always=always)],
        peer=peer,
        **how,
    )


def block(rows: int, k: int, **how: Any) -> Case:
    return Case(
        named(f"block of {k}, {rows} rows", how),
        lambda: Block(k),
        (rows, k),
        lambda always: [WideLinears(always=always)],
        **how,
    )


def cases() -> list[Case]:
    small = [towers(16, 4, 64), towers(64, 4, 32), towers(16, 1, 32), towers(4, 4, 256), towers(2, 4, 32)]
    blocks = [block(1, 64), block(1, 64, frozen=True), block(4, 256), block(4, 256, frozen=True), block(64, 256)]
    return [*small, *blocks, towers(16, 256, 64), towers(16, 4, 64, train=True)]


def of_its_own(model: nn.Module) -> nn.Module:
    """A copy whose code Dynamo has not seen: neither its cache nor its limits are shared. It shares the parameters."""
    forward = type(model).forward
    code = types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    copied = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    copied.__class__ = type(type(model).__name__, (type(model),), {"forward": code})
    return copied


def contestant(
    case: Case, model: nn.Module, x: Tensor, rewrites: Sequence[Rewrite] = (), **options: Any
) -> tuple[Callable[[], Any], int, list[str]]:
    """A call that is compiled, and in how many places it was rewritten; casts that do nothing do not count. And its
    code, by graph, without what is named differently in each compilation.
    """
    run = torch.compile(of_its_own(model), mode=case.mode, dynamic=False)  # one case is no size of another
    codes: list[str] = []

    def call() -> Any:
        out = run(x)
        if case.train:
            out.sum().backward()
        return out

    saved = patch.object(GraphLowering, "save_output_code", codes.append)
    with saved, sl.rewrites(*rewrites) as scope, inductor.patch(freezing=case.frozen, **options):
        for _ in range(3):
            call()
    return call, sum(isinstance(o, Match) and o.rewrite != "no_ops" for o in scope.outcomes), [*map(unnamed, codes)]


def unnamed(code: str) -> str:
    """Generated code without comments, and without names and numbers of kernels."""
    return re.sub(r"(triton|cpp)_\w+|AOT ID.*", "", re.sub(r"(?m)\s*#.*$", "", code))


def measured(
    case: Case, device: str, rounds: int, turn: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> dict[str, Any]:
    """What is timed is timed within a ``turn``, after all is compiled."""
    torch.manual_seed(0)
    model = case.model().to(device, case.dtype, memory_format=case.layout).train(case.train)
    x = torch.randn(*case.x, device=device, dtype=case.dtype).to(memory_format=case.layout)
    eager = of_its_own(model)
    started = time.monotonic()
    with torch.set_grad_enabled(case.train):
        calls: dict[str, Callable[[], Any]] = {}
        calls["off"], _, plain = contestant(case, model, x)
        calls["on"], merged, code = contestant(case, model, x, case.rewrites(False))
        if not merged:
            calls["forced"], forced, _ = contestant(case, model, x, case.rewrites(True))
            assert forced, case
        if case.peer:
            calls["inductor"] = contestant(case, model, x, **case.peer)[0]
        if case.fused:
            by_hand = case.fused().to(device, case.dtype, memory_format=case.layout).train(case.train)
            by_hand.load_state_dict(model.state_dict())
            calls["sdpa"] = contestant(case, by_hand, x)[0]
        # How far its ratio is from 1 is the noise: of the clock and, where kernels are tuned, of that choice as well.
        calls["again"] = contestant(case, model, x)[0] if case.mode and "autotune" in case.mode else calls["off"]
        calls["eager"] = lambda: eager(x).sum().backward() if case.train else eager(x)
        seconds, expected, compiled = time.monotonic() - started, eager(x), counters["stats"]["unique_graphs"]
        errors = {n: apart(call(), expected) for n, call in calls.items() if n != "eager"}
        assert max(errors.values()) < (3e-2 if case.dtype.itemsize < 4 else 2e-3), (case.name, errors)
        with turn():
            times = timed(calls, device, rounds)
    assert counters["stats"]["unique_graphs"] == compiled, f"{case.name}: compiled again, without its rewrites"
    least = {n: min(ts.values()) for n, ts in times.items()}
    medians = {n: statistics.median(times["off"][r] / t for r, t in ts.items()) for n, ts in times.items()}
    return {
        "case": case.name,
        "rewrites": [r.name for r in case.rewrites(False)],
        "merged": merged,
        "same code": plain == code,
        "us": {n: round(t * 1e6, 1) for n, t in least.items()},
        "off over": {n: round(r, 3) for n, r in medians.items() if n != "off"},
        "off over least": {n: round(least["off"] / t, 3) for n, t in least.items() if n != "off"},
        "error": {n: float(f"{e:.2g}") for n, e in errors.items()},
        "compile_s": round(seconds, 1),
    }


def apart(got: Tensor, expected: Tensor) -> float:
    """Return the relative error of ``got`` in the Frobenius norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-12))


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, dict[int, float]]:
    """The seconds of each call by number of the round."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def once(call: Callable[[], Any], count: int) -> float:
        wait()
        start = clock()
        for _ in range(count):
            call()
        wait()
        return (clock() - start) / count

    count = max(1, round(3e-3 / max(1e-6, once(calls["off"], 20))))
    times: dict[str, dict[int, float]] = {n: {} for n in calls}
    gc.disable()  # a collection would fall to one contestant
    for number in range(rounds):
        taken = [n for n in calls if n not in UNDECIDING or number % 4 == 0]
        for name in random.sample(taken, len(taken)):
            times[name][number] = once(calls[name], count)
    gc.enable()
    return times


def run(
    wanted: Sequence[Case], sources: Sequence[str], device: str, rounds: int, path: Path | None, only: str = ""
) -> None:
    """Measure, and write after each case: time on a machine may end early. What ``path`` has of these sources stays."""
    cases = kept(path, sources)
    for case in wanted:
        if not re.search(only, case.name) or any(f["case"] == case.name for f in cases):
            continue
        cases.append(measured(case, device, rounds))
        print(json.dumps(cases[-1]), flush=True)
        keep(path, sources, device, rounds, cases)


def kept(path: Path | None, sources: Sequence[str]) -> list[dict[str, Any]]:
    """The cases of a record of these sources."""
    held = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    same = held.get("sources") == list(sources) and not _record.changed_files(held)
    return list(held["cases"]) if same else []


def keep(
    path: Path | None,
    sources: Sequence[str],
    device: str,
    rounds: int,
    cases: list[dict[str, Any]],
    packages: Sequence[str] = (),
) -> None:
    """Write the record; ``packages`` are those whose versions matter besides torch and Triton."""
    if path:
        name = torch.cuda.get_device_name() if device == "cuda" else ""
        packages = [*packages, *(["triton"] if name else [])]
        _record.write(path, _record.record(sources, packages, name, rounds=rounds, cases=cases))


def arguments(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="record, kept up to date after each case")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="cases with this regular expression in their name")
    return parser


def main() -> None:
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    run(cases(), SOURCES, "cpu", args.rounds, args.json, args.only)


if __name__ == "__main__":
    main()
