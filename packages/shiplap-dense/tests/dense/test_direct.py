"""Triton templates as kernels of their own, without a GPU: run by Triton's interpreter against the reference."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.codegen.triton import render_kernel
from shiplap.declare import template
from shiplap.declare.config import NO_CONFIG
from shiplap.declare.kernel import template_kernel
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.kernels.native import build_plan
from shiplap.kernels.triton import template_key
from shiplap.kernels.triton.template_key import DeviceTable
from shiplap.tuning import worker_process
from shiplap.tuning.candidate import declared_default, kernel_candidates
from shiplap_testing.forked import WITH_FAMILIES, interpreted, python

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "direct_cases.py"


def cases(home: Path, *options: str) -> dict[str, dict[str, Any]]:
    """A process of its own: Triton reads once whether it interprets."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "SHIPLAP_CACHE_DIR": str(home / "shiplap")}
    done = interpreted("-W", "ignore", SCRIPT, *options, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return cases(tmp_path_factory.mktemp("direct"), "--sample")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """With all checks of the audit, and all compiled cases."""
    return cases(tmp_path_factory.mktemp("direct"))


@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.long)])
def test_what_is_compiled_ahead_is_what_a_launch_looks_up(tmp_path, number):
    """For Hopper, by Triton's compiler, in threads: no GPU is needed up to the launch."""
    script = Path(__file__).parent / "compiled_ahead.py"
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = python("-W", "ignore", script, number, env=env, imported=WITH_FAMILIES)
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = json.loads(done.stdout)
    assert parsed["candidates"] == parsed["ahead"] == len(parsed["binaries"]) == number, "one kernel each"
    assert min(parsed["binaries"]) > 1000
    assert parsed["at launch"] == 0
    assert parsed["of another size"] == number, "which this counts"


RIGHT = [
    "mm",
    "mm bias",
    "mm transposed",
    "mm offset",
    "mm expanded",
    "mm strided",
    "mm one buffer",
    "mm one row",
    "mm no rows",
    "mm no columns",
    "mm even",
    "bmm",
    "int8_mm",
    "int8_mm even",
    "grouped_mm",
    "conv2d",
    "conv2d dilated",
    "conv2d channels apart",
    "gather",
    "gather unordered",
    "gather bias alone",
    "gather reflected",
    "gather scaled",
    "gather relu",
    "gather groups",
    "gather second config",
    "gather one row",
    "gather no rows",
    "gather of nothing",
    "gather views",
    "gather half",
    "gather in partial sums",
    "gather in partial sums, half",
]


@pytest.mark.parametrize("name", RIGHT)
def test_a_template_alone_is_right(results, name):
    result = results[name]
    assert "error" in result, result
    assert result["error"] < (2e-3 if name == "mm even" or name.endswith("half") else 1e-6), result


def test_a_planted_bug_is_seen(results):
    """The comparison that all others rest on can fail."""
    assert results["planted bug"]["error"] > 1e-2


def test_the_first_config_that_takes_the_call_runs(results):
    assert "BLOCK_K=16" in results["gather"]["config"]
    assert "BLOCK_K=32" in results["gather second config"]["config"]
    assert "SPLITS=3" in results["gather in partial sums"]["config"]
    assert results["gather too wide"] == {"refused": "BLOCK_K=16, BLOCK_N=16 do not hold a group"}
    assert results["mm nothing to add"] == {"refused": "k = 0"}
    assert "float64" in results["mm float64"]["refused"]


def test_what_an_eager_call_runs(results):
    assert results["eager template"] == {"ran": ["gathered"], "messages": []}
    assert results["eager library"] == {"ran": [], "messages": []}, "torch's product is no slow path"
    assert results["eager reference"]["ran"] == []
    (messages,) = results["eager reference"]["messages"]
    assert messages.endswith(
        "runs its reference (gathered: BLOCK_K=16, BLOCK_N=16 do not hold a group): correct, not fast"
    )


def test_partial_sums_are_added_behind_the_kernel(results):
    result = results["fused in partial sums"]
    assert result["error"] < 1e-6, result
    assert [k.split("_")[1] for k in result["kernels"]] == ["tem", "poi"], "the activation goes into the sum"


GROUPS = [f"bulk groups, {w}, {flat}" for w in ("rows left over", "ends past the rows") for flat in (True, False)]


@pytest.mark.parametrize("name", ["bulk", "bulk transposed", *GROUPS, "bulk groups transposed"])
def test_a_template_for_the_bulk_copy_engine(results, name):
    assert results[name]["error"] < 2e-3, results[name]


@pytest.mark.parametrize("name", ["bulk of odd rows", "bulk of no adjacent axis", "bulk at an odd address"])
def test_what_no_tensor_descriptor_describes_is_refused(results, name):
    assert results[name]["refused"].endswith("rows of a tensor descriptor start at 16 bytes")


def test_configs_are_candidates_of_tune(results):
    assert results["tuned"]["tried"] == 4
    assert results["tuned"]["wrong"] == []
    (skipped,) = results["tuned"]["skipped"]
    assert "compiled" in skipped


def test_a_choice_is_what_eager_calls_run(results):
    first, second = results["chosen 0"]["picked"], results["chosen 1"]["picked"]
    assert "BLOCK_K=16" in first
    assert "BLOCK_K=32" in second
    assert results["chosen too wide"]["picked"] == second, "a choice that does not take the call is not forced on it"


def test_the_audit_runs_it_like_any_kernel(results):
    assert results["audit numerics"]["verdict"] == "ok", results["audit numerics"]


@pytest.mark.long
@pytest.mark.parametrize("check", ["schema", "numerics", "addresses", "fresh", "large"])
def test_each_check_of_the_audit_runs_it_like_any_kernel(everything, check):
    assert everything[f"audit {check}"]["verdict"] == "ok", everything[f"audit {check}"]


def test_new_sizes_compile_nothing(results):
    result = results["renderings"]
    assert result["before"] == result["after"] > 0
    assert result["source"].startswith("def gathered(feats, weight, table, order, bias, out_ptr, size_table_0")


def test_a_table_is_built_once_for_the_sizes_that_it_looks_at(results):
    assert results["tables"] == {"tables": 2, "looked_at": ["dilation", "kh", "kw", "padding"]}


def test_the_same_source_is_fused_by_inductor(results):
    fused(results["fused"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["fused reflected", "fused groups"])
def test_the_same_source_is_fused_by_inductor_in_more_cases(everything, name):
    fused(everything[name])


def fused(result: dict[str, Any]) -> None:
    assert "failed" not in result, result
    assert [k[:16] for k in result["kernels"]] == ["triton_tem_fused"]
    assert result["error"] < 1e-6


# --- what needs no Triton: order, rules, tables -----------------------------------------------------------------------

SOURCE = '{{def_kernel()}}\n    {{store_output(("i",), "i", "i < 0")}}\n'


@pytest.fixture
def declare(ns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ops with a template ``scale``; ``template(op)`` binds it."""
    (tmp_path / "scale.triton.jinja").write_text(SOURCE)

    def made(**declaration: Any) -> sl.Op:
        def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x * 2

        op = sl.op(f"{ns}::scale", **declaration)(scale)
        monkeypatch.setattr(op, "reference", scale)
        return op

    def bind(op: sl.Op, device: str = "cpu", **keywords: Any) -> None:
        read = partial(template.read_template, op.spec, str(tmp_path / "ops.py"))
        bound = read(device, "scale.triton.jinja", grid=lambda sizes, config, cdiv: (1, 1, 1), **keywords)
        kernel = template_kernel(op.spec, bound)
        assert kernel is not None
        op._attach(kernel)

    return made, bind


def names(op: sl.Op, device: str = "cpu") -> list[tuple[str, bool]]:
    return [(k.name, k.template is not None) for k in op.kernels[device]]


def test_kernels_of_the_author_come_first(declare):
    made, bind = declare
    op = made()
    bind(op)
    op.kernel("cpu", lambda x: x + x, name="mine")
    assert names(op) == [("mine", False), ("scale", True)]
    op.kernel("cpu", lambda x: 2 * x, name="newer")
    assert names(op) == [("newer", False), ("mine", False), ("scale", True)]
    assert [k.name for k in op.native_kernels("cpu")] == ["newer", "mine"]
    bind(op)
    assert names(op)[-1] == ("scale", True)
    assert len(names(op)) == 3


def test_a_kernel_of_the_templates_name_stands_in_its_place(declare):
    made, bind = declare
    op = made()
    bind(op)
    op.kernel("cpu", lambda x: x + x, name="scale")
    assert names(op) == [("scale", False)]
    bind(op)
    assert names(op) == [("scale", False)]


def test_where_the_reference_is_a_library_call_it_stands_before_templates(declare, monkeypatch, recwarn):
    made, bind = declare
    op = made(reference_is_fast_on="cpu")
    bind(op)
    bind(op, "cuda")
    assert [k.name for k in op.eager_kernels("cuda")] == ["scale"]
    assert op.eager_kernels("cpu") == []
    call = op.bind((torch.ones(3),))
    assert declared_default(op, call, "cpu") == (REFERENCE, NO_CONFIG)
    assert [c.kernel for c in kernel_candidates(op, "cpu", call.env)] == [REFERENCE, "scale"]
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    assert op(torch.ones(3)).tolist() == [2.0] * 3
    assert not [w for w in recwarn if issubclass(w.category, sl.ShiplapNotice)]
    op.kernel("cpu", lambda x: x * 3, name="mine")
    assert op(torch.ones(3)).tolist() == [3.0] * 3, "the author's own is there to be run"


def test_a_template_that_is_no_default_waits_to_be_chosen(declare):
    made, bind = declare
    op = made()
    bind(op, default=False)
    assert op.eager_kernels("cpu") == []
    assert [c.kernel for c in kernel_candidates(op, "cpu", {"n": 3})] == [REFERENCE, "scale"]


def test_a_worker_imports_what_binds_the_template(declare):
    made, bind = declare
    op = made()
    bind(op)
    assert __name__ in worker_process._declaring_modules(op)


def test_configs_are_the_kernels(declare):
    made, bind = declare
    op = made()
    bind(
        op,
        configs=[{"BLOCK": 16}, {"BLOCK": 32}],
        supports=lambda sizes, dtypes, config: config["BLOCK"] >= sizes["n"] or "small",
    )
    (kernel,) = op.kernels["cpu"]
    assert [str(c) for c in kernel.space.configs({})] == ["BLOCK=16", "BLOCK=32"]
    picked = [kernel.variant_for_call(op.bind((torch.ones(n),))) for n in (0, 3, 20, 40)]
    assert [p if isinstance(p, str) else str(p.config) for p in picked] == ["BLOCK=16", "BLOCK=16", "BLOCK=32", "small"]
    assert op.pick_kernel(op.bind((torch.ones(20),))) is kernel.with_config(picked[2].config)


def test_a_template_beside_a_c_kernel_leaves_that_to_native_code(declare):
    made, bind = declare
    op = made()
    kernel = op.kernel("cpu", sl.cabi("no library", "c"))
    bind(op)
    form = op.native_kernels("cpu")[0].native
    assert form.symbol == kernel.symbol
    assert build_plan.form_is_native(op, form)
    assert [k.native for k in op.native_choices("cpu")] == [form]


def test_tables_are_made_once_for_what_they_look_at():
    asked = []

    def build(sizes):
        asked.append(dict(sizes) if sizes["all"] else sizes["k"])
        return torch.arange(sizes["k"])

    table, cpu = DeviceTable("here", build), torch.device("cpu")
    env = {"k": 3, "all": False, "n": 100, "stride": [1, 2]}
    first = table(env, cpu)
    assert table({**env, "n": 200, "stride": [3]}, cpu) is first
    assert asked == [3]
    assert table({**env, "k": 4}, cpu).numel() == 4
    whole = table({**env, "all": True}, cpu)
    assert asked[-1] == {**env, "all": True, "stride": (1, 2)}
    assert table({**env, "all": True}, cpu) is whole
    assert table({**env, "all": True, "n": 200}, cpu) is not whole, "now everything counts"


def test_what_is_kept_of_tables_is_bounded(monkeypatch):
    monkeypatch.setattr(template_key, "LIMIT", 4)
    table = DeviceTable("here", lambda sizes: torch.arange(sizes["k"]))
    for k in range(20):
        assert table({"k": k}, torch.device("cpu")).numel() == k
        assert len(table.tables) <= 4


def test_no_table_is_made_while_a_graph_is_captured(monkeypatch):
    table, cuda = (
        DeviceTable("ns::op, template t, table taps", lambda sizes: torch.arange(sizes["k"])),
        torch.device("cuda", 0),
    )
    table.looked_at, kept = ("k",), torch.arange(3)
    table.tables[table._key({"k": 3}, cuda)] = kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert table({"k": 3}, cuda) is kept
    assert list(table.captured.values()) == [kept], "a graph holds its address"
    with pytest.raises(
        sl.ShiplapError,
        match=r"SL305: a table of the kernel is not on the device yet(.|\n)*call the op once with tensors of",
    ):
        table({"k": 4}, cuda)


def test_the_sizes_of_the_output_are_named_as_in_c():
    """Inductor knows the output as None only."""
    rendered = render_kernel('{{def_kernel()}} {{size("out", 0)}} {{stride("out")}}', "f", {"x": 2}, 2, {}, False)
    assert rendered.numbers == (("size", None, 0), ("stride", None, 0), ("stride", None, 1))
    named = render_kernel('{{def_kernel()}} {{size("out", 0)}}', "f", {"out": 2}, 2, {}, False)
    assert named.numbers == (("size", "out", 0),), "an input of this name goes first"
    with pytest.raises(KeyError):
        render_kernel('{{size("other", 0)}}', "f", {"x": 2}, 2, {}, False)


def test_offsets_beyond_32_bits_are_asked_for_when_needed():
    source = (
        '{{def_kernel()}}\n    M = {{size("x", 0)}}\n    {{load_input("x", "t", ("r", "c"), mask="m")}}\n'
        '    p = y + r * {{stride("y", 0)}} + W\n    {{store_output(("r", "c"), "t", "m")}}\n'
    )
    narrow = render_kernel(source, "f", {"x": 2, "y": 1}, 2, {"W": float("inf"), "Z": 1}, False)
    wide = render_kernel(source, "f", {"x": 2, "y": 1}, 2, {"W": float("inf"), "Z": 1}, True)
    assert "int64" not in narrow.text
    assert "tl.cast((r), tl.int64) * stride_x_0" in wide.text
    assert "r * tl.cast(stride_y_0, tl.int64)" in wide.text
    assert 'W: tl.constexpr = float("inf")' in narrow.text
    assert "Z:" not in narrow.text, "what the text does not use does not tell kernels apart"
    assert narrow.numbers == wide.numbers
    with pytest.raises(ValueError, match="1 indices for 2 dims of x"):
        render_kernel('{{load_input("x", "t", ("r",))}}', "f", {"x": 2}, 2, {}, False)
