"""What varied is named, once per function and argument; too many versions are a break."""

from __future__ import annotations

from pathlib import Path

import pytest

from shiplap.doctor import Diagnosis, Recompile
from shiplap.doctor.places import make_place
from shiplap.doctor.recompiles import VARIATION_KINDS, GuardFailure, _is_written, find_reader, parse_failed_guard
from tests.doctor.programs import here, write

SOURCE = """
import torch

@torch.compile(backend="eager", dynamic=False)
def sized(x):
    return x + 1

@torch.compile(backend="eager")
def ranked(x):
    return x + 1

@torch.compile(backend="eager")
def typed(x):
    return x + 1

@torch.compile(backend="eager")
def flagged(x, flag):
    return x + 1 if flag else x

@torch.compile(backend="eager")
def cut(x):
    x = x * 2
    torch._dynamo.graph_break()
    return x + 1

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0
    def forward(self, x):
        self.step += 1
        return x + self.step

for n in range(2, 14): sized(torch.ones(n))
for shape in ((2,), (2, 2)): ranked(torch.ones(shape))
for dtype in (torch.float32, torch.float64): typed(torch.ones(2, dtype=dtype))
for flag in ("a", ""): flagged(torch.ones(2), flag)
for n in (2, 3): cut(torch.ones(n))
counting = torch.compile(Counting(), backend="eager")
for _ in range(3): counting(torch.ones(2))

@torch.compile(backend="cudagraphs")
def captured(x):
    return x + 1

captured(torch.ones(2))
"""


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return here(write(tmp_path_factory.mktemp("recompiles"), SOURCE))


def of(diagnosis: Diagnosis, function: str) -> Recompile:
    (only,) = (r for r in diagnosis.recompiles if r.place.code.startswith(f"def {function}("))
    return only


@pytest.mark.parametrize(
    ("function", "cause", "subject", "values", "times"),
    [
        ("sized", "size", "x, dim 0", tuple(map(str, range(2, 11))), 8),
        ("ranked", "rank", "x", ("1", "2"), 1),
        ("typed", "dtype", "x", ("Float", "Double"), 1),
        ("flagged", "value", "flag", ("'a'",), 1),
        ("forward", "counter", "self.step", ("0", "1"), 2),
    ],
)
def test_what_varied(
    diagnosis: Diagnosis, function: str, cause: str, subject: str, values: tuple[str, ...], times: int
) -> None:
    r = of(diagnosis, function)
    assert (r.cause, r.subject, r.values, r.times) == (cause, subject, values, times)
    assert r.fix == VARIATION_KINDS[cause].fix
    assert r.limit is (function == "sized")


def test_an_attribute_that_a_method_of_the_class_sets_is_changed_by_the_function(tmp_path: Path) -> None:
    """Rotary embeddings set the length of their table in a method, which forward calls for a longer sequence."""
    source = """
        class Table:
            def forward(self, n):
                self._grow(n)
                self._show()
            def _grow(self, n):
                self.length = n
                self.forward
            def _show(self):
                self._show()
            def reset(self):
                self.step = 0
        class Other:
            def forward(self, n):
                self._grow(n)
    """
    path = write(tmp_path, source)
    at = [make_place(str(path), n) for n, row in enumerate(path.read_text().splitlines(), 1) if "def forward" in row]
    assert _is_written("self.length", at[0])
    assert not _is_written("self.step", at[0])
    assert not _is_written("self.length", at[1])


def test_halves_of_a_cut_function_are_one_function(diagnosis: Diagnosis) -> None:
    (r,) = (r for r in diagnosis.recompiles if r.place.function == "cut")
    assert (r.times, r.subject, r.place.code) == (2, "x, dim 0", "def cut(x):")


def test_too_many_versions_are_a_break(diagnosis: Diagnosis) -> None:
    (b,) = (b for b in diagnosis.breaks if b.cause == "recompiles")
    assert (b.registry, b.skipped, b.place.function) == ("GB0039", True, "sized")


def test_the_example_names_the_argument(diagnosis: Diagnosis) -> None:
    assert "mark_dynamic(x, 0)" in of(diagnosis, "sized").example
    assert of(diagnosis, "forward").example == ""  # self.step is no variable of the caller


def test_an_unused_cuda_graph_says_why(diagnosis: Diagnosis) -> None:
    (skip,) = diagnosis.skips
    assert skip.reason == "cpu device (arg0_1)"
    assert skip.place is not None
    assert (Path(skip.place.file).name, skip.place.function) == ("program.py", "captured")
    assert "GPU" in skip.fix
    assert "1 CUDA graph skip" in diagnosis.summary


@pytest.mark.parametrize(
    ("guard", "failure"),
    [
        (
            "0/0: tensor 'x' size mismatch at index 1. expected 4, actual 5",
            GuardFailure("size", "x, dim 1", ("4", "5")),
        ),
        (
            "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 1",
            GuardFailure("small", "x, dim 0", ("4", "1")),
        ),
        (
            "0/0: tensor 'x' stride mismatch at index 0. expected 1, actual 2",
            GuardFailure("stride", "x, dim 0", ("1", "2")),
        ),
        (
            "0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0",
            GuardFailure("grad", "x", ("requires_grad=0",)),
        ),
        ("1/0: n == 3   # return x*n  # a.py:4 in f\\nUser stack trace:", GuardFailure("value", "n", ("3",))),
        ("1/0: (1.0 + ((-1)*lam)) == 0.5  # x", GuardFailure("value", "(1.0 + ((-1)*lam))", ("0.5",))),
        ("1/0: (1.0 + ((-1)*lam)) < 0.5  # x", GuardFailure("value", "lam")),
        ("1/0: 2.0*self.rate < 0.5  # x", GuardFailure("attribute", "self.rate")),
        ("1/0: self.flag == True  # return x", GuardFailure("attribute", "self.flag", ("True",))),
        ("1/0: ___check_type_id(n, 139), type=<class 'float'>  # x", GuardFailure("type", "n")),
        ("1/0: ___check_obj_id(fn, 139)  # x", GuardFailure("identity", "fn")),
        ("1/0: len(xs) == 2  # x", GuardFailure("length", "xs")),
        ("1/0: 2 <= hidden.size()[0]  # x", GuardFailure("small", "hidden, dim 0")),
        ("1/0: not ___dict_contains(1404, G['CACHE'])  # if x not in CACHE", GuardFailure("length", "CACHE")),
        ("1/0: not dt  # if not dt", GuardFailure("length", "dt")),
        ("1/0: self.cos is None  # if self.cos is None", GuardFailure("lazy", "self.cos", ("None",))),
        ("1/0: mask is None  # if mask is not None", GuardFailure("optional", "mask", ("None",))),
        ("1/0: L['mask'] is None  # if mask is not None", GuardFailure("optional", "mask", ("None",))),
        ("1/0: L['self']._modules['attn'].scale == 2  # x", GuardFailure("attribute", "self.attn.scale", ("2",))),
        ("1/0: self.drop.training == True  # x", GuardFailure("mode", "self.drop.training", ("True",))),
        ("1/0: len(G['__import___main__'].kept) == 1  # kept", GuardFailure("length", "kept")),
        ("1/0: len(__import_a_dot_b.kept) == 1  # kept", GuardFailure("length", "a.b.kept")),
        (
            "1/0: Cache line invalidated because L['___stack0'] got deallocated",
            GuardFailure("carried", "___stack0"),
        ),
        (
            "0/0: tensor 'self._parameters['w']' size mismatch at index 0. expected 4, actual 5. Guard failed on a "
            "parameter, consider using torch._dynamo.config.force_parameter_static_shapes = False",
            GuardFailure("parameter", "self.w, dim 0", ("4", "5")),
        ),
        ("1/0: GLOBAL_STATE changed: grad_mode ", GuardFailure("grad", "the grad mode or another global setting")),
        ("0/0: x.stride()[0] == x.size()[1]  # x @ w", GuardFailure("stride", "x")),
        ("0/0: L['x'].size()[1] <= 6  # x @ w", GuardFailure("size", "x, dim 1")),
        ("0/0: 2 <= L['x'].size()[1] <= 6  # x @ w", GuardFailure("size", "x, dim 1")),
        ("0/0: 2 <= L['x'].size()[1]  # x @ w", GuardFailure("small", "x, dim 1")),
        ("1/1: L['self'].step < 3  # if self.step < 3", GuardFailure("attribute", "self.step", ("3",))),
        ("1/1: L['n'] >= 2  # x[:n]", GuardFailure("value", "n", ("2",))),
        ("1/1: 0 <= cache.cached <= 9  # k[a:b] = x", GuardFailure("attribute", "cache.cached")),
        ("1/1: 3*n + 2 < 14  # x[:n]", GuardFailure("value", "n")),
        ("1/1: a + b < 14  # x[:n]", GuardFailure("other", "a")),
        (
            "0/0: expected type of 'wave' to be a tensor type, ' but found <class 'list'>",
            GuardFailure("type", "wave"),
        ),
        (
            "1/0: not L['fn']._forward_hooks[list(dict.keys(L['fn']._forward_hooks))[0]].__closure__[0].cell_contents",
            GuardFailure(
                "length",
                "L['fn']._forward_hooks[list(dict.keys(L['fn']._forward_hooks))[0]].__closure__[0].cell_contents",
            ),
        ),
        ("1/0: something new", GuardFailure("other", "something")),
    ],
)
def test_guards(guard: str, failure: GuardFailure) -> None:
    assert parse_failed_guard(guard) == failure


def test_the_line_that_read_what_varied(tmp_path: Path) -> None:
    (file := tmp_path / "model.py").write_text("def forward(self, x):\n    return x[self.index]\n")
    at = find_reader(f"0/0: self.index == 3  # return x[self.index]  # {file}:2 in forward", str(file))
    assert at is not None
    assert (at.line, at.code, at.function) == (2, "return x[self.index]", "forward")
    assert find_reader("0/0: tensor 'x' dtype mismatch", str(file)) is None
