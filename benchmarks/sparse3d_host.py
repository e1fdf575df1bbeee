"""What sparse3d's CUDA ops cost the host, measured without a GPU: ``python benchmarks/sparse3d_host.py``.

Everything of a call runs - checks, choices, allocation, launchers, autograd - on CPU tensors, up to the launch itself,
which is a function that does nothing. So these are microseconds of our Python on this machine, and no result of a GPU:
what the driver, the device and its allocator take comes on top. Launch programs (of maps and of ``tap_blocks``) and
templates are launched by Python here, as they are until C++ takes over: where there is a driver, later calls cost less.
``--profile CASE`` says where the time goes.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import ctypes
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write

from shiplap.declare.kernel import Kernel
from shiplap.dispatch import eager_fast_path
from shiplap.kernels.triton import launcher as launching

SOURCES = [
    "benchmarks/sparse3d_host.py",
    "packages/shiplap/src/shiplap/kernels/triton/launcher.py",
    "packages/shiplap/src/shiplap/kernels/triton/template_kernel.py",
    "packages/shiplap/src/shiplap/kernels/triton/template_key.py",
    "packages/shiplap/src/shiplap/dispatch/eager_fast_path.py",
    "packages/shiplap/src/shiplap/dispatch/launch.py",
    "packages/shiplap/src/shiplap/dispatch/autograd.py",
    "packages/shiplap/src/shiplap/dispatch/op.py",
    "packages/shiplap/src/shiplap/dispatch/python_kernel.py",
    "packages/shiplap/src/shiplap/dispatch/execute.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/steps.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/plan.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/geometry.py",
]
ROWS = {8: 192, 16: 848, 32: 3840}  # voxels of a shell, by its grid
CHANNELS = 256  # nothing is multiplied; from here on a tile's weights are loaded by the bulk copy engine
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
launches = [0]


class Silent:
    """A ``@triton.jit`` function whose launches do nothing."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.signature, self.params = kernel.fn, kernel.signature, kernel.params
        self.hash, self.used_global_vals, self.pre_run_hooks, self.debug = "silent", {}, [], False
        self.__module__, self.__qualname__ = kernel.fn.__module__, kernel.fn.__qualname__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        source = SimpleNamespace(signature={})
        made = {"run": launch, "function": 0, "packed_metadata": (), "metadata": Facts(), "src": source}
        return lambda *args, **options: SimpleNamespace(**made)


class Facts(NamedTuple):
    """What Triton says of a kernel that needs nothing of its own."""

    num_warps: int = 4
    num_ctas: int = 1
    shared: int = 0
    global_scratch_size: int = 0
    profile_scratch_size: int = 0


def launch(*arguments: Any) -> None:
    launches[0] += 1


def silence() -> None:
    """From now on Triton launchers of this process take CPU tensors, and launch nothing."""
    written, made = launching._launcher_source, launching.Launcher.__init__
    launching._launcher_source = lambda kernel: written(kernel).replace(".is_cuda", ".is_cpu")
    launching.Launcher.__init__ = lambda self, kernel: made(self, Silent(kernel))  # type: ignore[method-assign]
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None, debug=False)
    knobs = SimpleNamespace(runtime=hooks, compilation=SimpleNamespace(instrumentation_mode=""))
    launching._triton_runtime = lambda: launching.TritonRuntime(lambda: 0, lambda device: 0, knobs, list)


def on_cpu_too(kernel: Kernel) -> Kernel:
    """The same kernel for tensors of the CPU, without the variants that it has for configs."""
    made = copy.copy(kernel)
    made.device, made._variants = "cpu", {}
    if made.native is not None:
        made.native.settle("there is no CUDA driver")
    return made


def on_cpu(ops: list[Any]) -> None:
    """The CUDA kernels of ``ops`` take calls of CPU tensors."""
    for op in ops:
        op.drop_native()
        op.kernels["cpu"] = [on_cpu_too(k) for k in op.kernels["cuda"]]
        op.direct = eager_fast_path.compile_fast_path(op, "cpu") or op.direct


def shell(res: int) -> torch.Tensor:
    """As many voxels as a sphere shell of that size has."""
    cells = torch.arange(ROWS[res])
    return torch.stack([cells * 0, cells % res, cells // res % res, cells // res**2], 1).int()


def cases(res: int) -> dict[str, Callable[[], Any]]:
    """What is timed on a shell."""
    import shiplap_sparse3d as sparse3d
    from shiplap_sparse3d import planning, steps

    coords, generator = shell(res), torch.Generator().manual_seed(0)
    feats = torch.randn(ROWS[res], CHANNELS, generator=generator).half()
    weight = torch.randn(CHANNELS, 27, CHANNELS, generator=generator).half()
    bias, grad = torch.zeros(CHANNELS).half(), torch.randn(ROWS[res], CHANNELS, generator=generator).half()
    with torch.no_grad():
        plan = sparse3d.Geometry(coords, res, 1).subm(3)
    leaves = [t.clone().requires_grad_() for t in (feats, weight, bias)]
    window = steps.StepWindow((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    reached, grid = coords[: ROWS[res] // 2].contiguous(), [res] * 3

    def train() -> None:
        for leaf in leaves:
            leaf.grad = None
        plan.conv(*leaves).backward(grad)

    def strided() -> None:  # without out_coords, which asks the device how many there are
        made = steps.connect_voxels(window, coords, (res,) * 3, reached, ordered=True)
        made.conv(feats, weight, bias)

    def bounded() -> None:
        steps.output_cells(window._replace(capacity=ROWS[res]), coords, (res,) * 3)

    parts = plan.order.shape[0] if plan.order is not None else 1
    return {
        "map": torch.no_grad()(lambda: sparse3d.Geometry(coords, res, 1).subm(3)),
        "subm_plan": lambda: planning.subm_plan(coords, grid, [3] * 3, [1] * 3, parts),
        "forward": torch.no_grad()(lambda: plan.conv(feats, weight, bias)),
        "train": train,
        "conv_plan + conv": torch.no_grad()(strided),
        "out_coords_bounded": torch.no_grad()(bounded),
    }


def microseconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """The quickest of ``rounds`` that the runs take in turns, and how many launches each makes."""
    best, count = dict.fromkeys(runs, float("inf")), {}
    for name, run in runs.items():
        run()
        launches[0] = 0
        run()
        count[name] = launches[0]
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.thread_time()
            for _ in range(20):
                run()
            best[name] = min(best[name], (time.thread_time() - started) / 20 * 1e6)
    return {name: {"us": round(best[name], 1), "launches": count[name]} for name in runs}


def profile(run: Callable[[], Any]) -> None:
    """By own time; the backward runs in this thread."""
    with torch.autograd.set_multithreading_enabled(False):
        run()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(2000):
            run()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--res", type=int, choices=ROWS, default=8, help="of the profile")
    parser.add_argument("--profile", metavar="CASE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):  # memory that is freed is kept, as CUDA's allocator does
        ctypes.CDLL(None).mallopt(parameter, 1 << 30)
    silence()
    from shiplap_sparse3d import bounded, ops, plan, planning

    on_cpu(
        [
            ops.conv,
            ops.conv_weight_grad,
            ops.tap_blocks,
            planning.subm_plan,
            planning.conv_plan,
            bounded.out_coords_bounded,
        ]
    )
    plan.wants_sorted.__code__ = (lambda tensor: True).__code__
    if args.profile:
        profile(cases(args.res)[args.profile])
        return
    rows = []
    for res, count in ROWS.items():
        rows.append({"shell": res, "voxels": count, **microseconds(cases(res), args.rounds)})
        print(json.dumps(rows[-1]))
    if args.json:
        write(args.json, record(SOURCES, ["triton"], rows=rows))


if __name__ == "__main__":
    main()
