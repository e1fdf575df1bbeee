"""PyTorch's operator database on the device: torch's own kind of device test, in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shiplap_backend import audit, opinfo
from shiplap_backend.project import Project
from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY
from tests.backend.conftest import FULL

OPS = ("add", "mm", "erfc", "softmax", "sum", "transpose", "tensor_split", "to_sparse", "jiterator_unary", "sinh")
DTYPES = ("f32", "bf16", "i64", "u8", "bool")
# What a test that is not long looks at in other dtypes, too: each state once for each way into it.
TYPED = {"add": DTYPES, "mm": ("f32", "i64"), "softmax": ("f32", "bf16", "bool")}


@pytest.mark.capability("device tests")
def test_a_slice_of_the_database(project: Project) -> None:
    """Every state that is not a crash; ``sinh`` of tests/backend/ops.yaml is wrong on purpose, and found."""
    pytest.importorskip("openvino")
    cases = [(op, dtype) for op in OPS for dtype in (DTYPES if FULL else TYPED.get(op, DTYPES[:1]))]
    # One process for all cases, since each imports torch and its database of operators.
    verdicts = {(v.op, v.dtype): v for v in audit._run_batch(project, cases, samples=3)}
    state = {key: v.state for key, v in verdicts.items()}
    assert {state["add", d] for d in ("f32", "bf16", "u8", "bool")} == {state["softmax", "bf16"]} == {"native"}
    assert state["mm", "f32"] == "mixed"  # a product without terms is the CPU's
    assert state["add", "i64"] == state["mm", "i64"] == state["erfc", "f32"] == "fallback"
    assert verdicts["add", "i64"].fallback == ("aten::add.out: dtype: Long",)
    assert state["transpose", "f32"] == state["tensor_split", "f32"] == "core"
    assert ("softmax", "bool") not in state
    assert state["to_sparse", "f32"] == "refused"
    assert "got      a sparse tensor, layout Sparse" in verdicts["to_sparse", "f32"].why
    assert verdicts["softmax", "f32"].gradients == verdicts["softmax", "f32"].samples > 0
    assert verdicts["add", "bool"].gradients == 0
    assert (state["jiterator_unary", "f32"], verdicts["jiterator_unary", "f32"].why) == ("left", "Only runs on cuda")
    bad = {v.op: v.why for v in verdicts.values() if v.state in ("fail", "crash")}
    assert FULL or "Tensor-likes are not close" in bad.pop("sinh")
    assert bad == {}


@pytest.mark.long
def test_the_project_has_the_cases_for_unittest(project: Project) -> None:
    cases = [f"test_opinfo.TestOpInfoPRIVATEUSE1.test_compare_cpu_{op}_openvino_float32" for op in ("mm", "sinh")]
    run = python("-m", "unittest", *cases, cwd=project.root)
    if not FULL:
        assert run.returncode == 1
        assert "Tensor-likes are not close" in run.stderr
        assert "test_compare_cpu_sinh_openvino_float32" in run.stderr
    assert "test_compare_cpu_mm" not in run.stderr
    assert "Ran 2 tests" in run.stderr


def test_a_process_without_the_device_says_so() -> None:
    script = (
        "from shiplap.torch_private import aten_operators as a; "
        "a.make_device_tests('T', lambda: None, [], [], globals())"
    )
    run = python("-c", script)
    assert "RuntimeError: torch's tests know no PrivateUse1 device: load it before they are imported" in run.stderr


class Op:
    """An operator of the database, as far as the comparison asks."""

    name = "double"

    @staticmethod
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 2


ARGUMENTS = (torch.tensor([0.5, 1.0]), (), {})


def held(got: Any, want: Any, after: Any = ARGUMENTS, name: str = "double") -> bool:
    """Whether the comparison accepts ``got``, with arguments ``after`` the call, for ``want``."""
    op = Op()
    op.name = name
    try:
        opinfo._compare_results(op, torch.float32, (got, after), (want, ARGUMENTS), ARGUMENTS)
    except AssertionError:
        return False
    return True


def test_what_counts_as_wrong() -> None:
    right = torch.tensor([1.0, 2.0])
    assert held(right.clone(), right)
    assert held((right, 3), (right, 3))
    assert not held(right + 1e-3, right)
    assert not held(right.double(), right)
    assert not held(right[None], right)
    assert not held(torch.tensor([1.0, float("nan")]), right)
    assert not held((right, 3), (right, 4))
    assert not held(right, right, after=(torch.tensor([0.5, 1.5]), (), {})), "an argument was written"
    assert held(right + 1, right, name="empty"), "what empty() holds is not determined"


class Sample:
    """A sample of the database whose results are differentiated as they are."""

    output_process_fn_grad = staticmethod(lambda results: results)


class DoubledTwice(torch.autograd.Function):
    """Doubles, with the gradient of something else where ``wrong`` says so."""

    wrong = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * (3 if DoubledTwice.wrong else 2)


def test_a_wrong_gradient_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the call are right; only the gradient is not."""
    op = Op()
    op.supports_autograd = True  # type: ignore[attr-defined]
    op.op = DoubledTwice.apply  # type: ignore[method-assign]
    compare = lambda: opinfo._compare_gradients(op, Sample(), torch.float32, ["cpu"], ARGUMENTS)  # noqa: E731
    assert compare()
    calls = iter([False, True])  # the CPU's, then the device's

    def gradients(*arguments: Any) -> list[torch.Tensor | None]:
        monkeypatch.setattr(DoubledTwice, "wrong", next(calls, False))
        return right(*arguments)

    right = opinfo._gradients
    monkeypatch.setattr(opinfo, "_gradients", gradients)
    with pytest.raises(AssertionError, match="gradient 0: "):
        compare()


def test_float64_decides_between_two_roundings() -> None:
    exact = torch.tensor([1.0, 2.0])
    assert held(exact - 1e-3, exact + 1e-3)
    assert not held(exact - 4e-3, exact + 1e-3)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = REPOSITORY / "benchmarks" / "backend_opinfo.py"
    spec = importlib.util.spec_from_file_location("backend_opinfo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # a script finds its neighbours there
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks" / "results").glob("backend_opinfo.json")))
def test_the_docs_are_the_record_and_nothing_in_it_is_wrong(benchmark: ModuleType, path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert benchmark.PAGE.read_text(encoding="utf-8") == benchmark.page(result), "run with --pages"
    text = benchmark.SUMMARY.read_text(encoding="utf-8")
    assert text == benchmark.with_summaries(text, result), "run with --pages"
    assert list(result["counts"]) == ["f32", "bf16", "f16", "i64", "i32", "u8", "bool"]
    for dtype, counts in result["counts"].items():
        assert counts["fail"] == counts["crash"] == 0, dtype
    assert result["counts"]["f32"]["native"] > 200
    refused = {reason.split()[0] for reason in result["reasons"]}
    assert refused <= {"to_sparse", "sparse.sampled_addmm"}, "what the docs do not explain"


def test_pages_of_a_record(benchmark: ModuleType) -> None:
    verdicts = [
        audit.SweepVerdict("add", "f32", "native", 2, gradients=1),
        audit.SweepVerdict("add", "bool", "mixed", 2),
        audit.SweepVerdict("to_sparse", "f32", "refused", 2, why="NotImplementedError: sparse\nmore"),
    ]
    result = benchmark.measure("openvino", verdicts, benchmark.DTYPES, 2) | {"date": "2026-11-21"}
    assert result["states"] == {"add": "native - - - - - mixed", "to_sparse": "refused - - - - - -"}
    page = benchmark.page(result)
    assert "| `add` | native | - | - | - | - | - | mixed |" in page
    assert "- `to_sparse f32 refused: NotImplementedError: sparse`" in page
    assert "| f32 | 2 | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 0 |" in page
    assert "6 samples were compared, and the gradients of 1 of them." in page
    discrete = benchmark.measure("discrete", verdicts[:1], ["f32"], 2)
    assert discrete["states"] == {"add": "native"}
    marks = "backend_opinfo", "backend_opinfo discrete"
    text = "".join(f"a\n<!-- {mark} -->\nold\n<!-- /{mark} -->\nb\n" for mark in marks)
    text = benchmark.with_summaries(text, result | {"discrete": discrete})
    assert text.startswith("a\n<!-- backend_opinfo -->\nOpenVINO ")
    assert "<!-- /backend_opinfo -->\nb\na\n<!-- backend_opinfo discrete -->\ntorch " in text
    assert text.endswith("\n<!-- /backend_opinfo discrete -->\nb\n")
    assert "old" not in text


def test_a_sweep_goes_on_where_it_was(
    benchmark: ModuleType, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sweep finds on the device: ``test_a_slice_of_the_database``."""
    asked: list[tuple[Path, list[str], list[str], int]] = []

    def swept(of: Project, names: list[str], dtypes: list[str], *, samples: int) -> Iterator[audit.SweepVerdict]:
        asked.append((of.root, names, dtypes, samples))
        yield from (
            audit.SweepVerdict(name, dtype, "native", samples, gradients=1) for name in names for dtype in dtypes
        )

    monkeypatch.setattr(audit, "run_sweep", swept)
    journal, names = tmp_path / "journal.jsonl", ["exp", "tanh", "sign"]
    assert benchmark.sweep(project.root, names, ["f32"], 1, 1, journal, 0) == []
    assert [case[1] for case in asked if case[1]] == []
    journal.write_text(json.dumps(["tanh", [audit.SweepVerdict("tanh", "f32", "left", 0).as_json()]]) + "\n")
    asked.clear()
    verdicts = benchmark.sweep(project.root, names, ["f32"], 1, 2, journal, 100)
    assert [(v.op, v.state == "left", v.gradients) for v in verdicts] == [
        ("exp", False, 1),
        ("tanh", True, 0),
        ("sign", False, 1),
    ]
    assert sorted(name for _, names, *_ in asked for name in names) == ["exp", "sign"]
    assert {(root, *dtypes, samples) for root, _, dtypes, samples in asked} == {(project.root, "f32", 1)}
    assert len(journal.read_text().splitlines()) == 3
