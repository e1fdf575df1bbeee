"""A sparse U-Net as a file: time to load, size, memory and latency of onnxruntime and of a package, beside torch.

    python benchmarks/deploy.py            # prints a table
    python benchmarks/deploy.py --json     # writes benchmarks/results/deploy.json

Each form runs in a process of its own with one thread, on the same scenes. The time to load includes the imports that
the form needs, the time to the first result the load. The latency is the smallest of several calls in turns over the
scenes, the memory the largest resident size less that before the load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GRID = (64, 64, 32)
ROWS = (500, 5000, 20000)
CALLS = 5
FORMS = ("onnxruntime", "package", "compiled", "eager")
SOURCES = ["packages/shiplap/src/shiplap/packaging/*.py", "packages/shiplap-sparse3d/src/shiplap_sparse3d/*.py"]


def network() -> Any:
    """Two levels down and back, with weights of a fixed seed."""
    import torch
    from torch import Tensor, nn

    import shiplap_sparse3d as sparse3d

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = sparse3d.Sequential(sparse3d.SubMConv3d(4, 16, 3), sparse3d.BatchNorm(16), nn.ReLU())
            self.down = sparse3d.Sequential(
                sparse3d.SparseConv3d(16, 32, 3, stride=2, padding=1), sparse3d.BatchNorm(32), nn.ReLU()
            )
            self.deep = sparse3d.Sequential(sparse3d.SubMConv3d(32, 32, 3), sparse3d.BatchNorm(32), nn.ReLU())
            self.back = sparse3d.SparseInverseConv3d(32, 16, 3)
            self.head = sparse3d.SubMConv3d(32, 5, 1)

        def forward(self, feats: Tensor, coords: Tensor) -> Tensor:
            x = self.enter(sparse3d.SparseTensor(feats, coords, GRID, 1))
            out: Tensor = self.head(sparse3d.cat([x, self.back(self.deep(self.down(x)))])).feats
            return out

    torch.manual_seed(0)
    return Net().eval()


def scene(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random voxels of one scene."""
    rng = np.random.default_rng(rows)
    number = np.sort(rng.choice(int(np.prod(GRID)), rows, replace=False))
    coords = np.stack([np.zeros(rows, dtype=np.int64), *np.unravel_index(number, GRID)], 1).astype(np.int32)
    return rng.standard_normal((rows, 4), dtype=np.float32), coords


def write_files(folder: Path) -> None:
    """Write the network as ``net.onnx`` and ``net.pt2``."""
    import torch

    from shiplap.packaging import package_model
    from shiplap.packaging.onnx import export_onnx

    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    with torch.no_grad():
        args = tuple(torch.from_numpy(a) for a in scene(ROWS[0]))
        program = torch.export.export(network(), args, dynamic_shapes=({0: rows}, {0: rows}))
        export_onnx(program, folder / "net.onnx")
        package_model(program, folder / "net.pt2")


def load(form: str, folder: Path) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function of features and coordinates that runs the network in ``form``."""
    if form == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(folder / "net.onnx"), options)
        return lambda feats, coords: session.run(None, {"feats": feats, "coords": coords})[0]
    import torch

    torch.set_num_threads(1)
    if form == "package":
        run: Any = torch._inductor.aoti_load_package(str(folder / "net.pt2"))
    else:
        run = torch.compile(network(), dynamic=True) if form == "compiled" else network()

    def call(feats: np.ndarray, coords: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = run(torch.from_numpy(feats), torch.from_numpy(coords)).numpy()
        return result

    return call


def resident(name: str) -> int:
    """Return the resident size of this process in KiB: ``VmRSS`` now, ``VmHWM`` at most; rusage has the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(form: str, folder: Path) -> dict[str, Any]:
    """Return what one form takes, in this process."""
    before = resident("VmRSS")
    began = time.perf_counter()
    call = load(form, folder)
    loaded = time.perf_counter() - began
    call(*scene(ROWS[0]))
    first = time.perf_counter() - began
    best = dict.fromkeys(ROWS, float("inf"))
    for _ in range(CALLS):
        for rows in ROWS:
            args = scene(rows)
            began = time.perf_counter()
            result = call(*args)
            best[rows] = min(best[rows], time.perf_counter() - began)
    memory = (resident("VmHWM") - before) / 1024
    return {
        "load_s": round(loaded, 2),
        "first_result_s": round(first, 2),
        "memory_mib": round(memory),
        "latency_ms": {str(rows): round(seconds * 1e3, 2) for rows, seconds in best.items()},
        "sum": float(np.abs(result).sum()),
    }


def main() -> None:
    """Measure each form in a process of its own, and print or write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--form")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.form:
        print(json.dumps(measure(asked.form, asked.folder)))
        return
    load = [round(before, 1) for before in os.getloadavg()]  # what other programs do
    with tempfile.TemporaryDirectory() as name:
        folder, results = Path(name), {}
        write_files(folder)
        for form in FORMS:
            command = [sys.executable, "-P", __file__, "--form", form, "--folder", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results[form] = json.loads(done.splitlines()[-1])
            print(form, results[form], flush=True)
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    print(sizes)
    made = {form: result.pop("latency_ms") for form, result in results.items()}
    latency = {rows: {form: best[rows] for form, best in made.items()} for rows in map(str, ROWS)}
    sums = [result["sum"] for result in results.values()]
    assert max(sums) - min(sums) <= 1e-3 * max(sums), "the forms differ"
    if asked.json:
        from _record import ROOT, record, write

        measured: dict[str, Any] = {"load": load, "forms": results, "latency_ms": latency, "bytes": sizes}
        made_of = [*SOURCES, "benchmarks/deploy.py"]
        write(ROOT / "benchmarks" / "results" / "deploy.json", record(made_of, ["onnxruntime"], **measured))


if __name__ == "__main__":
    main()
