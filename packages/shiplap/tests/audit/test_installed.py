"""``shiplap audit --installed``: ops of a package that declares none, each wrong in one way, beside right ones."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from shiplap.audit.child_process import stream_events
from shiplap.audit.installed import checks, engine, gradients, jobs, schedule
from shiplap.audit.installed.apart import RecordedCalls
from shiplap.audit.installed.draws import CallDraws
from shiplap.audit.installed.engine import InstalledRequest, OpAudit, audit_installed_op
from shiplap.audit.installed.recipes import (
    CallRecipe,
    TensorRecipe,
    evaluate,
    malformed_calls,
    recipe_of_call,
)
from shiplap.audit.installed.result import InstalledFinding, InstalledOp, InstalledReport
from shiplap.audit.installed.schedule import prepare_process, stored_results
from shiplap.audit.installed.script import write_script
from shiplap.audit.installed.search import SearchState
from shiplap.cli.audit_installed import InstalledOptions, audit_package
from shiplap.errors import ShiplapError
from shiplap.scaffold.calls import ColumnRange, DispatchedCall, DispatchRecorder, SeenTensor
from shiplap.scaffold.package import find_package_ops
from shiplap.scaffold.schema import parse_schema
from shiplap_testing.effort import sampled
from shiplap_testing.forked import python

PACKAGE = """\
import ctypes

import torch

library = torch.library.Library("{name}", "DEF")


def add(signature, kernel, fake):
    name = signature.partition("(")[0]
    library.define(signature)
    library.impl(name, kernel, "CPU")
    library.impl(name, fake, "Meta")


def like(x, *rest):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def packed(x):
    return torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())


def crash(x):
    if len(x) == 1:
        ctypes.string_at(0)
    return x * 2


def fragile(x):
    if x.shape[0] in (0, 1, 33):
        ctypes.string_at(0)
    return packed(x) * 2 if x.dim() == 3 else x * 2


def written(x):
    result = x * 2
    x.zero_()
    return result


seen = []


def counted(x):
    seen.append(None)
    return x * len(seen)


def unfilled(x):
    result = torch.empty_like(x)
    result[..., :1] = x[..., :1]
    return result


def narrow(x):
    return x.view(torch.float32)[..., : x.shape[-1]] * 2.0 if x.dtype is torch.float64 else x * 2


add("right(Tensor x, int n=2) -> Tensor", lambda x, n=2: x * n, lambda x, n=2: (x * n).contiguous())
add("ignores_strides(Tensor x) -> Tensor", lambda x: packed(x) * 2, like)
add("fake_of_another_size(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape[0] + 1))
add("fake_of_another_dtype(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape, dtype=torch.half))
add("crash(Tensor x) -> Tensor", crash, like)
add("fragile(Tensor x) -> Tensor", fragile, like)
add("written(Tensor x) -> Tensor", written, like)
add("view(Tensor x) -> Tensor", lambda x: x.view(-1), lambda x: x.new_empty(x.numel()))
add("counted(Tensor x) -> Tensor", counted, like)
add("unfilled(Tensor x) -> Tensor", unfilled, like)
add("fake_wants_six(Tensor x) -> Tensor", lambda x: x * 2, lambda x: like(x) if len(x) == 6 else [][1])
add("fake_refuses(Tensor x) -> Tensor", lambda x: x * 2, lambda x: [][1])
library.define("no_fake(Tensor x) -> Tensor")
library.impl("no_fake", lambda x: x * 2, "CPU")
library.define("reads_memory(Tensor x) -> Tensor")
library.impl("reads_memory", lambda x: torch.from_numpy(x.detach().numpy() * 2), "CompositeImplicitAutograd")
library.define("no_cpu(Tensor x) -> Tensor")
library.impl("no_cpu", like, "CUDA")
"""
WRONG = {
    "ignores_strides": "layout",
    "fake_of_another_size": "fake",
    "fake_of_another_dtype": "fake",
    "crash": "crash",
    "written": "mutation",
    "view": "alias",
    "counted": "repeat",
    "unfilled": "uninitialized",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder, name = tmp_path_factory.mktemp("installed"), "undeclared_ops"
    (folder / f"{name}.py").write_text(PACKAGE.format(name=name))
    return name, folder


@pytest.fixture(scope="module")
def ops(package):
    name, folder = package
    prepare_process()
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield find_package_ops(name, importlib.import_module, [name])


@pytest.fixture
def request_of(package, monkeypatch, working_forks):
    """Findings are not repeated in fresh processes here, which takes seconds each; one test does it."""
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    return InstalledRequest(package[0], "1", seed=5, seconds=20.0)


def seen(shape: tuple[int, ...], dtype: str = "float32") -> CallRecipe:
    return recipe_of_call(DispatchedCall({"x": SeenTensor(dtype, shape, "cpu", -1.0, 1.0)}, ()), 5)


@pytest.mark.parametrize("name", sampled(WRONG, 3))
def test_a_wrong_op_is_named(ops, request_of, name):
    result = audit_installed_op(f"undeclared_ops::{name}", ops[f"undeclared_ops::{name}"], [seen((6, 4))], request_of)
    assert WRONG[name] in [f.check for f in result.findings], result
    assert result.calls == 1


@pytest.mark.long
def test_a_right_op_has_no_finding_in_calls_of_a_search(ops, request_of):
    result = audit_installed_op("undeclared_ops::right", ops["undeclared_ops::right"], (), request_of)
    assert result.findings == ()
    assert result.calls > 1
    assert result.checks > 20


def test_crashes_for_other_sizes_do_not_hide_what_the_next_call_shows(ops, request_of):
    name = "undeclared_ops::fragile"
    result = audit_installed_op(name, ops[name], [seen((6, 4)), seen((6, 4, 2))], request_of)
    assert {f.check for f in result.findings} == {"crash", "layout"}


def test_each_call_that_is_not_repeatable_is_compared_no_further(ops, request_of):
    name = "undeclared_ops::counted"
    result = audit_installed_op(name, ops[name], [seen((6, 4)), seen((5, 3))], request_of)
    assert {f.check for f in result.findings} == {"repeat"}


def test_memory_that_was_never_written_is_one_finding(ops):
    """It may hold something else in each call, which is no second fault."""
    name = "undeclared_ops::unfilled"
    audit = OpAudit(name, ops[name], [seen((6, 4))], InstalledRequest("undeclared_ops", "1.0", 0))
    audit.reach(1.0)
    finding = next(f for f in audit.result().findings if f.check == "uninitialized")
    audit._found["repeat"] = replace(finding, check="repeat")
    assert "repeat" not in {f.check for f in audit.result().findings}
    # Another op is given memory of its own in place of such a result.
    (call,) = audit.calls_for_others()
    assert [t.source for t in call.result_recipes()] == [""]
    right = OpAudit("undeclared_ops::right", ops["undeclared_ops::right"], [seen((6, 4))], audit.asked)
    right.reach(1.0)
    offered = right.calls_for_others()
    assert [call.steady for call in offered] == [True]
    assert right.calls_for_others() is offered, "the texts of calls are compared once, and not for each other op"


def test_what_is_not_registered_is_counted_apart(ops, request_of):
    result = audit_installed_op("undeclared_ops::no_fake", ops["undeclared_ops::no_fake"], [seen((6, 4))], request_of)
    assert result.findings == ()
    assert "no fake implementation" in result.missing
    name = "undeclared_ops::reads_memory"  # its own kernel runs for tensors without data, and fails
    result = audit_installed_op(name, ops[name], [seen((6, 4))], request_of)
    assert "fake" not in {f.check for f in result.findings}
    assert "no fake implementation" in result.missing
    absent = audit_installed_op("undeclared_ops::no_cpu", ops["undeclared_ops::no_cpu"], (), request_of)
    assert absent.calls == 0
    assert absent.unreached.startswith("no kernel for the CPU")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("once", "double backwards on once not supported"),
        ("donated", "compiled with non-empty donated buffers which requires retain_graph=False"),
    ],
)
def test_a_backward_that_refuses_to_be_differentiated_is_counted_apart(name, message):
    torch.library.define(f"undeclared_calls::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"undeclared_calls::{name}", "CompositeExplicitAutograd", lambda x: x * 2)

    def refuse(ctx, grad):
        raise RuntimeError(message)

    torch.library.register_autograd(f"undeclared_calls::{name}", refuse)
    with pytest.raises(checks.MissingRegistration):
        gradients.check_gradient(getattr(torch.ops.undeclared_calls, name).default, lambda: {"x": torch.ones(3)})


def test_a_script_shows_the_finding_without_this_library(ops, request_of, package):
    name = "undeclared_ops::ignores_strides"
    result = audit_installed_op(name, ops[name], [seen((6, 4))], request_of)
    (found,) = [f for f in result.findings if f.check == "layout"]
    text = write_script(found, package[0], "1")
    assert "shiplap." not in text
    done = python(
        "-c",
        f"import sys; sys.path.append({str(package[1])!r})\n" + text.replace("from __future__ import annotations", ""),
    )
    assert done.returncode == 1
    assert "x strided (equal values, other strides or offset)" in done.stdout


def test_lines_that_are_no_results_are_left_out(tmp_path):
    (tmp_path / "results.jsonl").write_bytes(b'\xff\n{"op": ' + b"[" * 50_000 + b'\n{"op": 1}\n')
    assert stored_results(tmp_path / "results.jsonl") == {}


def test_an_op_whose_audit_was_interrupted_is_audited_again(tmp_path):
    rows = [{"op": "a", "complete": False}, {"op": "a"}, {"op": "b", "complete": False}]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [*stored_results(tmp_path / "results.jsonl")] == ["a"]


class StagedAudit:
    """An audit of an op that stores its turns. It finds a call in the search in which it gets ``siblings``, or at once
    if its name begins with "easy".
    """

    turns: ClassVar[list[tuple[str, str, float, int]]] = []

    def __init__(self, name, op, recorded, asked):
        self.name, self.calls = name, []

    @property
    def is_searched(self):
        return bool(self.calls)

    def reach(self, seconds, check_seconds, siblings=()):
        self.turns.append(("search", self.name, seconds, len(siblings)))
        self.turns.append(("CHEAP", self.name, check_seconds, 0))
        self.calls += [self.name] if self.name.startswith("easy") or siblings else []

    def calls_for_others(self):
        return self.calls

    def check(self, level, seconds):
        self.turns.append((level.name, self.name, seconds, 0))

    def result(self, unreached):
        return InstalledOp(self.name, len(self.calls))


def test_all_ops_are_reached_before_any_has_a_dear_check(monkeypatch):
    """What a long check of one op takes is missing to the checks of others, and to no search."""
    monkeypatch.setattr(schedule, "OpAudit", StagedAudit)
    monkeypatch.setattr(StagedAudit, "turns", [])
    asked, names, done = InstalledRequest("package", "1", 5, 9.0), ["hard", "easy", "easy2"], []
    results = schedule.audit_installed_ops(dict.fromkeys(names), RecordedCalls(), asked, 1, done.append, minutes=1.0)
    assert [r.op for r in results] == names
    stages = [stage for stage, *_ in StagedAudit.turns]
    assert stages == ["search", "CHEAP"] * 4 + ["DEAR"] * 3 + ["MALFORMED"] * 3
    assert StagedAudit.turns[6][1] == "hard"
    assert StagedAudit.turns[6][3] == 2, "the calls of the other ops"
    assert [siblings for _, _, _, siblings in StagedAudit.turns[:6:2]] == [0, 0, 0], "in a first search"
    shares = [round(seconds, 1) for stage, _, seconds, _ in StagedAudit.turns if stage in ("search", "CHEAP")]
    assert shares == [3.0, 8.0, 3.0, 12.0, 3.0, 24.0, 9.0, 24.0], "what an op leaves is for the next ones"
    assert len(done) == 10, "after each search and each level, so that a run that is killed has lost one level"
    assert [r.complete for r in done[:4]] == [False, True, True, True], "an op that will be searched again"
    monkeypatch.setattr(schedule, "_SEARCHING", 0.0)
    StagedAudit.turns.clear()
    schedule.audit_installed_ops(dict.fromkeys(names), RecordedCalls(), asked, minutes=1.0)
    assert [stage for stage, *_ in StagedAudit.turns][:7] == ["search", "CHEAP"] * 3 + ["DEAR"]


def test_a_process_that_reaches_an_op_runs_its_cheap_checks(ops, request_of, monkeypatch):
    """The start of a process takes seconds on a GPU."""
    started = []

    def stream(work, limits):
        started.append(work)
        return stream_events(work, limits)

    monkeypatch.setattr(engine, "stream_events", stream)
    name = "undeclared_ops::ignores_strides"
    audit = engine.OpAudit(name, ops[name], [seen((6, 4))], request_of)
    audit.reach(5.0)
    assert len(started) == 1
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    assert [f.check for f in audit.result().findings] == ["layout"]


@pytest.mark.long
def test_the_command_resumes_and_honours_a_baseline(ops, package, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    right, wrong = "undeclared_ops::right", "undeclared_ops::ignores_strides"
    monkeypatch.setattr("shiplap.scaffold.package.find_package_ops", lambda *a: {n: ops[n] for n in (right, wrong)})
    recorded = tmp_path / "calls.py"
    recorded.write_text(
        "import torch\nfor name in ('right', 'ignores_strides'):\n"
        "    getattr(torch.ops.undeclared_ops, name)(torch.randn(6, 4))\n"
    )
    out, known = tmp_path / "out", tmp_path / "known.json"

    def audit(**more):
        given = InstalledOptions(package[0], [], recorded, [], known, False, out, seed=1, seconds=5.0, jobs=1)
        return audit_package(replace(given, **more), as_json=True, html=None)

    with pytest.raises(ShiplapError, match="SL602"):
        audit()
    assert audit(update_baseline=True) == 0
    assert json.loads(known.read_text())["known"] == [f"{wrong} layout"]
    assert sorted(p.name for p in out.iterdir()) == [
        "index.html",
        "results.jsonl",
        "undeclared_ops.ignores_strides-layout.py",
    ]
    printed = json.loads(capsys.readouterr().out)
    assert printed["reached"] == 2
    assert [f["check"] for f in printed["findings"]] == ["layout"]
    assert not printed["missing"].get(wrong, [""])[0].startswith("no fake")

    (out / "results.jsonl").open("a").write('{"op": "cut sho')
    monkeypatch.setattr(schedule, "OpAudit", lambda *a: pytest.fail("it was audited before"))
    assert audit() == 0, "a finding that the baseline lists"
    assert audit(baseline=None) == 1
    assert {*stored_results(out / "results.jsonl")} == {right, wrong}


def test_a_recorded_call_that_the_fake_refuses_is_a_finding(ops, request_of):
    """A search leaves such a call out, since it may be one that the op was never meant to take."""
    name = "undeclared_ops::fake_refuses"
    result = audit_installed_op(name, ops[name], [seen((3, 4))], request_of)
    assert result.calls == 1
    assert "fake" in {f.check for f in result.findings}


def test_a_size_that_no_program_has_passed_may_be_refused_by_the_fake(ops, request_of):
    name = "undeclared_ops::fake_wants_six"
    result = audit_installed_op(name, ops[name], [seen((6, 4))], request_of)
    assert result.findings == ()
    assert result.checks > 15


def test_a_file_may_be_cut_off():
    form = parse_schema(torch.ops.aten.neg.default._schema)
    for values, source in (((71, 73, 70, 56), ""), ((), "torch.arange(4).byte()")):
        call = CallRecipe({"self": TensorRecipe("uint8", (4,), 1, values=values, source=source)})
        made = {note: evaluate(c.texts("guarded"))["self"].tolist() for note, c in malformed_calls(call, form)}
        expected = list(values) or [0, 1, 2, 3]
        assert made["self is cut off after 3 bytes"] == expected[:3]
        assert made["self is cut off after 1 bytes"] == expected[:1]


def test_checks_for_which_no_time_is_left_are_counted(ops, request_of):
    name = "undeclared_ops::right"
    result = audit_installed_op(name, ops[name], [seen((3, 4))], request_of, check_seconds=0.0)
    assert result.calls
    assert result.checks == 0
    assert result.unchecked > 20
    report = InstalledReport("package", "1", [result])
    assert report.summary()["unchecked"] == {name: result.unchecked}
    assert any("left out for time" in str(line) for line in report.lines())


def test_ops_of_other_distributions_are_not_the_packages(tmp_path, monkeypatch):
    """The package imports another one, which registers an op."""
    (tmp_path / "foreign_neighbour.py").write_text(
        "import torch\nlibrary = torch.library.Library('foreign_space', 'DEF')\n"
        "library.define('f(Tensor x) -> Tensor')\n"
    )
    (tmp_path / "foreign_user.py").write_text(
        "import torch, foreign_neighbour\nspace = [torch.library.Library('other_space', 'DEF')]\n"
        "space[0].define('g(Tensor x) -> Tensor')\nloader = __spec__.loader.get_filename\n"
    )
    for name in ("foreign_neighbour", "foreign_user"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "top_level.txt").write_text(f"{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_package_ops("foreign_user", importlib.import_module)
    assert set(found) == {"other_space::g"}
    assert type(sys.modules["foreign_neighbour"].__loader__).__name__ == "SourceFileLoader"


def test_a_recorded_call_keeps_sizes_dtypes_and_ranges():
    call = DispatchedCall(
        {"x": SeenTensor("int64", (3, 2), "cpu", 1, 4), "ys": (SeenTensor("float32", (5,), "cpu", -1.0, 1.0),), "n": 3},
        (),
    )
    made = evaluate(recipe_of_call(call, 7).texts())
    assert made["x"].shape == (3, 2)
    assert made["x"].dtype is torch.int64
    assert 1 <= int(made["x"].min()) <= int(made["x"].max()) <= 4
    assert made["ys"][0].abs().max() <= 1
    assert made["n"] == 3


def test_recorded_whole_numbers_keep_their_values_where_their_shape_stays():
    """Offsets ascend, and the first column of a box is the number of its image: random values would be malformed."""
    torch.library.define("undeclared_calls::pooled", "(Tensor x, Tensor offsets, Tensor boxes) -> Tensor")
    torch.library.impl("undeclared_calls::pooled", "CPU", lambda x, offsets, boxes: x * 2)
    recorder = DispatchRecorder(("undeclared_calls::pooled",))
    offsets, boxes = torch.tensor([0, 2, 2, 6]), torch.tensor([[1.0, 0.25, 0.75], [0.0, 0.5, 1.5]])
    with recorder.mode():
        torch.ops.undeclared_calls.pooled(torch.randn(6, 300), offsets, boxes)
    call = recipe_of_call(recorder.calls["undeclared_calls::pooled"][0], 7)
    made, resized = evaluate(call.texts("guarded")), evaluate(call.with_size(300, 2).texts())
    for arguments in (made, resized):
        assert arguments["offsets"].tolist() == offsets.tolist()
        assert torch.equal(arguments["boxes"], boxes)
    assert evaluate(call.with_size(4, 1).texts())["offsets"].shape == (1,)
    form = parse_schema(torch.ops.undeclared_calls.pooled.default._schema)
    beyond = dict(malformed_calls(call, form))["offsets = 1000000000"]
    assert set(evaluate(beyond.texts())["offsets"].tolist()) == {10**9}


def test_many_recorded_offsets_ascend_again():
    """They are too many to keep their values. With another length they ascend as well."""
    torch.library.define("undeclared_calls::summed", "(Tensor offsets) -> Tensor")
    torch.library.impl("undeclared_calls::summed", "CPU", lambda offsets: offsets.clone())
    recorder = DispatchRecorder(("undeclared_calls::summed",))
    with recorder.mode():
        torch.ops.undeclared_calls.summed(torch.arange(0, 1200, 3))
    call = recipe_of_call(recorder.calls["undeclared_calls::summed"][0], 7)
    for arguments, count in ((call.texts(), 400), (call.with_size(400, 33).texts(), 33)):
        made = evaluate(arguments)["offsets"]
        assert (made.shape, int(made[0]), int(made[-1])) == ((count,), 0, 1197)
        assert bool((made[1:] >= made[:-1]).all())


@pytest.mark.parametrize("key", ["Autograd", "CPU"])
def test_an_op_is_recorded_once_whatever_its_kernel_is_registered_for(key):
    """A kernel for autograd that calls other ops is not seen below autograd."""
    name = f"undeclared_calls::{key.lower()}_only"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, key, lambda x: x * 2)
    recorder = DispatchRecorder((name,))
    with recorder.mode():
        getattr(torch.ops.undeclared_calls, f"{key.lower()}_only")(torch.ones(3, requires_grad=True))
    assert recorder.counts == {name: 1}
    assert len(recorder.calls[name]) == 1


def test_an_op_with_kernels_above_and_below_autograd_is_recorded_once():
    name = "undeclared_calls::both"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "CPU", lambda x: x * 2)
    torch.library.register_autograd(name, lambda ctx, grad: grad * 2)
    recorder = DispatchRecorder((name,))
    with recorder.mode():
        torch.ops.undeclared_calls.both(torch.ones(3, requires_grad=True)).sum().backward()
    assert recorder.counts == {name: 1}


def test_floats_of_a_malformed_call_are_nan():
    form = parse_schema(torch.ops.aten.relu.default._schema)
    call = CallRecipe({"self": TensorRecipe("float32", (3, 2), 0)})
    made = evaluate(dict(malformed_calls(call, form))["self = nan"].texts("guarded"))["self"]
    assert made.shape == (3, 2)
    assert bool(made.isnan().all())


def boxes_call() -> CallRecipe:
    columns = (ColumnRange(0, 1, True), *[ColumnRange(0.5, 9.5, False)] * 2)
    boxes = SeenTensor("float32", (3, 3), "cpu", 0.0, 9.5, columns)
    x = SeenTensor("float32", (2, 7), "cpu", -1.0, 1.0)
    return recipe_of_call(DispatchedCall({"x": x, "boxes": boxes}, ()), 5)


def test_more_rows_of_a_recorded_matrix_keep_to_the_ranges_of_its_columns():
    """The first column is the number of an image: a random one reads outside of the images."""
    made = evaluate(boxes_call().with_argument("boxes", boxes_call().arguments["boxes"].reshaped((33, 3))).texts())
    assert made["boxes"].shape == (33, 3)
    assert set(made["boxes"][:, 0].tolist()) == {0.0, 1.0}
    constant = SeenTensor(
        "float64", (2, 2), "cpu", 1e9 + 0.5, 1e9 + 0.5, (ColumnRange(1e9 + 0.5, 1e9 + 0.5, False),) * 2
    )
    call = recipe_of_call(DispatchedCall({"x": constant}, ()), 5)
    assert set(evaluate(call.texts())["x"].flatten().tolist()) <= {1e9 + 0.5, math.nextafter(1e9 + 0.5, math.inf)}
    assert 0.5 <= float(made["boxes"][:, 1:].min()) <= float(made["boxes"].max()) <= 9.5


def test_calls_with_indices_that_may_lie_beyond_a_size_come_last():
    """With one image the second one does not exist."""
    torch.library.define("undeclared_calls::boxed", "(Tensor x, Tensor boxes) -> Tensor")
    form = parse_schema(torch.ops.undeclared_calls.boxed.default._schema)
    first = {j.note for j in jobs._jobs_of_call(boxes_call()) if j.check == "crash"}
    last = {j.note for j in jobs._jobs_of_malformed_calls(boxes_call(), form)}
    doubtful = {f"{n} in place of each size {size}" for n, size in ((0, 2), (1, 2), (1, 3), (0, 7), (1, 7))}
    assert last & {f"{n} in place of each size {size}" for n in jobs.OTHER_SIZES for size in (2, 3, 7)} == doubtful
    assert not first & doubtful
    assert "33 in place of each size 2" in first
    malformed = dict(malformed_calls(boxes_call(), form))
    first = evaluate(malformed["column 0 of boxes = 1000000000"].texts())["boxes"]
    assert set(first[:, 0].tolist()) == {1e9}
    assert float(first[:, 1:].max()) <= 9.5


@pytest.mark.parametrize(
    ("dtype", "low", "values", "come_last"),
    [
        *(("int8", -128.0, (), False), ("uint8", 0.0, (), False), ("int8", -128.0, (-128.0, 127.0), False)),
        *(("uint8", 0.0, (0.0, 127.0), True), ("int64", 0.0, (), True)),
    ],
)
def test_data_of_one_byte_are_no_indices(dtype, low, values, come_last):
    seen = SeenTensor(dtype, (2,), "cpu", low, 127.0, values=values)
    call = DispatchedCall({"x": SeenTensor("float32", (128,), "cpu", -1.0, 1.0), "data": seen}, ())
    first = {j.note for j in jobs._jobs_of_call(recipe_of_call(call, 5)) if j.check == "crash"}
    assert ("33 in place of each size 128" not in first) is come_last
    # An index is one, too, if there are more of them.
    pair = DispatchedCall({"x": SeenTensor("float32", (2,), "cpu", -1.0, 1.0), "data": replace(seen, high=1.0)}, ())
    first = {j.note for j in jobs._jobs_of_call(recipe_of_call(pair, 5)) if j.check == "crash"}
    assert ("1 in place of each size 2" not in first) is come_last


def test_another_size_changes_the_ints_that_are_as_large():
    call = CallRecipe({"x": TensorRecipe("float32", (6, 4), 0), "n": 6, "sizes": (6, 2), "flag": True})
    other = call.with_size(6, 9)
    assert (other.arguments["x"].shape, other.arguments["n"], other.arguments["sizes"]) == ((9, 4), 9, (9, 2))
    assert other.arguments["flag"] is True


def test_an_op_whose_inner_op_has_no_kernel_needs_another_device():
    inside = "NotImplementedError: Could not run 'aten::inner' with arguments from the 'CPU' backend. This could be"
    state = SearchState(refusals=["ValueError: x is too short", inside, "ZeroDivisionError: integer modulo by zero"])
    assert state.reason.startswith("no kernel for the device inside of the op: NotImplementedError")
    assert SearchState(refusals=["ValueError: x is too short"]).reason.endswith("ValueError: x is too short")
    of_kernel = ["ValueError: x is too short", "RuntimeError: fp8 is not supported by CPU"]
    assert SearchState(refusals=of_kernel).reason.startswith("no kernel for the device inside of the op: RuntimeError")
    assert SearchState(refusals=of_kernel[::-1]).reason.endswith("ValueError: x is too short")
    assert SearchState(device="cuda", refusals=of_kernel).reason.startswith("no call that was tried is taken")


def test_a_refusal_gives_hints(ops):
    draws = CallDraws(parse_schema(ops["undeclared_ops::right"]._schema), 0)
    draws.hint("mode must be 'nearest' or 'linear', x of dtype Int, and a block of 64")
    assert draws.words == ["nearest", "linear"]
    assert draws.dtypes == ["int32"]
    assert draws.numbers == [64]
    draws.hint("\"kernel\" not implemented for 'Float'")
    assert "quint8" in draws.dtypes
    draws.hint("vector::_M_range_check: __n (which is 6) >= this->size() (which is 2)")
    assert 7 in draws._counts()


def test_the_most_harmful_finding_comes_first():
    found = tuple(InstalledFinding("a::b", check, "", {}, "") for check in ("alias", "crash", "fake"))
    op = InstalledOp("a::b", 1, findings=found)
    assert [f.check for f in InstalledReport("a", "1", [op]).findings] == ["crash", "fake", "alias"]
