"""What the benchmark of slidesparse on a GPU measures with: operands, clocks, algorithms; failures cost one row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.dispatch import tuned_choices
from shiplap.tuning.measure import CudaClock, RacePlan, race_runs
from shiplap_slidesparse.lt import kernels, tuning

FP8, INT8, BF16, CUDA = torch.float8_e4m3fn, torch.int8, torch.bfloat16, "cuda"
Run = Callable[[], Any]


def values(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    if dtype == INT8:
        return torch.randint(-127, 128, (rows, k), device=CUDA, dtype=INT8)
    return torch.randn(rows, k, device=CUDA, dtype=BF16).to(dtype)


def two_of_four(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Random, with two non-zeros in each four: what a slid weight is as well."""
    ways = torch.tensor([3, 5, 6, 9, 10, 12], device=CUDA)[:, None] >> torch.arange(4, device=CUDA) & 1
    kept = ways.to(INT8)[torch.randint(0, 6, (n, k // 4), device=CUDA)].view(n, k)
    return values(n, k, INT8) * kept if dtype == INT8 else (values(n, k, BF16) * kept).to(dtype)


def show(section: str, row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps({"section": section, **row}), flush=True)
    return row


FAILED: list[str] = []  # the exit status says that there were some


def failed(what: str, e: Exception, missing: bool = False) -> str:
    """Tell it and go on; what is ``missing`` is no failure of ours. An error that the device keeps ends the run."""
    text = f"{type(e).__name__}: {getattr(e, 'got', '') or str(e)}".splitlines()[0][:200]
    print(f"# {what}: {text}", flush=True)
    if not missing:
        FAILED.append(f"{what}: {text}")
    torch.cuda.synchronize()
    return text


def put(runs: dict[str, Run], name: str, make: Callable[[], Run], missing: bool = False) -> None:
    """``make()`` under ``name``, unless it cannot be had."""
    try:
        runs[name] = make()
    except Exception as e:
        failed(name, e, missing)


def over(us: dict[str, float], base: str, other: str, digits: int = 3) -> float | None:
    return round(us[base] / us[other], digits) if base in us and other in us else None


def timed(runs: dict[str, Run], seconds: float = 0.6) -> dict[str, float]:
    """Medians in microseconds of captured runs; what cannot run is left out, with its reason."""
    ready: dict[str, Run] = {}
    clock = CudaClock(CUDA, "always")  # holds its graphs, and their memory, until it goes
    for name, run in runs.items():
        put(ready, name, lambda run=run: clock.ready(run), missing=name.startswith("torch"))
    timed = race_runs(
        dict(enumerate(ready.values())), clock, RacePlan(rounds=40, least=5, seconds=seconds, hopeless=1e9)
    )
    return {name: round(timed[i].median * 1e6, 2) for i, name in enumerate(ready) if i in timed}


# --- choosing algorithms ----------------------------------------------------------------------------------------------


@cache
def _clock() -> CudaClock:
    """Launches wait in the queue behind flushes of the L2: the host's part of a call is not timed."""
    return CudaClock(CUDA, "never")


def quick(run: Run, samples: int = 3) -> float:
    """The best of some, in seconds."""
    run()
    return min(_clock().sample(run, 1) for _ in range(samples))


TRIED: dict[str, int] = {}  # how many algorithms and splits, by product
_picked: dict[tuple[sl.Op, int, int, int], dict[str, int]] = {}


def with_config(op: sl.Op, args: tuple[Any, ...], config: dict[str, int] | None = None) -> Run:
    """A call of the vendor's kernel with this config; without one, with the library's own choice."""
    kernel, call = next(k for k in op.kernels[CUDA] if k.name == "lt"), op.bind(args)
    run = kernel.variant(Config.of(config) if config else kernel.space.default(call.env)).run
    return lambda: run(call)


def chosen(op: sl.Op, args: tuple[Any, ...], m: int, n: int, k: int) -> dict[str, int]:
    """The fastest algorithm of a leaf product, put into force for its bucket; ValueError if there is none.

    All that the library makes a plan of are tried, then splits of k with the four fastest.
    """
    if (op, m, n, k) in _picked:
        return _picked[op, m, n, k]
    ranked: list[tuple[float, dict[str, int]]] = []
    problem, stream = tuning.problem_of(op, 0, m, n, k), torch.cuda.current_stream().cuda_stream

    def rank(config: dict[str, int]) -> None:
        try:
            ranked.append((quick(with_config(op, args, config)), config))
        except (sl.ShiplapError, RuntimeError) as e:
            failed(f"{op.spec.opname} {m} x {n} x {k} {config}", e)

    default = kernels.DEFAULT if op in kernels.SPARSE else {"ALG": -1}
    for config in (default, *tuning.list_algorithms(op, problem, stream, splits=(0,))):
        rank(config)
    ranked.sort(key=lambda pair: pair[0])
    if op in kernels.SPARSE:
        for _, config in ranked[:4]:
            for split in tuning.SPLITS if config["ALG"] >= 0 else ():
                if tuning.accepts_config(op, problem, {**config, "SPLIT_K": split}, stream):
                    rank({**config, "SPLIT_K": split})
    if not ranked:
        raise ValueError(f"no algorithm of {op.spec.opname} for {m} x {n} x {k}")
    ranked.sort(key=lambda pair: pair[0])
    finals = [(quick(with_config(op, args, config), 9), config) for _, config in ranked[:3]]
    best = _picked[op, m, n, k] = min(finals, key=lambda pair: pair[0])[1]
    TRIED[f"{op.spec.opname} {m} x {n} x {k}"] = len(ranked)
    key = (CUDA, *op.rule.key(op.bind(args)))
    tuned_choices.install_choice_entries(
        [tuned_choices.ChoiceEntry(op.spec.name, op.identity, key, "lt", Config.of(best))]
    )
    return best


def wall(runs: dict[str, Run], rounds: int = 15, slice_ms: float = 4.0) -> dict[str, float]:
    """Microseconds from call to call, the medians of rounds that take turns and last ``slice_ms`` or 20 calls each."""
    samples: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for name, run in list(runs.items()):
        try:
            for _ in range(40):  # attaches the native binding
                run()
            torch.cuda.synchronize()
            calls[name] = max(20, int(slice_ms * 20 / _spent(run, 20)[0]))
            samples[name] = []
        except Exception as e:
            failed(name, e, missing=name.startswith("torch"))
            del runs[name]
    for _ in range(rounds):
        for name, run in runs.items():
            call, host = _spent(run, calls[name])
            samples[name].append(call / calls[name] * 1e3)
            samples.setdefault(f"{name}, host", []).append(host / calls[name] * 1e3)
    return {name: round(median(values), 2) for name, values in samples.items()}


def _spent(run: Run, calls: int) -> tuple[float, float]:
    """Milliseconds of so many calls, and those after which the last one had been issued."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3, (issued - started) * 1e3


# --- what the issue asks for ------------------------------------------------------------------------------------------


def goals(measured: dict[str, Any]) -> dict[str, Any]:
    """The goals, each with what was measured, by size; nothing of sections that are not there yet."""
    gemm = [r for r in measured.get("gemm", ()) if r["m"] >= 4096]
    results: dict[str, Any] = {
        "a 2:4 call over _scaled_mm's, at most 1.2": _by("m", measured.get("overhead"), "2:4 call over _scaled_mm"),
        "torch's sparse call over ours, over 10": _by("m", measured.get("overhead"), "torch sparse call over ours"),
        "quantise + lift of copy bandwidth, at least 0.8": _by(
            ("pairs", "m", "k"), measured.get("activations"), "of copy bandwidth"
        ),
        "the same, untuned": _by(("pairs", "m", "k"), measured.get("activations"), "default of copy bandwidth"),
    }
    for name, goal in (
        ("fp8 2:4", "at least 1.5"),
        ("int8 2:4", "at least 2.0"),
        ("int8 6:8", "at least 1.3"),
        ("fp8 6:8", "what is true"),
    ):
        results[f"{name} over torch's fastest dense, m >= 4096, {goal}"] = _by(
            ("m", "n", "k"), gemm, f"{name} over dense"
        )
    for name in ("fp8 2:4 over torch sparse", "int8 2:4 over torch sparse", "fp8 2:4 tflops"):  # the library's ceiling
        results[name] = _by(("m", "n", "k"), gemm, name)
    results["blocks: fastest"] = _by(("model", "rows"), measured.get("blocks"), "fastest")
    results["blocks: fastest over bf16"] = _by(("model", "rows"), measured.get("blocks"), "fastest over bf16")
    return {name: values for name, values in results.items() if values}


def _by(names: str | tuple[str, ...], rows: list[dict[str, Any]] | None, value: str) -> dict[str, Any]:
    parts = (names,) if isinstance(names, str) else names
    return {" x ".join(str(r[p]) for p in parts): r[value] for r in rows or () if r.get(value) is not None}
