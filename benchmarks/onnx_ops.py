"""Declared ops by machine: which have a form in ONNX that runs equal to the reference, and why the others have none.

    python benchmarks/onnx_ops.py [--json] [--jobs 1] [--seconds 400] [MODULE ...]

Each op that the modules declare (by default those of the families, of the examples and of the tests' sound ops) is
exported with the base sample of its declaration, run in onnxruntime, and compared. ``--json`` writes
benchmarks/results/onnx_ops.json after each op, and goes on with what it lacks: results are kept while the sources are
those of its commit. After ``--seconds`` no further op is begun.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a child of -P lacks it

from _record import ROOT, changed_files, record, write
from torch import Tensor, nn

from shiplap.cli.target import import_home
from shiplap.dispatch import Op
from shiplap.dispatch.registry import declared_op_list
from shiplap.errors import ShiplapError
from shiplap.packaging.onnx import export_onnx
from shiplap.plugin_api.containers import leaves
from shiplap.sampling.samples import Samples

FAMILIES = ("shiplap_sparse3d", "shiplap_sparse3d.flexgemm", "shiplap_dense", "shiplap_slidesparse")
SOUND = "shiplap_testing.zoo."
ZOO = tuple(SOUND + name for name in ("good", "boundary", "power", "power_gradient", "power_places", "stateful"))
ROW = "ROW "  # before the lines of a child that are results
RESULT = ROOT / "benchmarks" / "results" / "onnx_ops.json"
SOURCES = ["benchmarks/onnx_ops.py", "packages/shiplap/src/shiplap/packaging/onnx*.py"]


class Call(nn.Module):
    """A call of an op, or of its reference, whose arguments are tensors of a module's input, and values."""

    def __init__(self, op: Op, values: list[Any], called: Any) -> None:
        super().__init__()
        self.op, self.values, self.called = op, values, called

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)

        def fill(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [fill(v) for v in value]
            return next(given) if isinstance(value, Tensor) else value

        positional, named = self.op.spec.split([fill(v) for v in self.values])
        return self.called(*positional, **named)


def sample_arguments(op: Op) -> list[Any]:
    """Return the arguments of the base sample of ``op`` on the CPU, in declared order."""
    samples = Samples(op, 0)
    return list(samples.build(samples.base).fresh())


def try_op(op: Op, folder: Path) -> tuple[str, str]:
    """Return "equal", "different" or "none", and the reason."""
    values = sample_arguments(op)
    tensors = tuple(value.contiguous() for value in leaves(values) if isinstance(value, Tensor))
    call, path = Call(op, values, op).eval(), folder / "op.onnx"
    try:
        with torch.no_grad():
            export_onnx(torch.export.export(call, tensors, strict=False), path)
            session = onnxruntime.InferenceSession(str(path))
            names = [given.name for given in session.get_inputs()]
            got = session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})
            want = [r for r in leaves(Call(op, values, op.reference)(*tensors)) if isinstance(r, Tensor)]
    except ShiplapError as e:
        return "none", e.got or e.what
    except Exception as e:  # onnxruntime's own, and numpy's for dtypes that it lacks
        return "none", str(e).replace(str(path), "the file")
    same = all(np.allclose(a, b.numpy(), 1e-3, 1e-3, equal_nan=True) for a, b in zip(got, want, strict=True))
    return ("equal", "") if same else ("different", "see the reference's dtype and order of sums")


def declared_ops(targets: list[str]) -> list[Op]:
    """Return the ops that ``targets`` declare. A module that cannot be imported here is named on stderr."""
    before = set(declared_op_list())
    for target in targets:
        try:
            import_home(target)
        except Exception as e:  # of any package that it needs
            print(f"{target}: {type(e).__name__}: {e}", file=sys.stderr)
    return sorted(set(declared_op_list()) - before, key=lambda op: op.spec.name)


def default_targets() -> list[str]:
    """Return the families, the tests' sound ops, and the examples that declare ops."""
    examples = [str(path) for path in sorted((ROOT / "examples").glob("*.py")) if "sl.op" in path.read_text("utf-8")]
    return [*FAMILIES, *ZOO, *examples]


def known_results() -> dict[str, Any]:
    """Return the results of the record, while its sources are those of its commit."""
    before = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    known: dict[str, Any] = before["ops"] if before and not changed_files(before) else {}
    return known


def print_part(targets: list[str], part: int, parts: int, done: Mapping[str, Any], end: float) -> None:
    """Print one line of JSON for each op of a part that is not done."""
    with tempfile.TemporaryDirectory() as folder:
        for op in declared_ops(targets)[part::parts]:
            name = op.spec.name
            if name in done or time.time() > end:
                continue
            try:
                result, reason = try_op(op, Path(folder))
            except Exception as e:  # a declaration without samples
                result, reason = "untried", f"{type(e).__name__}: {e}"
            row = {"result": result, "reason": " ".join(reason.split())[:200]}
            print(ROW + json.dumps({name: row}), flush=True)


def main() -> None:
    """Try the ops that the record lacks in processes of their own, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--part", nargs=2, type=float, metavar=("NUMBER", "END"))
    asked = parser.parse_args()
    targets, done, lock = asked.targets or default_targets(), known_results() if asked.json else {}, threading.Lock()
    if asked.part:
        print_part(targets, int(asked.part[0]), asked.jobs, done, asked.part[1])
        return

    def read_part(number: int) -> None:
        options = ["--jobs", str(asked.jobs), "--part", str(number), str(time.time() + asked.seconds)]
        command = [sys.executable, "-P", __file__, *targets, *options, *(["--json"] if asked.json else [])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith(ROW):
                continue
            with lock:
                done.update(json.loads(line.removeprefix(ROW)))
                print(line.strip(), flush=True)
                if asked.json:
                    counts = dict(Counter(each["result"] for each in done.values()).most_common())
                    ops = dict(sorted(done.items()))
                    write(RESULT, record(SOURCES, ["onnxruntime", "onnxscript"], counts=counts, ops=ops))

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(read_part, range(asked.jobs)))
    print(Counter(each["result"] for each in done.values()))


if __name__ == "__main__":
    main()
