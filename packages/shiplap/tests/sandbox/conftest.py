"""Snapshots of functions that take a fraction of a second in a worker that has imported thousands of modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shiplap.sandbox import patched_functions
from shiplap.sandbox.patched_functions import FunctionSnapshot

# What a candidate that computes on tensors could change. A launcher has imported little more.
LOOKED_AT = ("torch._ops", "torch._tensor", "torch.autograd", "torch.cuda", "torch.jit", "torch.nn", "torch.optim")


@pytest.fixture(scope="module")
def few_modules() -> Iterator[None]:
    """Let snapshots look at the modules of Python and at some of torch only. A worker has imported the modules of all
    tests, and to look at them takes seconds each time.
    """
    seen = SimpleNamespace(**vars(sys))
    seen.modules = {
        name: module
        for name, module in sys.modules.items()
        if name == "torch" or name.startswith(LOOKED_AT) or name.partition(".")[0] in sys.stdlib_module_names
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched_functions, "sys", seen)
        yield


@pytest.fixture(scope="module")
def baseline(few_modules: None) -> FunctionSnapshot:
    """A snapshot of the functions before a test changes one, as a launcher takes it before it loads a candidate."""
    return FunctionSnapshot()
