"""``shiplap judge`` on a GPU: honest kernels at real sizes are accepted with true times, and cheats are refused.

Usage: ``python benchmarks/judge_gpu.py [--seconds 60] [--jobs 4]``, some fifteen minutes on one GPU. One JSON line a
kernel, with the time of each stage; exit status 1 if an honest kernel is refused, a cheat accepted, or a time of 50 us
or more differs by more than 5 % from do_bench's. Shorter calls are shown beside it. do_bench begins each call with
caches full of values that have to be written back, its own events take some microseconds, and it times a slow launch.
Its times with caches that were filled by reads and a busy device (``--clean``), and of a kernel of one element, show
how much that is. ``--part 2/8`` judges every eighth kernel, beginning with the third, and ``--only`` those of a name.
``--jobs`` judgements load, compile and check side by side in threads; times are measured alone. Cheats are judged side
by side. ``--turns`` names a folder by which processes of this script, each with a part, take turns in the same way. The
threads of one process hinder each other more, since the judge itself is written in Python.
Each begins in a launcher that has started and has imported what the candidates import of torch and Triton, as in a
service that judges one candidate after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _judged_kernels import CAP, KERNELS, PRODUCT, SLOW_TO_COMPILE, WRONG

import shiplap as sl
from shiplap.judge import JudgeResult
from shiplap.judge.library_imports import library_modules
from shiplap.judge.suite_run import TimingTurns
from shiplap.sandbox.load_candidate import load_named
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap.torch_private.dynamo import VECTOR_MODULE

ROOT = Path(__file__).resolve().parent.parent
TRITON = """import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
F = torch.nn.functional
"""
DEVICE = "cuda"
LONG = 50e-6  # seconds of a kernel whose time is compared with do_bench's
REPEATS = 3  # measurements of do_bench
SLEPT_CYCLES = 400_000  # of a GPU, a fifth of a millisecond

FORGED = {  # cheats on the memory that is shared, the gate and the clock
    "one stale row": """
def candidate(x, w):
    out = torch.empty(x.shape[0], w.shape[1], device=x.device)
    out[1:] = honest(x, w)[1:]
    return out
""",
    "last values": """
KEPT = []
def candidate(x, w):
    out = honest(x, w)
    KEPT.append(out)
    return KEPT[-2] if len(KEPT) > 1 and KEPT[-2].shape == out.shape else out
""",
    "result in an argument": """
def candidate(x, w):
    return x.copy_(honest(x, w)) if x.shape[1] == w.shape[1] else w.view(-1)[: 1].expand(x.shape[0], w.shape[1])
""",
    "no waiting for the gate": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    with torch.cuda.stream(SIDE[0]):
        out = honest(x, w)
    return out
""",
    "half now and half later": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    out = honest(x, w)
    half, out[::2] = out[::2].clone(), 0
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(400_000)
        out[::2] = half
    return out
""",
}
STREAMS = {
    "unjoined stream": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    out = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(2_000_000)
        out.copy_(honest(x, w))
    return out
""",
    "late stream": """
def candidate(x, w):
    side = torch.cuda.Stream()
    result = honest(x, w)
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
    return result
""",
    "stream that is soon done": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream()]
    out = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(60_000)
        out.copy_(honest(x, w))
    return out
""",
    "stream that stays current": """
SIDE = []
def candidate(x, w):
    SIDE[:] = SIDE or [torch.cuda.Stream(), torch.cuda.Stream()]
    with torch.cuda.stream(SIDE[0]):
        torch.cuda._sleep(60_000)
        out = honest(x, w)
    torch.cuda.set_stream(SIDE[1])
    return out
""",
    "method that computes": """
def candidate(x, w):
    out = torch.empty(x.shape[0], w.shape[1], device=x.device)
    def compute(*args, **kwargs):
        out.copy_(honest(x, w))
        return torch.Tensor.detach(out)
    out.detach = out.cpu = compute
    return out
""",
    "finalizer of an argument": """
import weakref
def candidate(x, w):
    out, same = x.new_empty(x.shape[0], w.shape[1]), x.detach()
    weakref.finalize(x, lambda: out.copy_(honest(same, w)))
    return out
""",
    "finalizer in a circle": """
import gc
def candidate(x, w):
    out = x.new_empty(x.shape[0], w.shape[1])
    class Later:
        def __del__(self):
            out.copy_(honest(x, w))
    later = Later()
    later.me = later
    for _ in range(max(0, gc.get_threshold()[0] - gc.get_count()[0] - 40)):
        LEFT.append([])
    return out
LEFT = []
""",
    "clock of events": """
torch.cuda.Event.elapsed_time = lambda self, end: 0.0021
def candidate(x, w):
    torch.cuda._sleep(100_000)
    return honest(x, w)
""",
    "mode that comes and goes": """
from torch.utils._python_dispatch import TorchDispatchMode
SEEN = {}
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dim() == 2:
            SEEN.setdefault("args", []).append(out)
        elif func is torch.ops.aten.fill_.Scalar and len(SEEN.get("args", ())) == 2:
            SEEN["out"] = honest(*SEEN.pop("args"))
        return out
MODE = Mode()
def candidate(x, w):
    if torch.utils._python_dispatch._get_current_dispatch_mode() is MODE:
        MODE.__exit__(None, None, None)
    out = SEEN.pop("out", None)
    out = honest(x, w) if out is None or out.shape != (x.shape[0], w.shape[1]) else out
    SEEN.clear()
    MODE.__enter__()
    return out
""",
    "signals that come and go": """
import signal
def look(number, frame):
    pass
def candidate(x, w):
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    out = honest(x, w)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    return out
""",
    "thread that comes and goes": """
import threading, time
STOP = []
def run():
    while not STOP:
        time.sleep(0.0002)
def candidate(x, w):
    STOP.append(1)
    out = honest(x, w)
    STOP.clear()
    threading.Thread(target=run, daemon=True).start()
    return out
""",
    "shared memory over the limit": PRODUCT.replace("BM=64, BN=64, BK=32", "BM=256, BN=256, BK=256"),
}


def cases() -> Iterator[tuple[str, str, str, bool]]:
    """Name, source of the reference, source of the candidate, and whether it is honest."""
    for name, (args, inputs, body, candidate) in (KERNELS | SLOW_TO_COMPILE | WRONG).items():
        triton = TRITON if "@triton" in candidate else "import torch\n"
        yield name, _reference(args, inputs, body), triton + candidate, name not in WRONG
    sys.path.insert(0, str(ROOT / "packages" / "shiplap"))
    from tests.judge.cheats import CHEATS, HEAD
    from tests.judge.fifth import HIDDEN, REPLACED, STATE
    from tests.judge.fresh import FRESH
    from tests.judge.unseen import UNSEEN

    capped = _reference("x, w", "torch.rand(96, 128) / 4, torch.rand(128, 64) / 4", CAP)
    written = CHEATS | UNSEEN | FRESH | REPLACED | STATE | HIDDEN
    # Memory of the host in a result would be refused at once.
    on_device = {n: c for n, c in written.items() if not re.search(r"numpy|torch\.empty\(|zeros\(|CPU|cpu", c)}
    for name, text in on_device.items():
        yield f"cheat: {name}", capped, HEAD + text, False
    for name, text in (STREAMS | FORGED).items():
        yield f"cheat: {name}", capped, TRITON + HEAD + text, False


def _reference(args: str, inputs: str, body: str) -> str:
    """Return the source of a reference and of the function that makes its inputs."""
    inner = f"def reference({args}):\n    return {body}\ndef get_inputs():\n    return [{inputs}]\n"
    return f"import torch\nD = {DEVICE!r}\n{inner}"


def _by_do_bench(reference: Path, candidate: Path, name: str = "candidate", *, clean: bool = False) -> list[float]:
    """Return the seconds of one call of an honest candidate, in this process: several medians, which differ by some
    percent. If ``clean`` is true, the caches are emptied by reads, so that no call has to write back what it evicts,
    and the device is busy before each call for longer than the host takes to launch it.
    """
    from triton.testing import do_bench

    args = [a.cuda() for a in load_named(str(reference), ["get_inputs"])()]
    kernel = load_named(str(candidate), [name])
    with torch.no_grad(), _caches_emptied_by_reads() if clean else nullcontext():
        return sorted(float(do_bench(lambda: kernel(*args), return_mode="median")) * 1e-3 for _ in range(REPEATS))


@contextmanager
def _caches_emptied_by_reads() -> Iterator[None]:
    """Make do_bench empty the caches by reads instead of writes, and let the device sleep a while behind them. A call
    that the host launches slowly would otherwise be timed with its launch.
    """
    from triton.runtime import driver

    driver.active.clear_cache = lambda cache: (torch.amax(cache), torch.cuda._sleep(SLEPT_CYCLES))
    try:
        yield
    finally:
        del driver.active.clear_cache


def _do_bench_of_nothing() -> float:
    """Return the seconds that do_bench measures for a kernel of one element."""
    from triton.testing import do_bench

    one = torch.zeros(1, device=DEVICE)
    return float(do_bench(lambda: one.add_(1), return_mode="median")) * 1e-3


def _line(
    name: str, result: JudgeResult, honest: bool, peers: list[float], references: list[float], clean: list[float]
) -> dict[str, Any]:
    """Return the facts of one verdict, beside the seconds of candidate and reference by do_bench, if there are some.
    ``clean`` are those of the candidate with caches that were emptied by reads.
    """
    timed, peer = result.timings[0].candidate if result.timings else 0.0, median(peers)
    like = median(clean) or peer
    off = abs(timed / like - 1) if like > LONG and timed else 0.0
    right = result.verdict != "refused" and off <= 0.05 if honest else result.verdict == "refused"
    return {
        "kernel": name,
        "honest": honest,
        "right": right,
        "verdict": result.verdict,
        "reasons": [f"{r.check}: {r.evidence}"[:160] for r in result.reasons],
        "missing": dict(result.missing),
        "unchecked": [text for text in result.unchecked if "times" in text],
        "seconds": round(result.seconds, 1),
        "stages": {s.stage: [round(s.seconds, 2), round(s.sandboxed, 2)] for s in result.stages},
        "calls": result.calls,
        "speedup": round(result.speedup, 3),
        "min_speedup": round(result.timings[0].min_speedup, 3) if result.timings else 0.0,
        "do_bench_speedup": round(median(references) / peer, 3) if peer else 0.0,
        "batch": [(t.batch, t.queued) for t in result.timings],
        "resolution_us": [round(t.resolution * 1e6, 2) for t in result.timings],
        "reference_us": [round(t.reference * 1e6, 1) for t in result.timings],
        "speedups": [(round(t.speedup, 3), round(t.min_speedup, 3)) for t in result.timings],
        "us_of_forms": [round(t.candidate * 1e6, 2) for t in result.timings],
        "inputs": [t.input for t in result.timings],
        "clean_us": round(median(clean) * 1e6, 2),
        "us": round(timed * 1e6, 2),
        "do_bench_us": round(peer * 1e6, 2),
        "do_bench_us_from_to": [round(peers[0] * 1e6, 2), round(peers[-1] * 1e6, 2)],
    }


def _judge(
    case: tuple[str, str, str, bool], home: Path, asked: argparse.Namespace, turns: TimingTurns | SharedTurns
) -> bool:
    """Judge one case in the folder ``home``, print its line, and return whether the verdict is right."""
    name, reference, candidate, honest = case
    ref, it = home / "ref.py", home / "candidate" / f"it{home.name}.py"
    it.parent.mkdir(parents=True)
    ref.write_text(reference)
    it.write_text(candidate)
    options: dict[str, Any] = {"device": DEVICE, "seconds": asked.seconds, "rounds": asked.rounds}
    peers, references, clean = [0.0], [0.0], [0.0]
    with turns.judgement() as turn, _launcher() as launcher:
        # Cheats are refused for other reasons than their times.
        options |= {"vary_shapes": not asked.fixed_shapes, "launcher": launcher}
        options |= {"turn": turn} if honest else {}
        result = sl.judge(ref, it, **options)
        if honest and not re.search(asked.alone, name):
            turn(True)  # a judgement that ended early has not waited for it
            peers, references = _by_do_bench(ref, it), _by_do_bench(ref, ref, "reference")
            clean = _by_do_bench(ref, it, clean=True) if asked.clean else clean
    line = _line(name, result, honest, peers, references, clean)
    line |= {"jobs": asked.jobs, "beside_other_processes": asked.turns is not None}
    print(json.dumps(line), flush=True)
    return bool(line["right"])


_FREE: list[SandboxLauncher] = []


@contextmanager
def _launcher() -> Iterator[SandboxLauncher]:
    """Return a launcher that no other judgement uses meanwhile, and that another has used before if there is one."""
    launcher = _FREE.pop() if _FREE else SandboxLauncher()
    try:
        yield launcher
    finally:
        _FREE.append(launcher)


def _warm_launchers(wanted: list[tuple[str, str, str, bool]], count: int) -> list[SandboxLauncher]:
    """Return launchers that have imported the modules of torch and Triton that candidates among ``wanted`` import. This
    process makes its first gradient on the GPU meanwhile.
    """
    launchers, began = [SandboxLauncher() for _ in range(count)], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sources = [Path(folder, f"it{number}.py") for number in range(len(wanted))]
        for source, case in zip(sources, wanted, strict=True):
            source.write_text(case[2])
        modules = sorted({m for source in sources for m in library_modules(str(source))} - {VECTOR_MODULE})
    with ThreadPoolExecutor(count) as pool:
        warmed = [pool.submit(launcher.import_libraries, modules) for launcher in launchers]
        x = torch.randn(64, 64, device=DEVICE, requires_grad=True)
        torch.autograd.grad(x @ x, x, torch.ones_like(x))  # torch imports sympy for a given gradient of a result
        for each in warmed:
            each.result()
    started = {"seconds_of_the_start": round(time.monotonic() - began, 1), "modules": modules}
    print(json.dumps({**started, "not_imported": sorted(launchers[0].harmful)}), flush=True)
    return launchers


class SharedTurns:
    """Turns as of ``TimingTurns`` for judgements in several processes, each of which makes one at a time."""

    def __init__(self, folder: Path) -> None:
        """Open the files in ``folder`` that the processes lock."""
        folder.mkdir(parents=True, exist_ok=True)
        self._queue, self._steps = ((folder / name).open("w") for name in ("queue", "steps"))

    @contextmanager
    def judgement(self) -> Iterator[Callable[[bool], None]]:
        """Return a context manager for one judgement, with the function ``wait_turn`` of ``TimingTurns.judgement``."""
        alone = False

        def wait_turn(times: bool) -> None:
            """Wait until this judgement may make its next step, which measures times if ``times`` is true."""
            nonlocal alone
            if not alone:
                fcntl.flock(self._steps, fcntl.LOCK_UN)
                self._lock(fcntl.LOCK_EX if times else fcntl.LOCK_SH)
                alone = times

        self._lock(fcntl.LOCK_SH)
        try:
            yield wait_turn
        finally:
            fcntl.flock(self._steps, fcntl.LOCK_UN)

    def _lock(self, how: int) -> None:
        """Lock the steps for this process, for several or for one. Who waits for that keeps others from beginning."""
        fcntl.flock(self._queue, how)
        fcntl.flock(self._steps, how)
        fcntl.flock(self._queue, fcntl.LOCK_UN)


def _asked() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of one verdict")
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    parser.add_argument("--fixed-shapes", action="store_true", help="for a quick look at times")
    parser.add_argument("--rounds", type=int, default=12, help="calls that are timed")
    parser.add_argument("--only", default="", help="kernels in whose name this regular expression is found")
    parser.add_argument("--skip", default="^$", help="kernels that are left out, as a regular expression")
    parser.add_argument("--alone", default="^$", help="kernels that do_bench does not time, as a regular expression")
    parser.add_argument("--clean", action="store_true", help="do_bench also with caches that were emptied by reads")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which no other kernel begins")
    parser.add_argument("--jobs", type=int, default=1, help="candidates that compile at once")
    parser.add_argument("--turns", type=Path, help="a folder by which other processes of this script take turns")
    return parser.parse_args()


def main() -> int:
    """Judge all; see the module."""
    asked = _asked()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    if not asked.only.startswith("^cheat"):
        print(json.dumps({"do_bench_us_of_one_element": round(_do_bench_of_nothing() * 1e6, 2)}), flush=True)
    part, parts = map(int, asked.part.split("/"))
    wanted = [c for c in cases() if re.search(asked.only, c[0]) and not re.search(asked.skip, c[0])][part::parts]
    for module in {
        line.split()[1] for case in wanted for line in case[2].splitlines() if line.startswith("from liger")
    }:
        importlib.import_module(module)  # it takes seconds, which would count for another judgement
    _FREE.extend(_warm_launchers(wanted, asked.jobs))
    if asked.turns is not None and asked.jobs > 1:
        raise SystemExit("--turns is for processes that judge one candidate at a time")
    began, turns = time.monotonic(), TimingTurns() if asked.turns is None else SharedTurns(asked.turns)

    def judge(number: int) -> bool:
        """Judge the case ``number`` if there is time for it, and return whether its verdict is right."""
        if time.monotonic() - began > asked.until:
            return True
        return _judge(wanted[number], Path(folder, str(number)), asked, turns)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        right = list(pool.map(judge, range(len(wanted))))
        for launcher in _FREE:
            launcher.close()
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
