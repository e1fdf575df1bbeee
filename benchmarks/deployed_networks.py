"""Networks of sparse layers' users as files: from a state dict to ``.pt2`` and ``.onnx``, run without Python and torch.

    python benchmarks/deployed_networks.py FORM [NETWORK ...] [--json] [--jobs 1] [--seconds 400]

FORM ``cpp``: the ``.pt2`` file runs in a C++ program without Python over five scenes of other numbers of voxels, beside
eager results, at 1e-5. ``cuda``: the same on a GPU at 2e-3, as its tensor cores round. ``onnxruntime``: the ``.onnx``
file runs over the same scenes in onnxruntime at 1e-4, in a process that does not import torch.

``--json`` writes benchmarks/results/deployed_networks.json after each network, and goes on with what it lacks: results
are kept while the sources are those of its commit. ``--seconds`` ends it; a network that is not ready is not recorded.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "shiplap-sparse3d"))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # a child of -P lacks it

from _record import ROOT, changed_files, record, write

from shiplap.errors import ShiplapError
from shiplap.packaging import package_model
from shiplap.packaging.onnx import export_onnx
from shiplap_testing import compilers
from shiplap_testing.deployed import compiled_runner, run_without_python
from tests.sparse3d.consumers.detectors import DETECTORS
from tests.sparse3d.consumers.hybrids import HYBRIDS
from tests.sparse3d.consumers.specimens import SPECIMENS, Specimen
from tests.sparse3d.nets import UNet, exported_specimen, padded, scenes_of

NETWORKS: dict[str, Specimen] = {
    **SPECIMENS,
    **DETECTORS,
    **HYBRIDS,
    "UNet of fixed capacity": Specimen(lambda _: UNet(), lambda n, _: padded(n)),
}
OUTSIDE = ("TRELLIS", "TRELLIS.2")  # their grid is the largest coordinate of a scene, which a program fixes
WITHIN = {"cpp": 1e-5, "cuda": 2e-3, "onnxruntime": 1e-4}
RESULT = ROOT / "benchmarks" / "results" / "deployed_networks.json"
SOURCES = [
    "benchmarks/deployed_networks.py",
    "examples/deploy/deploy_scenes.cpp",
    "packages/shiplap/src/shiplap/packaging/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/*.py",
    "packages/shiplap-sparse3d/tests/sparse3d/consumers/*.py",
]
IN_ONNXRUNTIME = """
import sys
import numpy
import onnxruntime
folder, number, within = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
session = onnxruntime.InferenceSession(folder + "/net.onnx")
names = [given.name for given in session.get_inputs()]
worst = 0.0
for i in range(number):
    scene = numpy.load(f"{folder}/{i}.npz")
    got = session.run(None, {name: scene[f"in{k}"] for k, name in enumerate(names)})
    for k, result in enumerate(got):
        wanted = scene[f"out{k}"]
        assert result.shape == wanted.shape and result.dtype == wanted.dtype, (i, k, result.shape, wanted.shape)
        numpy.testing.assert_allclose(result, wanted, rtol=within, atol=within)
        if wanted.size:
            worst = max(worst, float(abs(result.astype(float) - wanted.astype(float)).max()))
assert "torch" not in sys.modules
print(worst)
"""


def make_runner(folder: Path, device: str) -> None:
    """Compile the C++ program into ``folder``, where it appears when it is whole."""
    (folder / "making").mkdir()
    made = compiled_runner(folder / "making", device)
    made.rename(folder / made.name)


def run_in_cpp(program: Any, scenes: list[Any], folder: Path, runner: Path, form: str) -> dict[str, Any]:
    """Return the size of the package and the largest difference of its results in the C++ program."""
    package = package_model(program, folder / "net.pt2").path
    while not runner.exists():  # the parent compiles it meanwhile
        time.sleep(0.2)
    done = run_without_python(runner, package, scenes, "cuda" if form == "cuda" else "cpu", WITHIN[form])
    if done.returncode:
        return {"error": f"exit {done.returncode}: {' '.join((done.stdout + done.stderr).split())[:400]}"}
    off = [float(each) for each in re.findall(r"rows, (\S+) off", done.stdout)]
    return {"scenes": len(off), "off": max(off), "bytes": package.stat().st_size}


def run_in_onnxruntime(program: Any, scenes: list[Any], folder: Path) -> dict[str, Any]:
    """Return the size of the ONNX file and the largest difference of its results in a process without torch."""
    export_onnx(program, folder / "net.onnx")
    for i, scene in enumerate(scenes):
        named = {
            f"{way}{k}": t.numpy() for way, held in zip(("in", "out"), scene, strict=True) for k, t in enumerate(held)
        }
        np.savez(folder / f"{i}.npz", **named)
    command = [sys.executable, "-P", "-c", IN_ONNXRUNTIME, str(folder), str(len(scenes)), str(WITHIN["onnxruntime"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": " ".join(done.stderr.split())[-400:]}
    off, size = float(f"{float(done.stdout):.1e}"), (folder / "net.onnx").stat().st_size
    return {"scenes": len(scenes), "off": off, "bytes": size}


def try_network(name: str, form: str, runner: Path) -> dict[str, Any]:
    """Return what became of the file of one network, with the seconds that exporting and running it took."""
    began, device = time.perf_counter(), "cuda" if form == "cuda" else "cpu"
    net, program = exported_specimen(NETWORKS[name], device)
    scenes = scenes_of(NETWORKS[name], net, device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if form == "onnxruntime":
                results = run_in_onnxruntime(program, scenes, Path(folder))
            else:
                results = run_in_cpp(program, scenes, Path(folder), runner, form)
        except ShiplapError as e:
            results = {"refused": f"{e.id}: {e.where}: {e.got or e.what}"[:300]}
    return {**results, "seconds": round(time.perf_counter() - began)}


def try_in_process(name: str, form: str, folder: str, seconds: float) -> dict[str, Any]:
    """Return the results of one network from a process of its own, which a crash or a hang ends alone."""
    command = [sys.executable, "-P", __file__, form, name, "--child", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(1, seconds))
    except subprocess.TimeoutExpired:
        return {}  # of a time that has run out, nothing is recorded
    if done.returncode:
        # After the error, torch prints the user's lines: the error itself begins with the name of its class.
        lines = done.stderr.splitlines()
        at = next((i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)), 0)
        return {"error": f"exit {done.returncode}: {' '.join(' '.join(lines[at : at + 6]).split())[:900]}"}
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def read_record() -> dict[str, Any]:
    """Return the record as it is, or an empty one."""
    read: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    return read


def write_record(form: str, done: dict[str, Any]) -> None:
    """Enter the results of one form into the record: those of ``cpp`` at its top, others as parts of their own."""
    on = torch.cuda.get_device_name() if form == "cuda" else ""
    made = record(SOURCES, ["onnxruntime"], on, within=WITHIN[form], networks=dict(sorted(done.items())))
    new = RESULT.with_suffix(f".{form}")
    with open(RESULT.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of another form may write at the same time
        write(new, read_record() | (made if form == "cpp" else {form: made}))
        new.replace(RESULT)


def main() -> None:
    """Try the networks that the record lacks, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=WITHIN)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--child", metavar="FOLDER")
    asked = parser.parse_args()
    os.environ["PATH"] = compilers.path()  # SHIPLAP_TEST_UNOPTIMIZED=1: the results are those of unoptimised wrappers
    end, form, device = time.monotonic() + asked.seconds, asked.form, "cuda" if asked.form == "cuda" else "cpu"
    if asked.child:
        print(json.dumps(try_network(asked.networks[0], form, Path(asked.child) / f"deploy_scenes_{device}")))
        return
    whole = read_record() if asked.json else {}
    before = whole if form == "cpp" else whole.get(form, {})
    done: dict[str, Any] = before.get("networks", {}) if before and not changed_files(before) else {}
    names = [each for each in asked.networks or NETWORKS if each not in OUTSIDE and each not in done]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs + 1) as pool:
        making = pool.submit(make_runner, Path(folder), device) if form != "onnxruntime" else None

        def try_one(name: str) -> tuple[str, dict[str, Any]]:
            left = end - time.monotonic()
            return name, try_in_process(name, form, folder, left) if left > 0 else {}

        for ready in as_completed([pool.submit(try_one, name) for name in names]):
            name, results = ready.result()
            print(name, json.dumps(results), flush=True)
            done |= {name: results} if results else {}
            if asked.json:
                write_record(form, done)
        if making is not None:
            making.result()  # raises where it could not be compiled, which the children have waited for
    failed = [name for name, results in done.items() if "error" in results]
    print(f"{form}: {len(done)} networks, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")


if __name__ == "__main__":
    main()
