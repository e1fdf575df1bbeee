"""Training with ``sl.triton`` ops, and packages of them, as text or with ``--json`` as one JSON object.

Checks first: forward and backward are launched by generated C++, without Python of a launch, on the current stream,
also in a CUDA graph; a package of AOTInductor carries the cubins and runs in a process without Shiplap; an op that
Python launches is refused. Then the host time of a warm call in ns: the forward, the forward that autograd records, and
forward and backward. Every row multiplies two vectors of 1024 floats with one ``@triton.jit`` function, whose gradient
is one more launch of it. Controls are the same op with its gradient as a function, and launched by Python; peers are
torch's ``triton_op``, an ``autograd.Function`` around Triton's own launch, and one around a C++ op written by hand.
``compiled_ns``: what one more op adds to forward and backward of a chain compiled by Inductor. Rounds of all rows are
interleaved, and so short that the host never waits for the GPU. ``--dry-run`` with ``TRITON_INTERPRET=1`` runs what can
run without a GPU, and measures nothing: it shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import overhead_gpu as shared
import triton_host_gpu as host
from _record import ROOT, record, write
from _train_rows import DEVICE, DRY, ROWS, SIZE, Function, both, inputs

import shiplap as sl
from shiplap.kernels.triton.specializations import LaunchedForm
from shiplap.packaging import package_model

SOURCES = [
    "benchmarks/triton_train_gpu.py",
    "benchmarks/_train_rows.py",
    *(f"benchmarks/triton_host_gpu.py::{name}" for name in ("compile_hand_written", "described", "rounds_of")),
    *(f"packages/shiplap/src/shiplap/kernels/triton/{name}.py" for name in ("kernel", "program", "specialize")),
    *(
        f"packages/shiplap/src/shiplap/{name}.py"
        for name in ("dispatch/autograd", "declare/gradient", "dispatch/autograd_function", "dispatch/fast_paths")
    ),
    "packages/shiplap/src/shiplap/torch_private/dispatcher_calls.py",
    "packages/shiplap/src/shiplap/codegen/templates/launcher.cpp.jinja",
    "packages/shiplap/src/shiplap/codegen/templates/native.cpp.jinja",
    "packages/shiplap-headers/src/shiplap_headers/include/shiplap/*.h",
]
SHORT, LONG = 2, 10
QUEUE = 256  # calls in flight, of two launches each
COMPILED = ("sl_triton", "triton_op")
PAIRS = {f"sl_triton / {other}": ("sl_triton", other) for other in ROWS if other != "sl_triton"}


def functions(folder: Path) -> tuple[dict[str, Function], dict[str, str]]:
    """What is measured, and why a row is missing."""
    contenders, missing = dict[str, Function](), dict[str, str]()
    x, y, grad = inputs()
    for name, make in ROWS.items():
        began = time.monotonic()
        try:
            function = make(folder)
            out, by_x = both(function, x, y, grad)
            if not (torch.equal(out, x * y) and torch.equal(by_x, grad * y)):
                raise shared.Missing("wrong values")
        except Exception as e:  # one row must not cost the others: it is shown as missing, with its reason
            missing[name] = shared.reason(e)
        else:
            contenders[name] = function
        print(f"{name}: {time.monotonic() - began:.1f} s {missing.get(name, '')}", file=sys.stderr, flush=True)
    return contenders, missing


# --- the checks -----------------------------------------------------------------------------------------------------


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """A warm call may not ask for a form."""

    def compile_again(self: LaunchedForm, *args: object) -> None:
        raise AssertionError("compiled again")

    kept, LaunchedForm.compile = LaunchedForm.compile, compile_again  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LaunchedForm.compile = kept  # type: ignore[method-assign]


def values(mul: Function) -> None:
    """Sizes, alignments and gradients of which Triton compiles forms of their own."""
    for n in (1, 16, 333, 4096):
        for start in (0, 1):
            x, y, grad = (torch.randn(n + 1, device=DEVICE)[start : n + start] for _ in range(3))
            x = x.detach().requires_grad_()
            for given in (grad, torch.ones((), device=DEVICE).expand(n)):
                out, by_x = both(mul, x, y, given)
                assert torch.equal(out, x * y), (n, start)
                assert torch.equal(by_x, given * y), (n, start)


def warm(mul: Function) -> None:
    """Of Python there is the generated function of the backward and the call of an op, and nothing of a launch."""
    x, y, grad = inputs()
    names: list[str] = []

    def seen(frame: Any, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("shiplap" in file or "bench_train" in file):
            names.append(frame.f_code.co_name)

    with torch.autograd.set_multithreading_enabled(False), nothing_compiled():
        both(mul, x, y, grad)
        out = mul(x, y)
        sys.setprofile(seen)
        try:
            torch.autograd.grad(out, x, grad)
        finally:
            sys.setprofile(None)
    assert DRY or names == ["backward", "__call__"], names


def stream(mul: Function) -> None:
    x, y, grad = inputs()
    side = torch.cuda.Stream()
    both(mul, x, y, grad)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y.mul_(3)
        out, by_x = both(mul, x, y, grad)
    side.synchronize()
    assert torch.equal(out, x * y)
    assert torch.equal(by_x, grad * y)


def graph(mul: Function) -> None:
    """Forward and backward in one CUDA graph."""
    x, y, grad = inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both(mul, x, y, grad)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out, by_x = both(mul, x, y, grad)
    y.copy_(torch.randn_like(y))
    captured.replay()
    assert torch.equal(out, x * y)
    assert torch.equal(by_x, grad * y)


ALONE = """
import sys, torch
model = torch._inductor.aoti_load_package(sys.argv[1])
for n in (1024, 333, 4096, 1000):
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    torch.testing.assert_close(model(x, y), x.sin() * y + 1)
try:
    got = model(x, torch.randn(n + 1, device="cuda")[1:])
    print("an address that is no multiple of 16: runs", tuple(got.shape))
except RuntimeError as e:
    print("an address that is no multiple of 16:", "SL305" in str(e), str(e)[:300])
assert "shiplap" not in sys.modules
"""


def package(mul: Function, folder: Path) -> str:
    """A package of AOTInductor with tables of forms, loaded by a Python that never imports Shiplap."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return mul(x.sin(), y) + 1

    sizes = {0: torch.export.Dim("n", min=2, max=1 << 20)}
    x, y = torch.randn(SIZE, device="cuda"), torch.randn(SIZE, device="cuda")
    program = torch.export.export(Model(), (x, y), dynamic_shapes={"x": sizes, "y": sizes})
    began = time.monotonic()
    made = package_model(program, folder / "model.pt2")
    (folder / "alone.py").write_text(ALONE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", folder / "alone.py", made.path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return f"{time.monotonic() - began:.0f} s, {made.size} bytes of libraries; {done.stdout.strip()}"


def refused(mul: Function, folder: Path) -> str:
    """An op that Python launches is no part of a package."""

    @sl.op("bench_train_refused::mul")
    def by_python(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * y

    by_python.kernel("cuda", lambda x, y: x * y, name="by_hand")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return by_python(x, x)

    program = torch.export.export(Model(), (torch.randn(SIZE, device="cuda"),))
    try:
        package_model(program, folder / "refused.pt2")
    except sl.ShiplapError as e:
        if e.id == "SL307":
            return f"{e.id} {e.got}"
        raise
    raise AssertionError("it was packaged")


def checks(mul: Function, folder: Path) -> dict[str, str]:
    """By check ``ok`` with what there is to say, or what went wrong."""
    every: dict[str, Callable[[], str | None]] = {"values": lambda: values(mul), "warm": lambda: warm(mul)}
    if not DRY:
        every |= {"stream": lambda: stream(mul), "graph": lambda: graph(mul)}
        every |= {"package": lambda: package(mul, folder), "refused": lambda: refused(mul, folder)}
    told = {}
    for name, check in every.items():
        try:
            told[name] = f"ok {check() or ''}".strip()
        except Exception as e:
            told[name] = f"{type(e).__name__}: {str(e)[:2000]}"
        print(f"{name}: {told[name]}", file=sys.stderr, flush=True)
    return told


# --- the times ------------------------------------------------------------------------------------------------------


def eager(contenders: Mapping[str, Function], rounds: int) -> dict[str, host.Times]:
    x, y, grad = inputs()
    plain = x.detach()
    kinds: dict[str, Callable[[Function], Callable[[], object]]] = {
        "forward_ns": lambda f: lambda: f(plain, y),
        "recorded_ns": lambda f: lambda: f(x, y),
        "forward_backward_ns": lambda f: lambda: both(f, x, y, grad),
    }
    return {
        kind: host.rounds_of({name: make(f) for name, f in contenders.items()}, rounds, QUEUE)
        for kind, make in kinds.items()
    }


def compiled(contenders: Mapping[str, Function], rounds: int, deadline: float, missing: dict[str, str]) -> host.Times:
    """ns that one more op adds to forward and backward of a compiled chain, for rows that can be compiled in time."""
    x, y, grad = inputs()
    calls, slowest, done = dict[str, Callable[[], object]](), 0.0, list[str]()
    for name in (n for n in COMPILED if n in contenders):
        began = time.monotonic()
        if began + slowest > deadline:
            missing[f"{name}, compiled"] = "no time left to compile it"
            continue
        try:
            pair = {n: shared.chain(contenders[name], n) for n in (SHORT, LONG)}
            for length, chain in pair.items():
                torch.testing.assert_close(both(chain, x, y, grad)[1], grad * y**length, rtol=1e-4, atol=1e-6)
        except Exception as e:
            missing[f"{name}, compiled"] = shared.reason(e)
            continue
        calls |= {f"{name}/{n}": (lambda c=c: both(c, x, y, grad)) for n, c in pair.items()}
        done.append(name)
        slowest = max(slowest, time.monotonic() - began)
        print(f"{name}, compiled: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    times = host.rounds_of(calls, rounds, QUEUE // LONG)
    pairs = {name: zip(times[f"{name}/{LONG}"], times[f"{name}/{SHORT}"], strict=True) for name in done}
    return {name: [(long - short) / (LONG - SHORT) for long, short in pair] for name, pair in pairs.items()}


def measure(rounds: int, budget: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.monotonic()
    with shared.private_cache() as folder:
        contenders, missing = functions(folder)
        told = checks(contenders["sl_triton"], folder) if "sl_triton" in contenders else {}
        tables = dict[str, host.Times]() if DRY else eager(contenders, rounds)
        if not DRY:
            tables["compiled_ns"] = compiled(contenders, rounds, began + budget, missing)
    return record(
        SOURCES,
        ["triton"],
        device="dry run"
        if DRY
        else f"{torch.cuda.get_device_name()}, driver {shared.driver()}, CUDA {torch.version.cuda}",
        load_average=os.getloadavg()[0],
        checks=told,
        missing=missing,
        seconds=round(time.monotonic() - began),
        ratios={name: host.ratios(times, PAIRS) for name, times in tables.items()},
        **{name: host.described(times) for name, times in tables.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="print JSON, or write it to PATH too")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no chain is compiled any more")
    parser.add_argument("--dry-run", action="store_true", help="what can run on the CPU, with TRITON_INTERPRET=1")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 10_000  # chains of all rows are alike to Dynamo
    if not DRY and not torch.cuda.is_available():
        parser.exit(2, "triton_train_gpu: no CUDA device\n")
    result = measure(options.rounds, options.budget)
    if options.json and options.json != "-":
        write(ROOT / options.json, result)
    print(json.dumps(result, indent=None if options.json else 1))
    if wrong := [name for name, text in result["checks"].items() if not text.startswith("ok")]:
        parser.exit(1, f"triton_train_gpu: {', '.join(wrong)} failed\n")


if __name__ == "__main__":
    main()
