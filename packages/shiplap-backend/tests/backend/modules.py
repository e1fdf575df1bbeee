"""Every module of torch's database on the device and on the CPU: run as a program, since torch's tests want a process.

``python modules.py DIRECTORY SAMPLES STEP [START]`` prints one JSON value: how many cases there were, and what was
wrong. SAMPLES is how many inputs of a module are taken, in each mode; each STEP-th module is, from module START on.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shiplap.torch_private.graph_objects import leaves, map_leaves
from shiplap_backend.sweep import load_device


def module_infos() -> dict[str, Any]:
    """Return torch's ``ModuleInfo`` database, which has sample inputs of ``torch.nn`` modules. The keys are names such
    as ``nn.LSTM``.
    """
    from torch.testing._internal.common_modules import module_db

    return {module.name: module for module in module_db}


def cases(samples: int, step: int, start: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Name, a module on the CPU, and the arguments of its forward."""
    for name, info in sorted(module_infos().items())[start::step]:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": training}
            for sample in info.module_inputs_func(info, **options)[:samples]:
                if sample.forward_input is not None:
                    torch.manual_seed(0)
                    made = sample.constructor_input
                    module = info.module_cls(*made.args, **made.kwargs).train(training)
                    yield name, module, (sample.forward_input.args, sample.forward_input.kwargs)


def called(module: Any, arguments: Any, device: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results on ``device``, and the gradient of each parameter and argument for the sum of their squares."""
    inputs: list[Tensor] = []

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        here = value.detach().to(device, copy=True)
        if here.is_floating_point() or here.is_complex():
            inputs.append(here.requires_grad_())
        return here

    torch.manual_seed(0)
    args, kwargs = map_leaves(placed, arguments)
    results = [t for t in leaves(module(*args, **kwargs)) if isinstance(t, Tensor)]
    if total := [t.abs().square().sum() for t in results if t.requires_grad]:
        torch.stack(total).sum().backward()
    return results, [t.grad for t in (*module.parameters(), *inputs)]


def difference(module: Any, arguments: Any, device: str) -> str:
    """What is not as on the CPU, or nothing. None of it may replace a parameter."""
    twin = copy.deepcopy(module)
    before = [id(p) for p in twin.parameters()]
    want = called(module, arguments, "cpu")
    twin.to(device)
    if before != [id(p) for p in twin.parameters()]:
        return "a parameter was replaced"
    got = called(twin, arguments, device)
    for ours, theirs in zip(leaves(got), leaves(want), strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    if [t.stride() for t in got[0]] != [t.stride() for t in want[0]]:
        return f"strides {[t.stride() for t in got[0]]}, not {[t.stride() for t in want[0]]}"
    return ""


def main(package: Path, samples: int, step: int, start: int = 0) -> None:
    device, wrong, count = load_device(package), [], 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, module, arguments in cases(samples, step, start):
        try:
            called(copy.deepcopy(module), arguments, "cpu")
        except Exception:  # the CPU has no such case
            continue
        count += 1
        try:
            bad = difference(module, arguments, device)
        except Exception as e:
            bad = f"{type(e).__name__}: {str(e)[:300]}"
        if bad:
            wrong.append(f"{name}: {bad}")
    print(json.dumps({"cases": count, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
