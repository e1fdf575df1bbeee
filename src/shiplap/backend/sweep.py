"""PyTorch's OpInfo database on a device, compared with the CPU: one JSON line an operator and dtype, on stdout.

Run as a process of its own (``python -m shiplap.backend.sweep``), since a broken kernel may take the process with it.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["DTYPES", "main", "operators"]

DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32,
    "u8": torch.uint8, "bool": torch.bool, "i16": torch.int16, "i8": torch.int8, "f64": torch.float64,
}  # fmt: skip

# What these return is not determined by their arguments.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Its samples read around the edges of a view, and a view that is moved to a device has no surroundings.
LEFT_OUT = ("as_strided.partial_views",)


def operators() -> dict[str, Any]:
    """The database by full name; needs ``expecttest`` and ``hypothesis``, which torch's own tests need."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db if op.full_name not in LEFT_OUT}


def load(package: Path) -> str:
    """Import the generated package and register its device; returns the device's name."""
    sys.path.insert(0, str(package.parent))
    importlib.import_module(package.name).autoload()
    return package.name.removeprefix("torch_")


def _moved(value: Any, device: str) -> Any:
    return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)


def _called(op: Any, sample: Any, device: str | None) -> Any:
    # Some operators write into their arguments: each side gets its own.
    input, args, kwargs = copy.deepcopy((sample.input, sample.args, sample.kwargs))
    if device is not None:
        input, args, kwargs = _moved((input, args, kwargs), device)
        kwargs = {k: device if k == "device" else v for k, v in kwargs.items()}
    torch.manual_seed(0)
    return op.op(input, *args, **kwargs)


def _compare(op: Any, got: Any, want: Any, dtype: torch.dtype) -> None:
    loose = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}
    pairs = list(zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True))
    for g, w in pairs:
        if not isinstance(w, torch.Tensor):
            assert g == w or (g != g and w != w), f"{g} for {w}"
            continue
        assert g.dtype == w.dtype, f"dtype {g.dtype} for {w.dtype}"
        assert g.shape == w.shape, f"shape {tuple(g.shape)} for {tuple(w.shape)}"
        if op.name in UNDEFINED:
            continue
        tolerance = loose.get(dtype, 0.0)
        torch.testing.assert_close(g.cpu(), w, rtol=max(tolerance, 1.3e-6), atol=max(tolerance, 1e-5), equal_nan=True,
                                   check_stride=False, check_device=False)  # fmt: skip


def _as_exact(op: Any, sample: Any, got: Any, want: Any, dtype: torch.dtype) -> bool:
    """Whether the device is about as near to the result in float64 as the CPU is, which rounds where it pleases."""
    if not dtype.is_floating_point or dtype is torch.float64:
        return False
    wide = copy.copy(sample)
    wide.input, wide.args, wide.kwargs = tree_map(
        lambda v: v.double() if isinstance(v, torch.Tensor) and v.dtype == dtype else v,
        (sample.input, sample.args, sample.kwargs),
    )
    for g, w, exact in zip(*(tree_flatten(v)[0] for v in (got, want, _called(op, wide, None))), strict=True):
        if isinstance(w, torch.Tensor) and w.is_floating_point():
            ours, theirs = ((v.cpu().double() - exact).abs().nan_to_num().max().item() for v in (g, w))
            if g.isnan().cpu().ne(w.isnan()).any() or ours > 3 * theirs:
                return False
        elif not torch.equal(torch.as_tensor(g).cpu(), torch.as_tensor(w)):
            return False
    return True


def _one(op: Any, dtype: torch.dtype, device: str, most: int) -> dict[str, Any]:
    """Run up to ``most`` samples. The CPU decides which arguments are valid."""
    module = getattr(torch, device)
    native: set[str] = set()
    fallback: dict[str, dict[str, int]] = {}
    failure, count = "", 0
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        if count >= most:
            break
        try:
            want = _called(op, sample, None)
        except Exception:
            continue
        count += 1
        module.reset_counters()
        try:
            got = _called(op, sample, device)
            for name, c in module.counters().items():
                if c["native"]:
                    native.add(name)
                if c["fallback"]:
                    fallback[name] = dict(c["fallback"])
            try:
                _compare(op, got, want, dtype)
            except AssertionError:
                if not _as_exact(op, sample, got, want, dtype):
                    raise
        except Exception as e:
            failure = failure or f"{type(e).__name__}: {str(e)[:300]}"
    return {"samples": count, "native": sorted(native), "fallback": fallback, "failure": failure}


def results(package: Path, wanted: list[str], dtypes: list[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield ``{"op", "dtype", "samples", "native", "fallback", "failure"}``, and ``{"start": ...}`` before each."""
    device = load(package)
    database = operators()
    for name in wanted:
        for dtype in dtypes:
            op = database[name]
            if DTYPES[dtype] not in op.supported_dtypes("cpu"):
                continue
            yield {"start": name, "dtype": dtype}
            try:
                yield {"op": name, "dtype": dtype, **_one(op, DTYPES[dtype], device, most)}
            except Exception as e:
                yield {"op": name, "dtype": dtype, "samples": 0, "native": [], "fallback": {},
                       "failure": f"{type(e).__name__}: {str(e)[:300]}"}  # fmt: skip


def main() -> None:
    """``sweep PACKAGE --ops a,b --dtypes f32,i64 --samples 8``; ``--list`` prints the operators' names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--ops", default="")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    out = sys.stdout
    sys.stdout = sys.stderr  # what operators print is not ours
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.list:
        out.write(json.dumps(sorted(operators())) + "\n")
        return
    wanted = options.ops.split(",") if options.ops else sorted(operators())
    for row in results(options.package, wanted, options.dtypes.split(","), options.samples):
        out.write(json.dumps(row) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
