"""A value is computed in front of the compiled function only where it is the same there."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch

from shiplap.doctor.edits import Case
from shiplap.doctor.edits_in_front import compute_in_front, compute_sizes_in_front, condition_in_front
from shiplap.doctor.edits_of_sizes import compile_size_outcomes
from shiplap.doctor.scratch import apply_edits
from tests.doctor.programs import CountingBackend, proposals

CONTEXT = """
    import contextvars
    import torch
    SCALE = contextvars.ContextVar("SCALE", default=1.0)
    class Net(torch.nn.Module):
        def forward(self, x, shift=0.0):
            y = x * 2
            scale = SCALE.get()  # HERE
            return y * scale + shift
    run = torch.compile(Net(), backend=count)
"""


def loaded(text: str, monkeypatch: pytest.MonkeyPatch, count: CountingBackend) -> dict[str, Any]:
    """The names of the module that the source code ``text`` makes, compiled by ``count``."""
    module = ModuleType("edited")
    module.__dict__["count"] = count
    # The compiler imports the module of a function that it traces.
    monkeypatch.setitem(sys.modules, "edited", module)
    exec(text, vars(module))
    return vars(module)


def test_a_call_is_made_in_front_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_is, as_tensor = proposals(tmp_path, CONTEXT, compute_in_front, "SCALE.get", "", "forward", "object")
    assert "compile_with({'scale_get_value': lambda self, x, shift=0.0: SCALE.get()}, backend=count)(Net())" in as_it_is
    count = CountingBackend()
    ran = loaded(as_tensor, monkeypatch, count)
    x = torch.randn(3, requires_grad=True)
    for scale in (1.0, 0.5, 0.25):
        ran["SCALE"].set(scale)
        torch.testing.assert_close(ran["run"](x, shift=1.0), 2 * x * scale + 1)
    assert count.frame_count == 1
    assert ran["Net"]()(x).shape == x.shape  # other callers pass nothing


CHOICE = """
    import torch
    def negated(x):
        return -x
    class Box:
        def grown(self, x):
            return x + 1
    KEPT = [negated, torch.flipud, negated, torch.flipud]
    class Net(torch.nn.Module):
        def forward(self, x):
            op = KEPT.pop()  # HERE
            return op(x) * 2
    run = torch.compile(Net(), backend=count)
"""


def test_each_function_of_a_module_has_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = proposals(tmp_path, CHOICE, compute_in_front, "KEPT.pop", "", "forward", "system")
    count, torch_compile = CountingBackend(), torch.compile
    ran, made = loaded(found, monkeypatch, count), list[Any]()

    def compile(fn: Any, **options: Any) -> Any:
        made.append(fn)
        return torch_compile(fn, **options)

    monkeypatch.setattr(torch, "compile", compile)
    x = torch.arange(4.0)
    assert [ran["run"](x)[0].item() for _ in range(4)] == [6.0, 0.0, 6.0, 0.0]
    assert (len(made), count.frame_count) == (2, 2)
    # A function that is made anew for each call would have a version in each.
    ran["KEPT"] += [lambda x: x + 1, lambda x: x + 2]
    assert [ran["run"](x)[0].item() for _ in range(2)] == [4.0, 2.0]
    ran["KEPT"] += [ran["Box"]().grown, ran["Box"]().grown]
    assert [ran["run"](x)[0].item() for _ in range(2)] == [2.0, 2.0]
    assert len(made) == 3


@pytest.mark.parametrize("given", ["net", "net.forward", "Net()"])
def test_an_attribute_is_read_from_the_compiled_object(tmp_path: Path, given: str) -> None:
    source = CONTEXT.replace("SCALE.get()", "self.kept.pop()").replace("run =", "net = Net()\n    run =")
    source = source.replace("compile(Net()", f"compile({given}")
    found, _ = proposals(tmp_path, source, compute_in_front, "self.kept.pop", "", "forward", "object")
    assert "lambda self, x, shift=0.0: self.kept.pop()" in found
    assert f"({given})" in found


def test_each_of_several_compiled_objects_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self, n):
            super().__init__()
            self.kept = [n, None]
        def forward(self, x):
            n = self.kept.pop()  # HERE
            return x if n is None else x * n
    runs = []
    for net in (Net(2.0), Net(3.0)):
        runs.append(torch.compile(net, backend=count))
    """
    source = dedent(source).lstrip()
    (tmp_path / "program.py").write_text(source)
    case = Case(tmp_path, "program.py", "program.py", 7, "forward", "self.kept.pop", "", frames=(("program.py", 6),))
    texts = apply_edits({}, tmp_path, next(compute_in_front(case)))
    assert texts is not None
    ran = loaded(texts["program.py"], monkeypatch, CountingBackend())
    x = torch.ones(1)
    # The call that returns None is not made twice.
    assert [[float(run(x)) for run in ran["runs"]] for _ in range(2)] == [[1.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y = x * 2", "y = x * 2\n            if x is None: return x"),  # the call may not be reached
        ("y = x * 2", "print(x)\n            y = x * 2"),  # what it reads may change
        ("y = x * 2", "y = torch.rand(3)"),  # it may draw a number as well
        ("SCALE.get()", "SCALE.get(y)"),
        ("SCALE.get()", "time.time()"),
        ("SCALE.get()", "SCALE.get(*x)"),
        ("def forward(self, x, shift=0.0)", "def forward(self, x, shift=0.0, **more)"),
        ("scale = SCALE", "if shift: scale = SCALE"),
        ("run =", "Net().register_forward_pre_hook(print)\n    run ="),
        ("SCALE.get()", "SCALE.get() if self.training else 1.0"),  # it is made in some calls alone
        ("SCALE.get()", "self.training and SCALE.get()"),
        ("SCALE.get()", "[SCALE.get() for _ in range(2)]"),
        ("SCALE.get()", "(lambda: SCALE.get())"),
        ("scale = SCALE.get()  # HERE", "while SCALE.get(): break  # HERE"),
        ("SCALE.get()", "self.step(x) + SCALE.get()"),
        ("y = x * 2", "y = self.step(x)"),
        ("y = x * 2", "y = step(x)"),
        ("y = x * 2", "y = [n for n in self.rows]"),
        ("SCALE.get()", "t.perf_counter_ns()"),
        ("SCALE.get()", "timeit.default_timer()"),
        ("SCALE.get()", "SCALE.get('''a\n  b''')"),
        ("shift=0.0", "shift=SCALE.get()"),
        ("def forward", "@torch.no_grad()\n        def forward"),
    ],
)
def test_a_call_that_may_differ_in_front_stays(tmp_path: Path, old: str, new: str) -> None:
    source = CONTEXT.replace(old, new)
    assert source != CONTEXT
    assert proposals(tmp_path, source, compute_in_front, "SCALE.get", "", "forward", "object") == []


@pytest.mark.parametrize(
    "clock",
    [
        "from time import perf_counter as tick",
        "import timeit\n    tick = timeit.default_timer",
        "def tick(): time.time()",
    ],
)
def test_a_clock_of_another_name_stays(tmp_path: Path, clock: str) -> None:
    source = CONTEXT.replace("SCALE.get()", "tick()").replace("import torch", f"import torch\n    {clock}")
    assert proposals(tmp_path, source, compute_in_front, "tick", "", "forward", "object") == []


def test_only_truth_values_have_versions(tmp_path: Path) -> None:
    """A text may be another one in each call."""
    as_it_is, _ = proposals(tmp_path, CONTEXT, compute_in_front, "SCALE.get", "", "forward", "object")
    assert "isinstance(each, bool))" in as_it_is


MASKED = """
    import torch
    @torch.compile(backend=count)
    def f(x, mask=None):
        if mask is not None and mask.all():  # HERE
            mask = None
        return x if mask is None else x * mask
"""


def test_a_condition_on_an_argument_is_evaluated_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = proposals(tmp_path, MASKED, condition_in_front, "", "", "f", "branch")
    count = CountingBackend()
    f = loaded(text, monkeypatch, count)["f"]
    x, full, half = torch.ones(2), torch.tensor([True, True]), torch.tensor([True, False])
    for mask in (full, half, None, full):
        torch.testing.assert_close(f(x, mask), x if mask is None else x * mask)
    assert count.frame_count == 1  # the version without a mask has no operation


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask is not None and mask.all()", "mask.all()"),  # it may be None
        ("mask.all()", "mask.bernoulli().all()"),  # a draw
        ("mask.all()", "check(mask)"),  # a function of the program may do anything
        ("if mask", "mask = mask * 2\n        if mask"),
        ("if mask", "mask.mul_(2)\n        if mask"),
    ],
)
def test_a_condition_that_may_differ_in_front_stays(tmp_path: Path, old: str, new: str) -> None:
    assert proposals(tmp_path, MASKED.replace(old, new), condition_in_front, "", "", "f", "branch") == []


SIZED = """
    import torch
    kept = {}
    def table(n):
        if n not in kept:
            kept[n] = torch.arange(float(n))
        return kept[n]
    @torch.compile(backend=count)
    def f(x):  # HERE
        return torch.sin(x) + table(x.shape[0])
"""


def test_a_table_that_depends_on_a_size_is_kept_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    source = dedent(SIZED).lstrip()
    (tmp_path / "program.py").write_text(source)
    line = source[: source.index("def f")].count("\n") + 1
    frames = (("program.py", line),)
    case = Case(tmp_path, "program.py", "program.py", line, "f", "x, dim 0", "", cause="size", frames=frames)
    (edits,) = compute_sizes_in_front(case)
    texts = apply_edits({}, tmp_path, edits)
    assert texts is not None
    count = CountingBackend()
    f = loaded(texts["program.py"], monkeypatch, count)["f"]
    for n in (4, 6, 9, 4):
        x = torch.randn(n)
        torch.testing.assert_close(f(x), torch.sin(x) + torch.arange(float(n)))
    assert count.frame_count == 1


# Calls that return early do not evaluate the condition.
BEHIND = ("n = x", "if x is LIMIT:\n            return x\n        n = x")


def test_conditions_on_sizes_give_calls_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import torch
    LIMIT = 6
    @torch.compile(backend=count)
    def f(x):  # HERE
        n = x.size(0)
        if n > LIMIT:
            x = x[:LIMIT]
        return x * 2
    """
    text, _ = proposals(tmp_path, source, compile_size_outcomes, "x, dim 0", "", "f", "size")
    assert "compile_each(lambda x: (x.size(0) > LIMIT,), backend=count, dynamic=True)" in text
    count = CountingBackend()
    f = loaded(text, monkeypatch, count)["f"]
    for n in (3, 4, 7, 9, 5):
        assert f(torch.ones(n)).shape == (min(n, 6),)
    assert count.frame_count == 2
    for old, new in (
        ("x.size(0)", "x.sum()"),
        ("def f(x)", "def f(x=None)"),
        ("n = x", "x = x[1:]\n        n = x"),
        BEHIND,
    ):
        changed = source.replace(old, new)
        assert proposals(tmp_path, changed, compile_size_outcomes, "x, dim 0", "", "f", "size") == []
