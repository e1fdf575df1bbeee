"""Declared ops in ONNX: a function of the reference for each form in which a program calls the op."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor, nn
from torch.export import Dim

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap.packaging.onnx import export_onnx
from shiplap_testing.effort import sampled

pytestmark = pytest.mark.usefixtures("onnx_operators")


@sl.op("onnx_ops::rms_norm")
def rms_norm(x: Float[Tensor, "n c"], weight: Float[Tensor, "c"], eps: float = 1e-6) -> Float[Tensor, "n c"]:
    """Scale each row to a root mean square of one."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@sl.op("onnx_ops::pick")
def pick(
    tables: list[Float[Tensor, "n c"]], index: Int64[Tensor, "m"], bias: Float[Tensor, "c"] | None = None
) -> tuple[Float[Tensor, "m c"], Float[Tensor, "c"]]:
    """Rows of the sum of the tables, and the sum of all rows."""
    total = torch.stack(tables).sum(0)
    rows = total[index]
    return (rows if bias is None else rows + bias), total.sum(0)


@sl.op("onnx_ops::add_", mutates="x")
def add_(x: Float[Tensor, "n"]) -> None:
    """Add one in place."""
    x.add_(1)


@sl.op("onnx_ops::eigen")
def eigen(x: Float[Tensor, "n n"]) -> Float[Tensor, "n"]:
    """Singular values, which ONNX has no operator for."""
    return torch.linalg.svdvals(x)


@sl.op("onnx_ops::positive", bounds={"m": "n"})
def positive(x: Float[Tensor, "n"]) -> Int64[Tensor, "m"]:
    """Return where ``x`` is more than 0."""
    return (x > 0).nonzero()[:, 0]


@sl.op("onnx_ops::shifted", outputs=("left", "right", "same"))
def shifted(
    x: Int32[Tensor, "n"], by: Int64[Tensor, "n"]
) -> tuple[Int32[Tensor, "n"], Int64[Tensor, "n"], Float32[Tensor, ""]]:
    """Return shifts by a number and by a tensor, and a tensor of its own."""
    return (x << 3) >> 1, (x >> by) | (x.long() << by), torch.ones(()).float()


@sl.op("onnx_ops::kept", outputs=("twice", "same"))
def kept(x: Float32[Tensor, "n"]) -> tuple[Float32[Tensor, "n"], Float32[Tensor, "n"]]:
    """Return twice the values, and the values, which no operator changes."""
    return x * 2, x.float()


@sl.op("onnx_ops::parts")
def parts(x: Float[Tensor, "n c"], sizes: list[int]) -> list[Float[Tensor, "m c"]]:
    """Return the parts of twice ``x`` that have these numbers of rows."""
    return [t * 2 for t in x.split(sizes)]


@sl.op("onnx_ops::sums", outputs=("by_row", "by_column", "total"))
def sums(
    x: Float[Tensor, "n c"], rows: bool, columns: bool
) -> tuple[Float[Tensor, "n"] | None, Float[Tensor, "c"] | None, Float[Tensor, ""]]:
    """Return sums of ``x``: along rows and columns where these are wanted, and over both."""
    return x.sum(1) if rows else None, x.sum(0) if columns else None, x.sum()


class Plain(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> tuple[Tensor, ...]:
        return *shifted(x, by), *kept(by.float())


@pytest.mark.long
def test_shifts_and_results_that_are_inputs_have_forms(tmp_path: Path) -> None:
    args = torch.tensor([-9, 7, 1 << 20, -1], dtype=torch.int32), torch.tensor([1, 2, 3, 0])
    export_onnx(torch.export.export(Plain(), args), tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    wanted = [*shifted.reference(*args), *kept.reference(args[1].float())]
    torch.testing.assert_close(run_session(session, *args), wanted)


class Several(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [*parts(x, [2, 3]), sums(x, True, False)[0], *sums(x, False, True)[1:], sums(x, False, False)[2]]


@pytest.mark.long
def test_results_may_be_a_list_or_absent(tmp_path: Path) -> None:
    export_onnx(torch.export.export(Several(), (torch.ones(5, 3),)), tmp_path / "net.onnx")
    x, session = torch.randn(5, 3), onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    torch.testing.assert_close(run_session(session, x), [x[:2] * 2, x[2:] * 2, x.sum(1), x.sum(0), x.sum(), x.sum()])


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[positive(x)] * 2


@pytest.mark.long
def test_a_program_may_be_exported_again_after_onnx(tmp_path: Path) -> None:
    program = torch.export.export(Chosen(), (torch.randn(9),), dynamic_shapes=({0: Dim.DYNAMIC},))
    for _ in range(2):
        export_onnx(program, tmp_path / "net.onnx")
        program = program.run_decompositions({})
    x = torch.randn(30)
    torch.testing.assert_close(program.module()(x), Chosen()(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        rows, total = pick([x, x * 2], index, self.weight)
        plain, _ = pick([x], index)
        return rms_norm(self.linear(x), self.weight, 1e-3).relu(), rms_norm(x, self.weight), rows + plain, total


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    net, path = Net().eval(), tmp_path_factory.mktemp("exported") / "net.onnx"
    program = torch.export.export(
        net, (torch.randn(5, 8), torch.tensor([0, 3])), dynamic_shapes=({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    )
    assert export_onnx(program, path).ops == ("onnx_ops::pick", "onnx_ops::rms_norm")
    onnx.checker.check_model(str(path))
    return net, path


def run_session(session: onnxruntime.InferenceSession, *args: Tensor) -> list[Tensor]:
    named = {given.name: value.numpy() for given, value in zip(session.get_inputs(), args, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, named)]


@pytest.mark.long
def test_a_model_runs_equal_at_every_size(exported: tuple[Net, Path]) -> None:
    net, session = exported[0], onnxruntime.InferenceSession(str(exported[1]))
    for rows, picked in ((5, 2), (1, 1), (3000, 17), (4, 0)):
        args = torch.randn(rows, 8), torch.randint(0, rows, (picked,))
        with torch.no_grad():
            expected = net(*args)
        for got, want in zip(run_session(session, *args), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)  # sums of 3,000 rows in float32


def test_each_form_of_a_call_is_one_function(exported: tuple[Net, Path]) -> None:
    model = onnx.load(exported[1])
    ours = [function for function in model.functions if function.domain == "onnx_ops"]
    assert sorted(function.name.rpartition("_")[0] for function in ours) == ["pick", "pick", "rms_norm", "rms_norm"]
    calls = [node.op_type for node in model.graph.node if node.domain == "onnx_ops"]
    assert sorted(calls) == sorted(function.name for function in ours)


def test_the_model_needs_no_torch(exported: tuple[Net, Path]) -> None:
    program = f"""
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession({str(exported[1])!r})
x, index = (given.name for given in session.get_inputs())
assert session.run(None, {{x: numpy.ones((3, 8), "float32"), index: numpy.zeros(2, "int64")}})[2].shape == (2, 8)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("op", "args", "got"),
    [
        (eigen, (torch.randn(3, 3),), "svd"),
        (add_, (torch.randn(3),), "it writes to an argument"),
    ],
    ids=["no operator", "a mutation"],
)
def test_an_op_without_a_form_is_named(op: Any, args: tuple[Tensor, ...], got: str, tmp_path: Path) -> None:
    class Calls(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            copied = [value.clone() for value in values]
            result = op(*copied)
            return copied[0] if result is None else result

    program = torch.export.export(Calls(), args)
    with pytest.raises(ShiplapError) as caught:
        export_onnx(program, tmp_path / "net.onnx")
    assert caught.value.id == "SL321"
    assert got in str(caught.value)
    assert op.spec.name in str(caught.value)
    assert not (tmp_path / "net.onnx").exists()


def test_the_packages_for_onnx_are_named_where_they_are_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shiplap.packaging.onnx.PACKAGES", ("onnx", "no_such_package"))
    program = torch.export.export(Net().eval(), (torch.randn(5, 8), torch.tensor([0, 3])))
    with pytest.raises(ShiplapError, match="no_such_package") as caught:
        export_onnx(program, tmp_path / "net.onnx")
    assert str(caught.value).startswith("SL322:")


@sl.op("onnx_ops::scale_to_one")
def scale_to_one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Divide by the sum, which has to be positive, where it is above one."""
    if not bool((x >= 0).all()):
        raise ValueError(f"x[{int((x < 0).nonzero()[0, 0])}] is negative")
    if x.shape[0] == 0:
        return x.clone()
    total: Tensor = x.sum()
    if total > 1:
        return x / total
    return x * 1


@sl.op("onnx_ops::find", bounds={"m": "n"})
def find(
    keys: Int64[Tensor, "n"], wanted: Int64[Tensor, "n"], rows: int
) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "rows"]]:
    """Return the places of those wanted keys that are among the keys, and as many zeros as there are rows."""
    assert keys.shape[0] == 0 or keys.unique().shape[0] > 0
    ordered, order = keys.sort(stable=True)
    ordered = torch.cat([ordered, ordered.new_full((1,), 2**62)])
    at = torch.searchsorted(ordered, wanted)
    return order[at[ordered[at] == wanted]], keys.new_zeros(rows)


class Conditions(nn.Module):
    def forward(self, x: Tensor, keys: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        return scale_to_one(x), *find(keys, wanted, x.shape[0])


@pytest.fixture(scope="module")
def conditions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose references raise, branch and have results of sizes that the data decide."""
    any_size = {0: Dim.DYNAMIC}
    args = torch.rand(5), torch.arange(7), torch.arange(7)
    program = torch.export.export(Conditions(), args, dynamic_shapes=(any_size, any_size, any_size))
    export_onnx(program, tmp_path_factory.mktemp("conditions") / "net.onnx")
    return tmp_path_factory.getbasetemp() / "conditions0" / "net.onnx"


@pytest.mark.long
def test_references_may_branch_on_their_data_and_on_sizes(conditions: Path) -> None:
    session = onnxruntime.InferenceSession(str(conditions))
    for rows, scale in ((5, 0.01), (5, 9.0), (1, 1.0), (0, 1.0), (400, 1.0)):
        keys = torch.randperm(rows + 3)
        args = torch.rand(rows) * scale, keys, keys.flip(0) * 2 - 1
        for got, want in zip(run_session(session, *args), Conditions()(*args), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.long
def test_a_reference_that_raises_is_a_run_that_fails_with_its_words(conditions: Path) -> None:
    session = onnxruntime.InferenceSession(str(conditions))
    good = torch.ones(2), torch.arange(3), torch.arange(3)
    for _ in range(2):
        with pytest.raises(Exception, match=r"ValueError: x\[\?\] is negative"):
            run_session(session, torch.tensor([1.0, -1.0]), *good[1:])
        assert run_session(session, *good)[0].tolist() == [0.5, 0.5], "the session goes on"


@sl.op("onnx_ops::spread")
def spread(x: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "n c"], Float[Tensor, "c"]]:
    """Return rows less the first, in units of the deviation, and the deviation, which needs two rows."""
    if bool((x > 100).any()):
        raise ValueError("a value is too large")
    if not x.shape[0]:
        return x.clone(), x.new_full((x.shape[1],), 7)
    deviation = x.std(0) if x.shape[0] > 1 else x.new_ones(x.shape[1])
    return (x - x[0]) / deviation, deviation


class Spread(nn.Module):
    def __init__(self, *results: int) -> None:
        super().__init__()
        self.results = results

    def forward(self, x: Tensor) -> Any:
        made = spread(x)
        return tuple([made[i] for i in self.results])


@pytest.mark.long
@pytest.mark.parametrize("results", sampled([(0, 1), (0,), (1,)], long=["(0, 1)", "(0,)"]))
def test_comparisons_with_no_row_and_one_row_and_checks_of_an_unused_result_are_kept(
    results: tuple[int, ...], tmp_path: Path
) -> None:
    net = Spread(*results)
    export_onnx(torch.export.export(net, (torch.rand(5, 3),), dynamic_shapes=({0: Dim.DYNAMIC},)), tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"))
    for rows in (0, 1, 2, 3, 40):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(run_session(session, x), list(net(x)))
    with pytest.raises(Exception, match="ValueError: a value is too large"):
        run_session(session, torch.full((2, 3), 101.0))


@sl.op("onnx_ops::capped")
def capped(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Double the values if one of them is negative, and refuse values above nine."""
    if bool((x < 0).any()):
        x = x * 2
    if not bool((x <= 9).all()):
        raise ValueError("a value is too large")
    return x * 1


@pytest.mark.long
def test_a_check_may_follow_a_branch(tmp_path: Path) -> None:
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return capped(x)

    export_onnx(torch.export.export(Calls(), (torch.rand(2),)), tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    for values, want in (([1.0, 9.0], [1.0, 9.0]), ([-1.0, 4.0], [-2.0, 8.0])):
        assert run_session(session, torch.tensor(values))[0].tolist() == want
    for values in ([1.0, 10.0], [-1.0, 5.0]):
        with pytest.raises(Exception, match="ValueError: a value is too large"):
            run_session(session, torch.tensor(values))


@sl.op("onnx_ops::halve_until")
def halve_until(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Halve until no value is above one."""
    while bool((x > 1).any()):
        x = x / 2
    return x


@sl.op("onnx_ops::first_rows")
def first_rows(x: Float[Tensor, "n"], count: Int64[Tensor, "1"]) -> Float[Tensor, "n"]:
    """Zeros behind the first rows."""
    return torch.cat([x[: int(count[0])], x[int(count[0]) :] * 0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "args", "got"),
    sampled(
        [
            pytest.param(*case)
            for case in [
                (halve_until, (torch.rand(3),), "ways through it|a loop"),
                (first_rows, (torch.rand(3), torch.tensor([1])), "reads a number of a tensor in Python"),
            ]
        ],
        1,
    ),
    ids=["a loop", "a number"],
)
def test_a_reference_that_cannot_be_traced_is_refused(
    op: Any, args: tuple[Tensor, ...], got: str, tmp_path: Path
) -> None:
    class Calls(nn.Module):
        def forward(self, *values: Tensor) -> Any:
            return op(*values)

    with pytest.raises(ShiplapError, match=got) as caught:
        export_onnx(torch.export.export(Calls(), args), tmp_path / "net.onnx")
    assert (caught.value.id, caught.value.where) == ("SL321", op.spec.name)
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.long
def test_distinct_halves_are_not_rounded_to_integers(tmp_path: Path) -> None:
    class Distinct(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.unique(x, return_inverse=True)

    x = torch.tensor([[0.25, 0.5], [0.25, -1.5]], dtype=torch.float16)
    export_onnx(torch.export.export(Distinct(), (x,)), tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    values, inverse = run_session(session, x)
    assert (values.tolist(), inverse.tolist()) == ([-1.5, 0.25, 0.5], [[1, 2], [1, 0]])


def test_all_ops_without_a_form_are_named_at_once(tmp_path: Path) -> None:
    class Calls(nn.Module):
        def forward(self, x: Tensor, m: Tensor) -> Any:
            return first_rows(x, m[0, :1].long()), eigen(m)

    with pytest.raises(ShiplapError) as caught:
        export_onnx(torch.export.export(Calls(), (torch.rand(3), torch.rand(3, 3))), tmp_path / "net.onnx")
    assert caught.value.where == "onnx_ops::first_rows, onnx_ops::eigen"


@pytest.mark.long
def test_checks_are_left_out_by_a_word(tmp_path: Path) -> None:
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return scale_to_one(x)

    export_onnx(torch.export.export(Calls(), (torch.rand(3),)), tmp_path / "net.onnx", checks=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    torch.testing.assert_close(run_session(session, torch.tensor([1.0, 2.0, -1.0])), [torch.tensor([0.5, 1.0, -0.5])])


MODEL = """
import torch
from jaxtyping import Float
from torch import Tensor, nn
import shiplap as sl

@sl.op("{ns}::twice")
def twice(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2

class Net(nn.Module):
    def forward(self, x):
        return twice(x) + 1

model = Net()

def example_inputs():
    return torch.randn(3, 4),
"""


def test_the_command_writes_the_model(run: Any, ns: str, tmp_path: Path) -> None:
    (tmp_path / f"{ns}_net.py").write_text(MODEL.format(ns=ns))
    result = run("export", tmp_path / f"{ns}_net.py", tmp_path / "net.onnx", "--dynamic", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ops"] == [f"{ns}::twice"]
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    x = torch.randn(9, 2)
    torch.testing.assert_close(run_session(session, x), [x * 2 + 1])
    wrong = run("export", tmp_path / f"{ns}_net.py", tmp_path / "net.tflite")
    assert wrong.exit_code == 2
    assert "SL613" in wrong.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shiplap.packaging.onnx.PACKAGES", ("shiplap_absent",))
    program = torch.export.export(nn.ReLU(), (torch.randn(3),))
    with pytest.raises(ShiplapError, match="no package shiplap_absent") as caught:
        export_onnx(program, tmp_path / "net.onnx")
    assert caught.value.id == "SL322"


@pytest.mark.long
def test_a_result_whose_size_depends_on_data_is_checked_as_well(ns: str, tmp_path: Path) -> None:
    @sl.op(f"{ns}::positive", bounds={"m": "n"})
    def positive(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        if (x > 100).any():
            raise ValueError("a value is too large")
        return x[x > 0]

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept: Tensor = positive(x)
            return kept, kept * 2

    x = torch.tensor([1.0, -2.0, 3.0])
    program = torch.export.export(Positive(), (x,), dynamic_shapes=({0: Dim("n", max=100)},))
    session = onnxruntime.InferenceSession(str(export_onnx(program, tmp_path / "it.onnx").path))
    kept, twice = session.run(None, {"x": torch.tensor([-1.0, 4.0, 5.0, 6.0]).numpy()})
    assert (kept.tolist(), twice.tolist()) == ([4.0, 5.0, 6.0], [8.0, 10.0, 12.0])
    with pytest.raises(Exception, match="a value is too large"):
        session.run(None, {"x": torch.tensor([1.0, 101.0]).numpy()})
