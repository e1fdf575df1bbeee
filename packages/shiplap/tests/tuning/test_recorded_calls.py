"""Recorded calls: what is written, what reads back, and that native bindings do not hide calls."""

from __future__ import annotations

import json
import os

import pytest
import torch

import shiplap as sl
from shiplap.declare import Implementation, Kernel
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch import tuned_choices
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.sampling.work_estimate import parse_budget
from shiplap.tuning import recipe_of, record
from shiplap.tuning.engine import recipe_of_sizes
from shiplap.tuning.recorded_calls import read_calls
from shiplap_testing.forked import WITH_VERBS, python
from shiplap_testing.zoo.good import several
from tests.tuning import ops


def test_calls_are_recorded_once_with_counts(tmp_path):
    path = tmp_path / "sub" / "calls.jsonl"
    with record(path):
        for n in (3, 3, 5, 3):
            ops.mm(torch.randn(n, 8), torch.randn(8, 2))
        ops.mm(torch.randn(8, 3).T, torch.randn(8, 2))
        several(torch.randn(4, 2))
    ops.mm(torch.randn(7, 8), torch.randn(8, 2))
    first, *others = read_calls(path)
    assert (first.op, first.count, first.module) == ("tune_test::mm", 3, "tests.tuning.ops")
    assert first.recipe == "sizes(m=3, k=8, n=2), dtypes(Float='float32')"
    assert [c.recipe for c in others] == [
        "sizes(m=5, k=8, n=2), dtypes(Float='float32')",
        "sizes(m=3, k=8, n=2), dtypes(Float='float32'), layouts(a='transposed')",
        "sizes(n=4, c=2), dtypes(Float='float32')",
    ]
    assert tuned_choices.observer is None


def test_compiled_graphs_are_recorded_too(tmp_path, fresh_compiler):
    compiled = torch.compile(lambda a, b: ops.mm(a, b) * 2, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(3, 8), torch.randn(8, 2))
    with record(tmp_path / "calls.jsonl"):
        compiled(torch.randn(3, 8), torch.randn(8, 2))
    assert [c.recipe for c in read_calls(tmp_path / "calls.jsonl")] == ["sizes(m=3, k=8, n=2), dtypes(Float='float32')"]


def test_a_recorder_keeps_native_bindings_away(tmp_path, ns):
    @sl.op(f"{ns}::one")
    def one(x: ops.Float[ops.Tensor, "n"]) -> ops.Float[ops.Tensor, "n"]:
        return x + 1

    class Bound(Kernel):
        def run_call(self, call):
            return (call.args[0] + 1,)

    class Source(Implementation):
        name = "bound"

        def code_parts(self):
            yield "x", None

        def bind(self, spec, terms):
            kernel = Bound(spec, terms)
            kernel.native = NativeForm(tmp_path, "bound", frozenset(), 1, "", calls=5)
            return kernel

    one.kernel("cpu", Source())
    form = one.kernels["cpu"][0].native
    with record(tmp_path / "calls.jsonl"):
        assert form.calls == -1
        one(torch.ones(2))
    assert form.calls == 0
    assert [c.op for c in read_calls(tmp_path / "calls.jsonl")] == [one.spec.name]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "calls.jsonl"
    with record(path):
        ops.mm(torch.randn(3, 8), torch.randn(8, 2))
    path.write_text(path.read_text() + '{"op": "tune_test::mm", "dev')
    assert len(read_calls(path)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        "text",
        '{"op": 3, "device": "cpu", "recipe": ""}',
        '{"op": "a::b", "device": "cpu", "recipe": "__import__(1)"}',
    ],
)
def test_other_lines_are_refused_with_their_number(tmp_path, line):
    good = json.dumps({"op": "a::b", "device": "cpu", "recipe": "sizes(n=3)"})
    (tmp_path / "calls.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ShiplapError) as caught:
        read_calls(tmp_path / "calls.jsonl")
    assert (caught.value.id, caught.value.where) == ("SL609", f"{tmp_path}/calls.jsonl:3")


def test_a_profile_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ShiplapError, match="SL602: the file cannot be read"):
        read_calls(tmp_path / "calls.jsonl")


def test_a_file_that_cannot_be_written_is_said_and_the_call_is_served(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(ShiplapNotice, match="calls cannot be recorded"), record(tmp_path / "file" / "calls.jsonl"):
        ops.mm(torch.randn(3, 8), torch.randn(8, 2))


def test_the_variable_records_what_a_program_calls(tmp_path):
    code = "import torch; from tests.tuning import ops; ops.mm(torch.ones(3, 8), torch.ones(8, 2))"
    environment = {**os.environ, "SHIPLAP_RECORD": str(tmp_path / "calls.jsonl")}
    done = python("-c", code, env=environment, imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr
    assert [c.op for c in read_calls(tmp_path / "calls.jsonl")] == ["tune_test::mm"]


def test_recipes_of_calls_build_calls_of_the_same_bucket():
    from shiplap.tuning.inputs import draw_inputs

    x = torch.randn(6, 4, dtype=torch.float64)
    for a in (x, x.T.contiguous().T, x[:, :3], torch.randn(6, 8).double()[:, ::2], x[:1].expand(6, 4)):
        b = torch.randn(a.shape[1], 5, dtype=torch.float64)
        drawn = draw_inputs(ops.mm, recipe_of(ops.mm, (a, b)), "cpu")
        call = ops.mm.bind((a, b))
        assert ops.mm.rule.key(drawn.call) == ops.mm.rule.key(call)
        assert drawn.real[0].args[0].shape == a.shape


def test_sizes_make_recipes_and_say_what_is_missing():
    recipe = recipe_of_sizes(ops.mm, {"m": 3, "k": 4, "n": 5}, "bfloat16")
    assert str(recipe) == "sizes(m=3, k=4, n=5), dtypes(Float='bfloat16')"
    with pytest.raises(ShiplapError) as caught:
        recipe_of_sizes(ops.mm, {"m": 3, "q": 4})
    assert (caught.value.id, caught.value.got) == ("SL502", "unknown q, no k, no n")
    for size in (1e3, -3, "4", True):
        with pytest.raises(ShiplapError, match=f"SL502: the sizes do not fit the declaration(.|\n)*k={size!r}"):
            recipe_of_sizes(ops.mm, {"m": 3, "k": size, "n": 5})


def test_a_dtype_that_no_argument_admits_is_refused_and_not_replaced():
    sizes = {"m": 3, "k": 4, "n": 5}
    for dtype in ("float13", "int32"):
        with pytest.raises(ShiplapError, match="SL502: the dtype does not fit the declaration") as caught:
            recipe_of_sizes(ops.mm, sizes, dtype)
        assert caught.value.got == dtype
    assert "bfloat16" in caught.value.expected


def test_budgets():
    assert [parse_budget(b) for b in (3, "90s", "5m", "1.5h", "7")] == [3, 90.0, 300.0, 5400.0, 7.0]
    for text in ("", "5 apples", "-3s", "m", "nan", float("nan")):
        with pytest.raises(ShiplapError, match="SL612"):
            parse_budget(text)
