"""Whether a fused case loses to max-autotune, or whether max-autotune differs as much from itself.

Both sides of a case of ``dense_gpu`` are compiled ``--times`` each, in turns, from empty caches (Inductor's, Triton's
and the choices of Shiplap), in one process that nothing runs beside. Each program is captured in a CUDA graph, and all
of them are raced together, as in ``dense_gpu``. Told are the median of each program, what Inductor's search timed and
picked in it, the configs of its pointwise kernels, and how long each kernel runs.

``ratio`` is the median of max-autotune's programs over that of ours, ``best`` the fastest over the fastest, and
``chance`` how likely so large a sum of ranks of ours is if both sides are draws of the same thing. A case is lost where
``ratio`` is below 0.99 and ``chance`` below 0.05.

    python benchmarks/dense_anew_gpu.py [CASE ...] [--times 6] [--json benchmarks/results/dense_anew_gpu.json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from _record import record, write
from dense_gpu import MODE, RACES, SLOWER, Fn, cases, compiled, errors
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

from shiplap.inductor import fusion_choices
from shiplap.tuning.measure import CudaClock, RacePlan, race_runs

SOURCES = [
    "benchmarks/dense_anew_gpu.py",
    "benchmarks/dense_gpu.py",  # its cases
    "packages/shiplap-dense/src/shiplap_dense/*.triton.jinja",
    "packages/shiplap-dense/src/shiplap_dense/cuda.py",
    "packages/shiplap/src/shiplap/inductor/select_candidate.py",
    "packages/shiplap/src/shiplap/inductor/pytorch_candidate.py",
    "packages/shiplap/src/shiplap/tuning/measure.py",
]
CASE = "conv 256->256 3x3/1 at 14"
SHOWN = 4  # of what a search timed
Found = dict[str, list[Any]]


@contextmanager
def searched() -> Iterator[Found]:
    """What Inductor searches meanwhile: the best choices of each product, and the config of each pointwise kernel."""
    found: Found = {"choices": [], "configs": []}
    selecting = import_module("torch._inductor.select_algorithm").AlgorithmSelectorCache
    choose, settle = selecting.benchmark_choices, CachingAutotuner.coordinate_descent_tuning

    def benchmark_choices(*args: Any, **named: Any) -> Any:
        timings = choose(*args, **named)
        ranked = sorted(timings.items(), key=lambda item: item[1])
        found["choices"].append({str(getattr(c, "name", c)): round(ms * 1e3, 2) for c, ms in ranked[:SHOWN]})
        return timings

    def coordinate_descent_tuning(tuner: Any, launcher: Any, *args: Any, **named: Any) -> Any:
        best = settle(tuner, launcher, *args, **named)
        told = f"{tuner.fn.__name__}: {launcher.config} -> {best.config}"
        if "_poi_" in told and told not in found["configs"]:  # told at each call
            found["configs"].append(told)
        return best

    selecting.benchmark_choices = staticmethod(benchmark_choices)
    CachingAutotuner.coordinate_descent_tuning = coordinate_descent_tuning
    try:
        yield found
    finally:
        selecting.benchmark_choices, CachingAutotuner.coordinate_descent_tuning = choose, settle


def anew(fn: Fn, args: tuple[Tensor, ...], clock: CudaClock, folder: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """``fn`` compiled where no cache holds anything of an earlier compilation, and what was searched for it."""
    os.environ["SHIPLAP_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
    with fresh_cache(dir=folder, delete=False), searched() as found:  # processes that compile still have it open
        run, seconds = compiled(fn, args, clock)
    return run, {"compile_s": round(seconds, 2), **found}


def kernels(run: Callable[[], Any], clock: CudaClock) -> dict[str, float]:
    """Microseconds of each kernel of ``run``, the L2 cache flushed before each run."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        clock.sample(run, 30)
    times: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        name = event.name[:100]
        if event.device_type == torch.autograd.DeviceType.CUDA and not any(o in name for o in ("Fill", "Memset")):
            times[name].append(event.device_time)
    return {name: round(median(ts), 2) for name, ts in times.items() if len(ts) >= 30}


def chance(ours: list[float], theirs: list[float]) -> float:
    """Of as large a sum of ranks of ``ours``, if which program is whose were drawn."""
    ranked = sorted([*ours, *theirs])
    ranks = {us: mean(i for i, other in enumerate(ranked) if other == us) for us in ranked}
    seen = sum(ranks[us] for us in ours)
    sums = [sum(drawn) for drawn in combinations([ranks[us] for us in ranked], len(ours))]
    return sum(total >= seen for total in sums) / len(sums)


def programs_of(
    plain: Fn, ours: Fn, args: tuple[Tensor, ...], op: Any, clock: CudaClock, given: argparse.Namespace
) -> tuple[dict[str, Callable[[], Any]], list[dict[str, Any]]]:
    """Both sides compiled in turns, as often as there is time: the captured programs by row, and what each is."""
    runs, programs, started = dict[str, Callable[[], Any]](), list[dict[str, Any]](), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number in range(1, given.times + 1):
            for side, fn in (("shiplap", ours), ("inductor", plain)):
                row = f"{side} {number}"
                runs[row], told = anew(fn, args, clock, folder)
                if side == "shiplap":
                    choice = fusion_choices(op.spec.name)[-1]
                    told |= {"chosen": choice.chosen, "reason": choice.reason}
                programs.append({"side": side, "row": row, **told})
            if (time.monotonic() - started) * (number + 1) / number > given.seconds:
                break
    return runs, programs


def measured(
    name: str, plain: Fn, ours: Fn, args: tuple[Tensor, ...], op: Any, given: argparse.Namespace
) -> dict[str, Any]:
    """All programs of a case, and whether ours are slower than those of max-autotune among each other."""
    clock = CudaClock("cuda")
    runs, programs = programs_of(plain, ours, args, op, clock, given)
    apart = errors(plain if "grouped" not in name else ours, args, runs)
    with torch.no_grad():
        plan = RacePlan(rounds=120, seconds=4.0, hopeless=1e9)
        races = [race_runs(dict(enumerate(runs.values())), clock, plan) for _ in range(RACES)]
    for i, program in enumerate(programs):
        halves = [round(times[i].median * 1e6, 2) for times in races]
        program |= {"us": round(mean(halves), 2), "races_us": halves, "error": apart[program["row"]]}
        with suppress(RuntimeError):  # no profiler
            program["kernels_us"] = kernels(runs[program["row"]], clock)
        print(json.dumps(program), flush=True)
    sides = {side: [p["us"] for p in programs if p["side"] == side] for side in ("shiplap", "inductor")}
    mine, theirs = sides["shiplap"], sides["inductor"]
    ratio, likely = median(theirs) / median(mine), chance(mine, theirs)
    return {
        "case": name,
        "us": sides,
        "ratio": round(ratio, 4),
        "best": round(min(theirs) / min(mine), 4),
        "spread of max-autotune": round(max(theirs) / min(theirs) - 1, 4),
        "spread of shiplap": round(max(mine) / min(mine) - 1, 4),
        "chance": round(likely, 4),
        "lost": ratio < SLOWER and likely < 0.05,
        "programs": programs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", default=[CASE], help="parts of names of cases of dense_gpu")
    parser.add_argument("--times", type=int, default=6, help="compilations of each side")
    parser.add_argument("--seconds", type=float, default=1e9, help="compile a case no longer than this")
    parser.add_argument("--json", type=Path)
    given, results = parser.parse_args(), list[dict[str, Any]]()
    for name, (make, shape) in cases(given.case):
        results.append(measured(name, *make(*shape), given))
        print(json.dumps({n: v for n, v in results[-1].items() if n != "programs"}), flush=True)
        if given.json:
            device = torch.cuda.get_device_name()
            write(given.json, record(SOURCES, ["triton"], device, mode=MODE, cases=results))


if __name__ == "__main__":
    main()
