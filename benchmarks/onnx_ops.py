"""Declared ops by machine: which have a form in ONNX that runs equal to the reference, and why the others have none.

    python benchmarks/onnx_ops.py [--json] [--seconds 400] [MODULE ...]

Each op that the modules declare (by default those of the families, of the examples and of the tests' sound ops) is
exported with the base sample of its declaration, run in onnxruntime, and compared. ``--json`` writes
benchmarks/results/onnx_ops.json after each op, and goes on with what it lacks: results are kept while the sources are
those of its commit. After ``--seconds`` no further op is begun.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
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
RESULT = ROOT / "benchmarks" / "results" / "onnx_ops.json"
SOURCES = ["benchmarks/onnx_ops.py", "packages/shiplap/src/shiplap/packaging/onnx*.py"]


class Call(nn.Module):
    """A call of an op whose arguments are tensors of a module's input, and values."""

    def __init__(self, op: Op, values: list[Any]) -> None:
        super().__init__()
        self.op, self.values = op, values

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)

        def fill(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [fill(v) for v in value]
            return next(given) if isinstance(value, Tensor) else value

        named = {a.name: fill(v) for a, v in zip(self.op.spec.args, self.values, strict=True)}
        positional = [named.pop(a.name) for a in self.op.spec.args if not a.keyword_only]
        return self.op(*positional, **named)


def sample_arguments(op: Op) -> list[Any]:
    """Return the arguments of the base sample of ``op`` on the CPU, in declared order."""
    samples = Samples(op, 0)
    return list(samples.build(samples.base).fresh())


def try_op(op: Op, folder: Path) -> tuple[str, str]:
    """Return "equal", "different" or "none", and the reason."""
    values = sample_arguments(op)
    tensors = tuple(value.contiguous() for value in leaves(values) if isinstance(value, Tensor))
    call, path = Call(op, values).eval(), folder / "op.onnx"
    try:
        with torch.no_grad():
            export_onnx(torch.export.export(call, tensors, strict=False), path)
            session = onnxruntime.InferenceSession(str(path))
            names = [given.name for given in session.get_inputs()]
            got = session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})
            want = [r for r in leaves(call(*tensors)) if isinstance(r, Tensor)]
    except ShiplapError as e:
        return "none", e.got or e.what
    except Exception as e:  # onnxruntime's own, and numpy's for dtypes that it lacks
        return "none", str(e)
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


def main() -> None:
    """Try the ops that the record lacks, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    before = json.loads(RESULT.read_text(encoding="utf-8")) if asked.json and RESULT.is_file() else {}
    done: dict[str, Any] = before.get("ops", {}) if before and not changed_files(before) else {}
    with tempfile.TemporaryDirectory() as folder:
        for op in declared_ops(asked.targets or default_targets()):
            name = op.spec.name
            if name in done or time.monotonic() > end:
                continue
            try:
                result, reason = try_op(op, Path(folder))
            except Exception as e:  # a declaration without samples
                result, reason = "untried", f"{type(e).__name__}: {e}"
            done[name] = {"result": result, "reason": " ".join(reason.split())[:200]}
            print(name, *done[name].values(), flush=True)
            if asked.json:
                counts = dict(Counter(each["result"] for each in done.values()))
                ops = dict(sorted(done.items()))
                write(RESULT, record(SOURCES, ["onnxruntime", "onnxscript"], counts=counts, ops=ops))
    print(Counter(each["result"] for each in done.values()))


if __name__ == "__main__":
    main()
