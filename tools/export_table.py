"""Write a table of declared ops by machine: which have a form in ONNX that runs equal, and why the others have none.

``python tools/export_table.py shiplap_sparse3d examples/first_op.py ... > table.md``: each op that the modules declare
is exported with the base sample of its declaration, run in onnxruntime, and compared with its reference. ``--part 2/8``
takes the second of eight parts of them, for as many processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from shiplap.cli.target import import_home
from shiplap.dispatch import Op
from shiplap.dispatch.registry import declared_op_list
from shiplap.errors import ShiplapError
from shiplap.packaging.onnx import export_onnx
from shiplap.plugin_api.containers import leaves
from shiplap.sampling.samples import Samples

HEADER = "| op | in onnxruntime | reason |\n|---|---|---|"


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


def main() -> None:
    """Print the rows of the table for the ops that the modules declare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--part", default="1/1")
    asked = parser.parse_args()
    part, parts = map(int, asked.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        if part == 1:
            print(HEADER)
        for op in declared_ops(asked.targets)[part - 1 :: parts]:
            try:
                result, reason = try_op(op, Path(folder))
            except Exception as e:  # a declaration without samples
                result, reason = "none", f"no sample: {type(e).__name__}: {e}"
            print(f"| `{op.spec.name}` | {result} | {' '.join(reason.split())[:160].replace('|', '/')} |", flush=True)


if __name__ == "__main__":
    main()
