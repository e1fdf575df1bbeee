"""What a call costs in this checkout, and what it cost in another one: ``python benchmarks/between.py COMMIT``.

Both are loaded in processes of their own, this checkout twice: the second one is the control. They take turns on one
core, a few milliseconds each, for many rounds, and the order of the three is another one in each round. Times are CPU
time of the thread that calls. Of each process the least time of a row counts, since what else the machine does only
adds. ``control`` is this checkout against itself, and ``--at-most 1.05`` fails where a row is slower by more than that.

Rows: an op of two small tensors with a C kernel, by its native binding, in inference mode, by its Python binding, with
an optional tensor and scalars, and where a gradient is asked for; and what one more op adds to a compiled chain.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
import shiplap_headers
from shiplap.kernels.c.header import prototype_signature
from shiplap.kernels.native import binding

ROOT = Path(__file__).parent.parent
SHORT, LONG = 2, 18  # ops in a compiled chain: the difference pays for nothing but ops
SLICE = 0.004  # seconds of one row in one turn
KERNEL = """
#include "shiplap/abi.h"
SL_EXPORT int add(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + ((float*)y->data)[i];
  return SL_OK;
}
SL_EXPORT int more(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out, int64_t k, double p) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + k * p;
  return SL_OK;
}
"""


def rows() -> dict[str, Callable[[], Any]]:
    """What is timed, in a process that has one of the checkouts on its path."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    include = Path(shiplap_headers.__file__).parent / "include"

    def library(name: str, symbol: str, op: Any) -> Path:  # one for each op: those of one library are bound together
        made, source = folder / f"lib{name}.so", folder / f"{name}.c"
        stamp = f'SL_EXPORT const char* {symbol}_signature(void) {{ return "{prototype_signature(op.spec)}"; }}'
        source.write_text(f"{KERNEL}{stamp}\n")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", f"-I{include}", "-o", made, source], check=True)
        return made

    def declared(name: str) -> Any:
        @sl.op(f"between_{name}::add")
        def add(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
            return x + y

        add.kernel("cpu", sl.cabi(library(name, "add", add), "add"))
        return add

    fast, slow, trained = declared("native"), declared("python"), declared("trained")

    @sl.op("between_more::more")
    def more(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"] | None, k: int, p: float = 0.5) -> Float32[Tensor, "n"]:
        return x + k * p

    more.kernel("cpu", sl.cabi(library("more", "more", more), "more"))

    @trained.backward(saves=())
    def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
        return {"x": grad, "y": grad}

    x, y = torch.randn(4), torch.randn(4)
    os.environ["SHIPLAP_NATIVE"] = "0"
    slow(x, y)
    del os.environ["SHIPLAP_NATIVE"]
    for op in (fast, more, trained):
        binding.build(op)
    leaf = x.clone().requires_grad_()

    def unrecorded() -> Tensor:
        with torch.inference_mode():
            return fast(x, y)

    calls: dict[str, Callable[[], Any]] = {
        "native": lambda: fast(x, y),
        "native, inference mode": unrecorded,
        "native, optional and scalars": lambda: more(x, None, 3, p=2.0),
        "native, forward of a gradient": lambda: trained(leaf, y),
        "python binding": lambda: slow(x, y),
    }
    for length in (SHORT, LONG):
        scope: dict[str, Any] = {"op": fast}
        exec("def run(x, y):\n" + "    x = op(x, y)\n" * length + "    return x", scope)
        compiled = torch.compile(scope["run"], fullgraph=True, dynamic=False)
        compiled(x, y)
        calls[f"compiled/{length}"] = lambda c=compiled: c(x, y)
    return calls


def work() -> None:
    """Time one row for each line on stdin, until there is none."""
    calls = rows()
    repeats = {}
    for name, call in calls.items():
        start = time.perf_counter()
        for _ in range(200):
            call()
        repeats[name] = max(5, int(SLICE / ((time.perf_counter() - start) / 200)))
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        call, repeat = calls[json.loads(line)], range(repeats[json.loads(line)])
        for _ in range(5):
            call()
        start = time.thread_time_ns()
        for _ in repeat:
            call()
        print((time.thread_time_ns() - start) / len(repeat), flush=True)


@contextmanager
def worker(checkout: Path, cache: Path, core: int) -> Iterator[Callable[[Any], Any]]:
    """A process with the packages of ``checkout``: a function that asks it for the time of a row."""
    path = ":".join(map(str, sorted(checkout.glob("packages/*/src"))))
    cache.mkdir(mode=0o700)
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "SHIPLAP_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "i"),
    }
    command = [sys.executable, "-W", "ignore", __file__, "--work"]
    with subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.sched_setaffinity(process.pid, {core})
        ask, answers = process.stdin, process.stdout

        def time_of(row: Any) -> Any:
            if row is not None:
                print(json.dumps(row), file=ask, flush=True)
            return json.loads(answers.readline())

        try:
            yield time_of
        finally:
            ask.close()


def least(times: dict[str, list[float]]) -> dict[str, float]:
    """The least time of each row; of the compiled chains what one op adds."""
    found = {name: min(values) for name, values in times.items()}
    short, long = found.pop(f"compiled/{SHORT}"), found.pop(f"compiled/{LONG}")
    return {**found, "compiled": (long - short) / (LONG - SHORT)}


def compare(commit: str, rounds: int, core: int) -> dict[str, Any]:
    """The least ns of each row, before, now, and now once more."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        before = Path(home) / "before"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", before, commit], check=True)
        stack.callback(subprocess.run, ["git", "-C", ROOT, "worktree", "remove", "--force", before], check=False)
        sources = {"before": before, "now": ROOT, "again": ROOT}
        asks = {n: stack.enter_context(worker(s, Path(home) / f"cache-{n}", core)) for n, s in sources.items()}
        names = [ask(None) for ask in asks.values()][-1]  # each says what it times when it is ready
        times: dict[str, dict[str, list[float]]] = {n: {row: [] for row in names} for n in asks}
        for number in range(rounds):
            order = list(asks)[number % 3 :] + list(asks)[: number % 3]
            for row in names:
                for name in order:
                    times[name][row].append(asks[name](row))
    return {name: least(of) for name, of in times.items()}


def main() -> None:
    """Compare, print a table or JSON; exit status 1 beyond ``--at-most``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--core", type=int, default=0, help="the core on which all take turns")
    parser.add_argument("--at-most", type=float, default=0.0, metavar="RATIO", help="fail where a row is slower")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return
    if not options.commit:
        parser.error("name a commit to compare with")
    ns = compare(options.commit, options.rounds, options.core)
    ratios = {row: round(min(ns["now"][row], ns["again"][row]) / ns["before"][row], 3) for row in ns["now"]}
    control = {row: round(ns["again"][row] / ns["now"][row], 3) for row in ns["now"]}
    if options.json:
        print(json.dumps({"ns": ns, "ratios": ratios, "control": control, "load_average": os.getloadavg()[0]}))
    else:
        print(f"{'least ns per call':32}{'before':>10}{'now':>10}{'ratio':>8}{'control':>9}")
        for row, ratio in ratios.items():
            print(f"{row:32}{ns['before'][row]:10,.0f}{ns['now'][row]:10,.0f}{ratio:8.3f}{control[row]:9.3f}")
    slower = [row for row, ratio in ratios.items() if options.at_most and ratio > options.at_most]
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
