"""One small function a cause: its break has the right line, cause, registry id and call; no other line breaks."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shiplap.doctor import Break, Diagnosis, SourcePlace
from shiplap.doctor.causes import (
    BREAK_CAUSES,
    BreakMessage,
    classify_break,
    classify_message,
    find_call_at,
    owner_of_break,
)
from shiplap.doctor.examine import _name_consequence
from shiplap.doctor.fix import remedy_for_break
from shiplap.doctor.registry import entry_by_id, entry_by_type, registry_entries
from tests.doctor.programs import here

PROGRAM = Path(__file__).with_name("causes.py")
MARKS = {
    number: match.groups()
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if (match := re.search(r"# BREAK (\w+) (GB\d+(?:\|GB\d+)?) (.+)$", line))  # of torch 2.13 and of torch 2.15
}
SKIPPED = {"in_loop", "slice_by_tensor", "array_attribute", "in_try", "context", "generator"}


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return here(PROGRAM)


def at(diagnosis: Diagnosis, line: int) -> Break:
    (only,) = (b for b in diagnosis.breaks if b.place.line == line)
    return only


@pytest.mark.parametrize("line", MARKS, ids=lambda n: f"{MARKS[n][0]}-{n}")
def test_a_marked_line_breaks_for_the_marked_cause(diagnosis: Diagnosis, line: int) -> None:
    b = at(diagnosis, line)
    cause, registry, call = MARKS[line]
    assert (b.cause, b.call) == (cause, call)
    assert b.registry in registry.split("|")
    assert Path(b.place.file) == PROGRAM
    assert b.place == b.user == b.chain[-1]
    assert "# BREAK" in b.place.code
    assert b.explanation
    assert b.fix == BREAK_CAUSES[b.cause].fix


def test_no_other_line_breaks(diagnosis: Diagnosis) -> None:
    assert sorted(b.place.line for b in diagnosis.breaks) == sorted(MARKS)


def test_what_torch_cannot_resume_comes_first_and_runs_uncompiled(diagnosis: Diagnosis) -> None:
    assert {b.place.function for b in diagnosis.breaks if b.skipped} == SKIPPED
    assert [b.skipped for b in diagnosis.breaks] == sorted((b.skipped for b in diagnosis.breaks), reverse=True)


def test_a_declaration_is_drafted_for_a_compiled_function(diagnosis: Diagnosis) -> None:
    line = next(n for n, mark in MARKS.items() if mark[2] == "zlib.crc32")
    example = at(diagnosis, line).example
    assert '@unfinished("zlib::crc32"' in example
    assert "# crc32(data, value = 0)" in example
    assert "return zlib.crc32(data, value)" in example
    compile(example, "example", "exec")


def test_a_call_without_a_signature_is_drafted_as_it_is_written(diagnosis: Diagnosis) -> None:
    line = next(n for n, mark in MARKS.items() if mark[2] == "scipy.special.erf")
    example = at(diagnosis, line).example
    assert "def erf(" in example
    compile(example, "example", "exec")


def test_every_cause_has_a_fix_and_a_title() -> None:
    assert all(c.title and c.why and c.fix for c in BREAK_CAUSES.values())


def test_the_registry_is_torchs_own() -> None:
    assert len(registry_entries()) > 400
    item = entry_by_id("gb0124")
    assert item is not None
    assert "Tensor.item()" in item.type
    assert entry_by_type("Unsupported Tensor.item() call with capture_scalar_outputs=False") == item
    assert item.url.endswith("/gb0124.html")
    assert entry_by_type("no such message") is None


def test_most_of_the_registry_has_a_cause_of_its_own() -> None:
    causes = [classify_message(BreakMessage(e.type, e.explanation, e.hints)) for e in registry_entries().values()]
    assert set(causes) <= BREAK_CAUSES.keys()
    assert causes.count("other") < 0.2 * len(causes)  # the rest keeps torch's explanation and hints


@pytest.mark.parametrize(
    ("reason", "context", "cause"),
    [
        ("Unsupported method call", "call_method UserDefinedObjectVariable(Autotuner) run [] {}", "launcher"),
        ("triton kernel unsupported feature", "", "launcher"),
        ("Fake tensor propagation exception", "", "fake"),
        ("Operator does not support running with fake tensors", "unsupported operator: mylib.f", "fake"),
        ("Observed exception", "raised exception ValueError('x')", "exception"),
        ("Dynamo recompile limit exceeded", "Limit type: recompile_limit", "recompiles"),
        ("Attempted to inline function marked as skipped", "qualname: f, name: f, filename: `x.py`", "disabled"),
        ("Attempt to trace generator", "", "generator"),
        ("HOP: Unsafe side effect", "", "higher_order"),
        ("Attempted to wrap sparse Tensor", "", "tensor"),
        ("something new in the next torch", "", "other"),
    ],
)
def test_causes_that_need_a_device_or_a_rare_program(reason: str, context: str, cause: str) -> None:
    assert classify_message(BreakMessage(reason, context=context)) == cause


def place(file: Path, line: int, package: str = "") -> SourcePlace:
    return SourcePlace(str(file), line, "f", "helper(x)", package)


def test_the_owner_of_a_marker_is_who_wrote_it(tmp_path: Path) -> None:
    marked = BreakMessage("Skip calling `torch.compiler.disable()`d function", "function `<function helper at 0x7f>`")
    (own := tmp_path / "own.py").write_text("import torch\n@torch.compiler.disable\ndef helper(x): return x\n")
    (caller := tmp_path / "caller.py").write_text("from library.ops import helper\nhelper(1)\n")
    assert owner_of_break("disabled", marked, (place(own, 3),)) == "yours"
    assert owner_of_break("disabled", marked, (place(caller, 2),)) == "library"


def test_the_owner_of_a_line_is_its_package() -> None:
    message = BreakMessage("Call to `torch._dynamo.graph_break()`")
    script = place(Path("/home/me/train.py"), 10)
    optimizer = place(Path("/v/site-packages/torch/optim/optimizer.py"), 500, "torch")
    library = place(Path("/v/site-packages/peft/lora.py"), 7, "peft")
    polyfill = place(Path("/v/site-packages/torch/_dynamo/polyfills/__init__.py"), 7, "torch")
    assert owner_of_break("disabled", message, (script, optimizer)) == "torch"
    assert owner_of_break("item", message, (script, library)) == "peft"
    assert owner_of_break("branch", message, (script, polyfill)) == "yours"
    assert owner_of_break("item", message, (script,)) == "yours"


def test_nobody_is_told_to_remove_a_marker_of_torch() -> None:
    message = BreakMessage("Call to `torch._dynamo.graph_break()`")
    fix, example = remedy_for_break("disabled", message, place(Path("a.py"), 1), "opt.step", "torch")
    assert "torch breaks the graph here on purpose" in fix
    assert example == ""


@pytest.mark.parametrize(
    ("reason", "context", "cause"),
    [
        ("Unsupported method call", "call_method UserDefinedObjectVariable(writer) writerow [] {}", "print"),
        ("Unsupported context manager", "Attempted to enter RLock", "lock"),
        ("Encountered tensor.is_inference() during tracing", "", "question"),
        ("Invalid call to __build_class__", "", "class"),
    ],
)
def test_causes_by_what_is_called(reason: str, context: str, cause: str) -> None:
    assert classify_message(BreakMessage(reason, context=context)) == cause


SKIPPED_CALL = "Attempted to call function marked as skipped"
NUMBER = "Unsupported Tensor.item() call with capture_scalar_outputs=False"
BUILTIN = "skip reason: cannot determine source file for  (likely a C extension or builtin)"


@pytest.mark.parametrize(
    ("reason", "context", "code", "cause"),
    [
        (SKIPPED_CALL, f"module: <unknown module>, qualname: Random.random, {BUILTIN}", "random.random()", "system"),
        (SKIPPED_CALL, f"module: torch, qualname: _VariableFunctionsClass.sparse_coo_tensor, {BUILTIN}", "", "tensor"),
        (SKIPPED_CALL, f"module: mylib, qualname: scan, {BUILTIN}", "mylib.scan(x)", "foreign"),
        ("Import failure", "module_name: fast, fromlist: None, level=0", "import fast", "import"),
        (NUMBER, "", "f = np.random.uniform(0.8, 1.2)", "system"),
        ("Unsupported call", "", "generator = random.Random(random.randint(0, 100))", "system"),
        ("Unsupported call", "", "f = torch.random.initial_seed()", "other"),
        (NUMBER, "", "f = x.sum().item()", "item"),
        ("HOP: Unsafe side effect", "", "y.register_hook(lambda g: grads.append(g))", "autograd"),
        ("HOP: Unsafe side effect", "", "y = torch.cond(p, f, g)", "higher_order"),
        ("Unsupported object", "", "stamp = datetime.datetime.now()", "system"),
        ("Could not guard on data-dependent expression Eq(u0, 0)", "", "weights = rates[labels]", "item"),
    ],
)
def test_a_cause_is_that_of_the_call(reason: str, context: str, code: str, cause: str) -> None:
    assert classify_break(BreakMessage(reason, context=context), SourcePlace("p.py", 1, "f", code)) == cause


def test_rounds_of_a_loop_that_depend_on_values_are_control_flow(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("for c in labels.unique():\n    x = x + c\n")
    message = BreakMessage("Could not extract specialized integer from data-dependent expression u0")
    assert classify_break(message, place(file, 1)) == "branch"
    assert classify_break(message, place(file, 2)) == "item"


def test_a_break_that_follows_another_on_its_line_is_no_entry_of_its_own() -> None:
    place = SourcePlace("p.py", 16, "forward", "if scores.max() > 0.9:")
    first = Break(place, place, (place,), "branch", "if ...", "Data-dependent branching", "", (), "GB0170", "")
    hint = "This graph break may have been caused by an earlier graph break. Resolving it may resolve this one."
    second = replace(first, cause="object", call="scores.max", reason="Reconstruction failure", hints=(hint,))
    assert _name_consequence(second, (first, second), ()).follows == "the other break on this line"
    assert _name_consequence(first, (first, second), ()) == first
    assert _name_consequence(second, (second,), ()) == second


@pytest.mark.parametrize(
    ("code", "cause", "call"),
    [
        ("out[rows] = experts[idx](x[rows])", "item", "experts[idx]"),
        ("out[rows] = x[rows] * 2", "shape", "x[rows]"),
        ("out[rows] = 0", "shape", "out[rows]"),
    ],
)
def test_the_subscript_at_fault_is_one_that_needs_the_value(tmp_path: Path, code: str, cause: str, call: str) -> None:
    """A list of modules needs its index as a number. A write to selected rows has no size of its own."""
    file = tmp_path / "program.py"
    file.write_text(f"{code}\n")
    found = find_call_at(SourcePlace(str(file), 1, "f", code), cause)
    assert found is not None
    assert ast.unparse(found) == call
