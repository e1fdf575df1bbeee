"""An import that may fail is made once, and a tensor is drawn from a generator in an op."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from shiplap.doctor import edits_of_draws, edits_of_functions
from tests.doctor.programs import CountingBackend, proposals


@pytest.mark.parametrize(
    ("written", "read", "expected"),
    [
        ("import no_such_module_anywhere as fast", "fast.double(x)", "x + 1"),
        ("import math as fast", "x * fast.e", "x * 2.718281828459045"),
        ("import os.path", "x if os.path.sep else -x", "x"),
        ("from math import e", "x * e", "x * 2.718281828459045"),
        ("from math import no_such_name", "x * no_such_name", "x + 1"),
    ],
)
def test_an_import_that_may_fail_is_made_once(tmp_path: Path, written: str, read: str, expected: str) -> None:
    source = f"""
        import torch
        def f(x):
            try:
                {written}  # HERE
                return {read}
            except ImportError:
                return x + 1
    """
    (changed,) = proposals(tmp_path, source, edits_of_functions.hoist_import)
    exec(changed, ran := {})
    x = torch.ones(2)
    wanted = eval(expected, {"x": x})
    torch.testing.assert_close(ran["f"](x), wanted)
    graphs = CountingBackend()
    torch.testing.assert_close(torch.compile(ran["f"], backend=graphs, fullgraph=True)(x), wanted)


TRIED = """
    import torch
    def f(x):
        try:
            import math  # HERE
        except ImportError:
            x = -x
        return x
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("except ImportError", "except OSError"),
        ("import math", "import math, os"),
        ("import math", "from math import *"),
    ],
)
def test_another_import_stays(tmp_path: Path, old: str, new: str) -> None:
    assert proposals(tmp_path, TRIED, edits_of_functions.hoist_import)
    assert proposals(tmp_path, TRIED.replace(old, new), edits_of_functions.hoist_import) == []


DRAWN = """
    import torch
    generator = torch.Generator()
    def f(x, n):
        y = x + 1
        return y + torch.randn(y.shape, generator=generator, dtype=torch.float64) - torch.zeros(1)  # HERE
"""


@pytest.mark.parametrize("sizes", ["y.shape", "y.size()", "2, 3", "(2, 3)"])
def test_a_tensor_is_drawn_from_a_generator_in_an_op(tmp_path: Path, ns: str, sizes: str) -> None:
    source = DRAWN.replace("y.shape", sizes)
    (changed,) = proposals(tmp_path, source, edits_of_draws.draw_tensor_as_op, "torch.randn", "", "f", "system")
    exec(changed.replace("program::", f"{ns}::"), ran := {})
    exec(textwrap.dedent(source), before := {})
    graphs = CountingBackend()
    compiled, x = torch.compile(ran["f"], backend=graphs, fullgraph=True), torch.ones(2, 3)
    for module in (ran, before):
        module["generator"].manual_seed(3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, 2), before["f"](x, 2), rtol=0, atol=0)
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("generator = torch", "other = torch"),
        ("y = x + 1", "y = generator = x + 1"),
        ("f(x, n)", "f(x, generator)"),
        ("y.shape", "n"),
        ("torch.randn", "torch.randperm"),
        ("torch.float64", "x.dtype"),
    ],
)
def test_other_draws_of_tensors_stay(tmp_path: Path, old: str, new: str) -> None:
    assert old in DRAWN
    source = DRAWN.replace(old, new, 1)
    assert proposals(tmp_path, source, edits_of_draws.draw_tensor_as_op, "torch.randn", "", "f", "system") == []
