"""A Llama-like block in 8 bits beside torchao's on one GPU: prefill and decode, compiled, as captured graphs.

    python benchmarks/slidesparse_torchao_gpu.py [--json benchmarks/results/slidesparse_torchao_gpu.json]

Needs torchao (``--torchao FOLDER`` for one outside the environment). Each form is the same block of random weights in
bfloat16, converted by ``slidesparse.convert`` or ``torchao.quantize_`` (W8A8, one scale per channel and per token),
compiled by Inductor. Times are of replayed graphs, the least of rounds in turns; errors are those of the outputs beside
bfloat16. Sizes are those of Llama 3 8B; decode attends to 1,024 cached tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shiplap_slidesparse as ss

SOURCES = [
    "benchmarks/slidesparse_torchao_gpu.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/cuda/*.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/lt/*.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/layers.py",
]
HIDDEN, HEADS, KV, INNER, CACHED = 4096, 32, 8, 14336, 1024
BEGAN = time.monotonic()
OURS = ("int8", "fp8")
ROWS = {"decode 16": 16, "prefill 2048": 2048, "decode 1": 1, "decode 64": 64}


class Block(nn.Module):
    """A transformer block; fewer rows than a prefill are one token each, with a cache that all forms share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 128 * (HEADS + 2 * KV), bias=False)
        self.out = nn.Linear(128 * HEADS, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor, cache: Tensor | None) -> Tensor:
        rows = len(x)
        q, k, v = self.qkv(F.rms_norm(x, (HIDDEN,), self.norms[0])).view(rows, -1, 128).split((HEADS, KV, KV), 1)
        if cache is not None:
            k, v = cache
            mixed = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
        else:
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        x = x + self.out(mixed.reshape(rows, -1))
        gate, up = self.up(F.rms_norm(x, (HIDDEN,), self.norms[1])).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def forms() -> dict[str, Callable[[nn.Module], object]]:
    """Return what converts a block, in place, by name."""
    from torchao import quantization as ao

    row = ao.PerRow()
    return {
        "bf16": lambda net: None,
        "int8": lambda net: ss.convert(net, progress=False),
        "fp8": lambda net: ss.convert(net, dtype="fp8", progress=False),
        "torchao int8": lambda net: ao.quantize_(net, ao.Int8DynamicActivationInt8WeightConfig()),
        "torchao fp8": lambda net: ao.quantize_(net, ao.Float8DynamicActivationFloat8WeightConfig(granularity=row)),
    }


def captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Return the replay of a captured call, and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def least_us(replays: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least time of each replay, in rounds that go through all."""
    best = dict.fromkeys(replays, float("inf"))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    until, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < until or rounds < 5:
        for name, replay in replays.items():
            begin.record()
            for _ in range(4):
                replay()
            end.record()
            end.synchronize()
            best[name] = min(best[name], begin.elapsed_time(end) * 250)
        rounds += 1
    return {name: round(value, 1) for name, value in best.items()}


def measure(nets: dict[str, nn.Module], rows: int, seconds: float, until: float) -> dict[str, Any]:
    """Return times and errors of a number of rows. Forms that fail or that no graph can hold are named with errors."""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
    cache = None
    if rows < 1024:
        cache = torch.randn(2, rows, KV, CACHED, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    exact = nets["bf16"](x, cache).float()
    replays: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    launched: dict[str, str] = {}
    for name, net in [*nets.items(), *((f"{ours}, eager", nets[ours]) for ours in OURS if ours in nets)]:
        if time.monotonic() > until:
            failed[name] = "out of time"
            continue
        call: Any = net if name.endswith("eager") else torch.compile(net, dynamic=False)
        try:
            try:
                replay, out = captured(lambda call=call: call(x, cache))
            except torch.AcceleratorError as e:  # a form that no graph can hold is launched, call by call
                launched[name] = f"{type(e).__name__}: {e}".splitlines()[0]
                torch.cuda.synchronize()
                replay, out = partial(call, x, cache), call(x, cache)
            replay()
            errors[name] = round(float((out.float() - exact).norm() / exact.norm()), 5)
            replays[name] = replay
        except Exception as e:
            failed[name] = f"{type(e).__name__}: {e}"[:300]
            torch.cuda.synchronize()
        progress(f"{rows} rows, {name}: {failed.get(name) or launched.get(name, 'captured')}")
    us = least_us(replays, seconds)
    ratios = {f"{d} of torchao": round(us[d] / us[f"torchao {d}"], 3) for d in OURS if {d, f"torchao {d}"} <= us.keys()}
    return {"rows": rows, "us": us, "errors": errors, "failed": failed, "launched": launched, "ratios": ratios}


def progress(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torchao", type=Path, help="a folder with torchao")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measurement per number of rows")
    parser.add_argument("--until", type=float, default=600.0, help="seconds after which no number of rows begins")
    given = parser.parse_args()
    if given.torchao:
        sys.path.insert(0, str(given.torchao))
    progress("begins")
    import torchao

    nets: dict[str, nn.Module] = {}
    failed: dict[str, str] = {}
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = Block().to(torch.bfloat16).eval()
    for name, convert in forms().items():
        nets[name] = copy.deepcopy(base)
        try:
            convert(nets[name])
        except Exception as e:
            failed[name] = f"{type(e).__name__}: {e}"[:300]
            del nets[name]
        progress(f"{name}: {failed.get(name, 'converted')}")
    cases: dict[str, Any] = {}
    for name, rows in ROWS.items():
        if time.monotonic() - BEGAN > given.until:
            cases[name] = "not begun: out of time"
            continue
        cases[name] = measure(nets, rows, given.seconds, BEGAN + given.until)
        print(json.dumps({name: cases[name]}), flush=True)
        if given.json:  # after each, since the machine may end the run
            write(given.json, torchao.__version__, failed, cases)


def write(path: Path, version: str, failed: dict[str, str], cases: dict[str, Any]) -> None:
    import _record

    sizes = {"hidden": HIDDEN, "heads": HEADS, "kv": KV, "inner": INNER, "cached": CACHED}
    device = torch.cuda.get_device_name()
    _record.write(
        path, _record.record(SOURCES, ["triton"], device, torchao=version, sizes=sizes, failed=failed, cases=cases)
    )


if __name__ == "__main__":
    main()
