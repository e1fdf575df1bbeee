"""A remedy is shown only if its entry is gone, nothing else came, and all results are the same."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shiplap.doctor import Break, Diagnosis, Recompile, SourcePlace, probe
from shiplap.doctor.laboratory import Laboratory, Run
from shiplap.doctor.printed import different_lines, zeros_in_output
from shiplap.doctor.remedies import REMEDIES, list_remedies
from shiplap.doctor.scratch import Program, diff_texts, make_copy, parse_program
from shiplap.doctor.treatment import TriedEntry, as_first_seen
from shiplap.doctor.trial import (
    _is_gone,
    _rows_computed_always,
    _try_entries,
    _with_uncompiled_end,
    make_case,
    reason_of_refusal,
    try_remedies,
)
from shiplap.errors import ShiplapError

PLACE = SourcePlace("/p/program.py", 3, "f", "return x * x.sum().item()")
ITEM = Break(
    place=PLACE,
    user=PLACE,
    chain=(PLACE,),
    cause="item",
    call="x.sum().item",
    reason="Unsupported Tensor.item() call with capture_scalar_outputs=False",
    explanation="",
    hints=("Set `torch._dynamo.config.capture_scalar_outputs = True`",),
    registry="GB0124",
    fix="",
)


def run(*entries: Break | Recompile, **more: Any) -> Run:
    breaks = tuple(e for e in entries if isinstance(e, Break))
    recompiles = tuple(e for e in entries if isinstance(e, Recompile))
    return Run(Diagnosis("p", breaks, recompiles, compiled=1, graphs=1), more.pop("status", 0), 1.0, **more)


def test_a_remedy_has_to_remove_its_entry_and_keep_all_results() -> None:
    other = replace(ITEM, place=replace(PLACE, line=9, code="if y > 0:", function="g"), cause="branch", call="if y > 0")
    taken = replace(ITEM, cause="branch", reason="Could not guard on data-dependent expression")
    before = run(ITEM)
    assert reason_of_refusal(ITEM, before, run()) == ""
    assert reason_of_refusal(ITEM, before, run(ITEM)) == "the entry was still there"
    assert reason_of_refusal(ITEM, before, run(taken)).startswith("another break took its place")
    assert reason_of_refusal(ITEM, before, run(other)) == ""  # it lay behind
    assert (
        reason_of_refusal(ITEM, before, run(other, replace(other, call="b")))
        == "there are more entries: 2 instead of 1"
    )
    assert reason_of_refusal(ITEM, before, run(differences=("f, call 1: outputs differ",))).startswith("f, call 1")
    assert (
        reason_of_refusal(ITEM, before, run(status=1))
        == "with this edit the program ended with exit status 1, without it with 0"
    )
    assert reason_of_refusal(ITEM, before, None) == "the program ran too long"


def test_behind_a_skipped_function_more_breaks_may_come_into_view() -> None:
    skipped = replace(ITEM, skipped=True)
    behind = [replace(ITEM, place=replace(PLACE, line=n, code=f"line {n}"), call=f"call {n}") for n in (8, 9)]
    assert reason_of_refusal(skipped, run(skipped), run(*behind)) == ""


class Program1(Laboratory):
    """A laboratory whose program breaks unless a text is in it."""

    def __init__(self, folder: Path, cured_by: str) -> None:
        (folder / "program.py").write_text("import torch\ndef f(x):\n    return x * x.sum().item()\n")
        super().__init__(Program(("python",), (str(folder / "program.py"),), folder), folder, None)
        self.cured_by = cured_by
        self.item = replace(ITEM, place=replace(PLACE, file=str(folder / "program.py")))

    def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
        cured = self.cured_by in texts.get("program.py", "")
        return run(*(() if cured else (self.item,)), counts={"outputs": 2, "gradients": 1})


def test_the_first_remedy_that_helps_is_kept(tmp_path: Path) -> None:
    laboratory = Program1(tmp_path, "x * (x.sum())")
    (found,), texts, after = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert (found.remedy, found.before, found.after, found.outputs) == ("keep_tensor", 1, 0, 2)
    assert found.refused == {"torch_hint": "the entry was still there"}
    assert "+    return x * (x.sum())" in found.diff
    assert "capture_scalar_outputs" not in texts["program.py"]  # what did not help is not kept
    assert not after.entries


def test_a_remedy_that_brings_another_entry_comes_second(tmp_path: Path) -> None:
    """A setting that lets torch compile the program anew in each call is worse than an edit without any entry left."""
    place = replace(PLACE, file=str(tmp_path / "program.py"))
    grows = Recompile(place, cause="length", title="", subject="kept", values=(), guard="len(kept) == 1", fix="")

    class Growing(Program1):
        edited: tuple[Recompile, ...] = ()

        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            text = texts.get("program.py", "")
            if "capture_scalar_outputs" in text:
                return run(grows)
            return run(*(self.edited if "x * (x.sum())" in text else (self.item,)))

    laboratory = Growing(tmp_path, "")
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert (found.remedy, found.removed) == ("keep_tensor", True)
    laboratory.edited = (grows,)
    found, later = _try_entries(laboratory, laboratory.run({}, "compare"))[0]
    assert (found.remedy, found.removed, later.removed) == ("torch_hint", True, False)


def test_remedies_that_need_each_other_are_found_together(tmp_path: Path) -> None:
    """A setting removes the entry, and another one takes its place, which has a remedy of its own."""
    place = replace(PLACE, file=str(tmp_path / "program.py"))

    class Followed(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            text = texts.get("program.py", "")
            if "capture_scalar_outputs" not in text:
                return run(self.item)
            follower = replace(self.item, cause="print", call="print", place=place, reason="print")
            return run(*(() if self.cured_by in text else (follower,)), counts={"outputs": 3})

    laboratory = Followed(tmp_path, "reorderable_logging_functions.add(print)")
    (found,), texts, after = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert (found.remedy, found.removed, found.outputs) == ("torch_hint + reorder_print", True, 3)
    assert found.title == "use the setting that torch names; let it print behind the compiled part"
    assert found.refused["torch_hint"] == "another break took its place: print"
    assert "capture_scalar_outputs" in texts["program.py"]
    assert not after.entries
    laboratory.cured_by = "nothing writes this"
    (found,), texts, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert (found.remedy, texts) == ("", {})


def test_a_program_that_fails_only_compiled_is_compared_with_its_uncompiled_run(tmp_path: Path) -> None:
    class Failing(Program1):
        def run(self, texts: dict[str, str], mode: str, *, uncompiled: bool = False, **_: Any) -> Run:
            cured = "x * (x.sum())" in texts.get("program.py", "")
            return run(*(() if cured else (self.item,)), status=int(not cured and not uncompiled))

    laboratory = Failing(tmp_path, "")
    failed = laboratory.run({}, "compare")
    first = _with_uncompiled_end(laboratory, failed)
    assert (first.status, first.uncured, first.entries) == (0, True, failed.entries)
    (found,), _, _ = _try_entries(laboratory, first)
    assert found.remedy == "keep_tensor"
    says = "with this edit the program ended with exit status 1, without compilation with 0"
    assert reason_of_refusal(laboratory.item, first, run(status=1)) == says


def test_what_a_failing_program_has_not_printed_does_not_vary(tmp_path: Path) -> None:
    class Failing(Program1):
        def run(self, texts: dict[str, str], mode: str, *, uncompiled: bool = False, **_: Any) -> Run:
            cured = "x * (x.sum())" in texts.get("program.py", "")
            shown = "lost 1\n" if uncompiled else "lost 2\n" if cured else ""
            return run(*(() if cured else (self.item,)), status=int(not cured and not uncompiled), shown=shown)

    laboratory = Failing(tmp_path, "")
    first = replace(laboratory.run({}, "compare"), status=0, shown="lost 1\n", uncured=True)
    (found,), _, _ = _try_entries(laboratory, first)
    assert not found.removed
    assert found.refused["keep_tensor"].startswith("the program prints another line")


@pytest.mark.parametrize("left_out", [False, True])
def test_a_value_is_kept_only_if_a_call_leaves_it_out(tmp_path: Path, left_out: bool) -> None:
    """Where no call does so, equal results say nothing about the calls that do."""

    class Masked(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            text = texts.get("program.py", "")
            if "raise AssertionError" in text:
                return run(self.item, status=int(left_out))
            return run(*(() if text and "any" not in text else (self.item,)))

    laboratory = Masked(tmp_path, "")
    source = "import torch\ndef f(m):\n    if (m == 0).any():\n        return m\n    return None\n"
    (tmp_path / "program.py").write_text(source)
    laboratory.item = replace(laboratory.item, cause="branch", reason="Data-dependent branching", call="if m.any()")
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert (found.remedy == "keep_value") == left_out
    assert found.refused.get("keep_value", "") == ("" if left_out else "no call of this run leaves the value out")


@pytest.mark.parametrize("other", [False, True])
def test_an_entry_whose_own_remedies_failed_may_go_with_another(tmp_path: Path, other: bool) -> None:
    """It stays without a remedy where another break of the function has come in its place."""
    place = replace(PLACE, file=str(tmp_path / "program.py"))
    grows = Recompile(place, cause="length", title="", subject="kept", values=(), guard="len(kept) == 1", fix="")

    class Growing(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            stubborn = replace(self.item, cause="question", call="b")
            if "x * (x.sum())" not in texts.get("program.py", ""):
                return run(stubborn, self.item, grows)
            return run(replace(stubborn, call="c")) if other else run(grows)

    laboratory = Growing(tmp_path, "")
    tried = {t.call: t for t in _try_entries(laboratory, laboratory.run({}, "compare"))[0]}
    assert tried["b"].with_others == (not other)
    assert not tried["b"].remedy
    text = " ".join(str(each) for each in tried["b"].lines(1))
    assert ("it goes with the remedy of another entry" in text) == (not other)


@pytest.mark.parametrize("cured", [False, True])
def test_an_entry_that_an_edit_has_moved_is_listed_once_where_it_was(tmp_path: Path, cured: bool) -> None:
    """A part of the function has it on another line, and there its own remedies are tried."""
    place = replace(PLACE, file=str(tmp_path / "program.py"))

    class Moving(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            stubborn = replace(self.item, cause="question", call="b")
            if "x * (x.sum())" not in texts.get("program.py", ""):
                return run(self.item, stubborn)
            moved = replace(place, line=9, function="f_part")
            return run(*(() if cured else (replace(stubborn, place=moved),)))

    laboratory = Moving(tmp_path, "")
    tried = {t.call: t for t in _try_entries(laboratory, laboratory.run({}, "compare"))[0]}
    assert list(tried) == ["x.sum().item", "b"]
    assert tried["b"].where.endswith(f":{place.line}")
    assert tried["b"].removed == cured


def test_an_entry_that_comes_into_view_later_has_the_line_of_the_unchanged_file(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import torch\n\ndef f(x):\n    y = g(x)\n    return y\n")
    later = replace(ITEM, place=replace(PLACE, file=str(file), line=12, code="    y = g(x)"), cause="other")
    (seen,) = as_first_seen([TriedEntry.of(later)], [])
    assert seen.where.endswith("program.py:4")
    assert "  seen     with the remedies above, not in the unchanged program" in [str(row) for row in seen.lines(1)]
    (listed,) = as_first_seen([TriedEntry.of(later)], [later])
    assert not listed.behind
    (twice,) = as_first_seen([replace(TriedEntry.of(later), code="x")], [])
    assert twice.where.endswith("program.py, in code that a remedy changed")


def test_a_recompile_that_torch_names_by_another_value_is_not_gone() -> None:
    first, second = (
        Recompile(PLACE, cause="length", title="", subject=name, values=(), guard=f"len({name}) == 1", fix="")
        for name in ("kept", "times")
    )
    assert _is_gone(first, run(first, second), run(second))
    assert not _is_gone(first, run(first, second), run(replace(second, times=2)))


def test_a_break_in_the_lines_of_an_edit_is_none_of_the_program(tmp_path: Path) -> None:
    laboratory = Program1(tmp_path, "")
    skipped = replace(laboratory.item, skipped=True)
    line = "return x * (x.sum())"
    inner = replace(skipped, user=replace(skipped.user, code=line), place=replace(PLACE, code="torch's own"), call="b")

    def one(texts: dict[str, str], mode: str, **_: Any) -> Run:
        return run(inner if line in texts.get("program.py", "") else skipped)

    vars(laboratory)["run"] = one
    (found,), _, _ = _try_entries(laboratory, one({}, "compare"))
    assert not found.removed
    assert found.refused["keep_tensor"].startswith("another break took its place")


@pytest.mark.parametrize(
    ("value", "gradients", "remedy"),
    [
        ("x / x.norm()", 1, "cond"),
        ("x / x.norm()", 0, "where"),
        ("x / 2", 1, "where"),
        ("x ** 0.5", 1, "cond"),
        ("x ** 2", 1, "where"),
    ],
)
def test_no_side_is_picked_whose_gradient_may_be_nan(tmp_path: Path, value: str, gradients: int, remedy: str) -> None:
    """The condition keeps away a division by 0, which no call of this run has shown."""
    source = f"import torch\n\ndef f(x):\n    if x.sum() > 0:\n        return {value}\n    return x\n"
    (tmp_path / "program.py").write_text(source)
    place = replace(PLACE, file=str(tmp_path / "program.py"), line=4, code="if x.sum() > 0:")
    item = replace(ITEM, place=place, user=place, chain=(place,), cause="branch", call="if x.sum() > 0", hints=())

    class Branching(Laboratory):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            text = texts.get("program.py", "")
            cured = "torch.where" in text or "torch.cond" in text
            return run(*(() if cured else (item,)), counts={"outputs": 1, "gradients": gradients})

    laboratory = Branching(Program(("python",), (place.file,), tmp_path), tmp_path, None)
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.remedy == remedy


def test_a_time_that_is_not_measured_any_more_is_no_remedy(tmp_path: Path) -> None:
    timed = "    start = time.time()\n    print(time.time() - start)\n    return x\n"
    (tmp_path / "program.py").write_text(f"import time\nimport torch\n\ndef f(x):\n{timed}")
    place = replace(PLACE, file=str(tmp_path / "program.py"), line=5, code="start = time.time()")
    item = replace(ITEM, place=place, user=place, chain=(place,), cause="system", call="time.time", hints=())

    class Clock(Laboratory):
        zeroed: tuple[str, ...] = ()
        shown = False

        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            cured = "is_compiling() else time.time()" in texts.get("program.py", "")
            output = f"epoch 0 took {0.0 if cured and self.shown else 1.25:.2f}s\n"
            return run(*(() if cured else (item,)), zeroed=self.zeroed if cured else (), output=output)

    laboratory = Clock(Program(("python",), (place.file,), tmp_path), tmp_path, None)
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.remedy == "eager_clock"
    laboratory.zeroed = ("f, call 1: outputs 1",)
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.refused["eager_clock"] == "f, call 1: outputs 1 is 0, which the program measured"
    laboratory.zeroed, laboratory.shown = (), True
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.refused["eager_clock"] == "epoch 0 took 1.25s is 0, which the program measured"


def test_where_nothing_helps_the_cause_is_said(tmp_path: Path) -> None:
    laboratory = Program1(tmp_path, "nothing writes this")
    (found,), texts, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert (found.removed, texts) == (False, {})
    text = "\n".join(map(str, found.lines(1)))
    assert "no remedy: torch_hint: the entry was still there" in text
    assert "your code" in text


@pytest.mark.parametrize(
    ("calls", "called", "graphs", "refusal"),
    [
        (3, {}, 2, ""),
        (2, {}, 2, "no version was used a second time"),
        (9, {"program.py:2:f": 2, "program.py:6:g": 7}, 2, "no version was used a second time"),
        (9, {"program.py:1:f": 2, "program.py:2:f": 3, "program.py:6:f": 2, "": 2}, 2, ""),
        (3, {}, 3, "3 graphs are compiled instead of 2"),
    ],
)
def test_versions_are_tried_only_where_one_is_used_again(
    tmp_path: Path, calls: int, called: dict[str, int], graphs: int, refusal: str
) -> None:
    """A version for each of two calls would be compiled in each call, and so would one for each new object. Calls of
    other functions do not count.
    """
    source = "import torch\n@torch.compile\ndef f(x, how=None):\n    return x if how is None else x + 1\n"
    (tmp_path / "program.py").write_text(source)
    place = replace(PLACE, file=str(tmp_path / "program.py"))
    recompile = Recompile(place, cause="optional", subject="how", values=(), guard="how is None", fix="")

    class TwoKinds(Laboratory):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            cured = "compile_each" in texts.get("program.py", "")
            made = run(*(() if cured else (recompile,)), counts={"calls": calls}, called=called)
            return replace(made, diagnosis=replace(made.diagnosis, graphs=graphs if cured else 2))

    laboratory = TwoKinds(Program(("python",), (place.file,), tmp_path), tmp_path, None)
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.removed == (not refusal)
    assert found.refused == ({"versions": refusal} if refusal else {})


@pytest.mark.parametrize(("lines", "remedy"), [(2, "reorder_print"), (1, "eager_effect"), (3, "eager_effect")])
def test_a_print_that_is_lost_or_cut_up_is_no_remedy(tmp_path: Path, lines: int, remedy: str) -> None:
    """Torch 2.13 loses prints that it would have to move out of a function which the compiled one calls. It drops the
    keyword ``end``, so that one line becomes several.
    """
    (tmp_path / "program.py").write_text("import torch\n\ndef f(x):\n    print(x)\n    return x\n")
    place = replace(PLACE, file=str(tmp_path / "program.py"), line=4, code="print(x)")
    item = replace(ITEM, place=place, user=place, chain=(place,), cause="print", call="print", hints=())

    class Printing(Laboratory):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            text = texts.get("program.py", "")
            cured = "reorderable_logging_functions.add(print)" in text or "is_compiling" in text
            return run(*(() if cured else (item,)), printed=lines if "reorderable" in text else 2)

    laboratory = Printing(Program(("python",), (place.file,), tmp_path), tmp_path, None)
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.remedy == remedy


@pytest.mark.parametrize(
    ("shown", "varies", "says"),
    [
        ("norms {'0': 3}\nloss 0.25\n", "", ""),
        ("norms {'0': 3}\nloss 0.25001\n", "", ""),
        ("loss 0.25\nnorms {'0': 3}\n", "", "the program prints its lines in another order: loss …"),
        ("loss 0.25\nnorms {'0': 3}\n", "loss 0.75", ""),
        ("norms {}\nloss 0.25\n", "", "the program prints another line: norms {}"),
        ("norms {'0': 1}\nloss 0.25\n", "", "the program prints another line: norms {'…': …}"),
        ("norms {'0': 3}\nloss 0.5\n", "", "the program prints another line: loss …"),
        ("norms {'0': 3}\nloss 0.5\n", "loss 0.75", ""),
        ("norms {'0': 3}\n", "", "the program prints another line: loss …"),
    ],
)
def test_what_the_program_prints_stays_the_same(tmp_path: Path, shown: str, varies: str, says: str) -> None:
    """A call that an edit has lost may have changed an object of the program, which no result of a function shows."""

    class Shown(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            cured = self.cured_by in texts.get("program.py", "")
            return run(*(() if cured else (self.item,)), shown=shown if cured else "norms {'0': 3}\nloss 0.25\n")

    laboratory = Shown(tmp_path, "x * (x.sum())")
    laboratory.varying = different_lines("loss 0.25", varies) if varies else set()
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.refused.get("keep_tensor", "") == says
    assert found.removed == (not says)


def test_a_line_may_vary_first_in_a_trial(tmp_path: Path) -> None:
    """The time that a program prints may be the same in the two runs before the trials."""

    class Timed(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            self.number += 1
            cured = self.cured_by in texts.get("program.py", "")
            return run(*(() if cured else (self.item,)), shown=f"took {1 if self.number < 2 else 2} s\n")

    laboratory = Timed(tmp_path, "x * (x.sum())")
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.removed


@pytest.mark.parametrize("by_itself", [True, False])
def test_an_order_of_lines_may_vary_by_itself(tmp_path: Path, by_itself: bool) -> None:
    """Threads of a program print in no order of their own."""
    lines = ["a\n", "b\n", "c\n"]

    class Threads(Program1):
        def run(self, texts: dict[str, str], mode: str, **_: Any) -> Run:
            self.number += 1
            cured = self.cured_by in texts.get("program.py", "")
            turned = self.number > 1 if by_itself else cured
            shown = "".join(reversed(lines) if turned else lines)
            return run(*(() if cured else (self.item,)), shown=shown)

    laboratory = Threads(tmp_path, "x * (x.sum())")
    (found,), _, _ = _try_entries(laboratory, laboratory.run({}, "compare"))
    assert found.removed == by_itself


def test_an_address_and_the_last_operation_are_no_part_of_a_line() -> None:
    assert different_lines("<f at 0x7f3ab2> 1.0", "<f at 0x12> 1.00001") == set()
    assert different_lines("tensor(1., grad_fn=<MulBackward0>)", "tensor(1., grad_fn=<WhereBackward0>)") == set()
    assert different_lines("<f at 0x7f3ab2> 1.0", "<f at 0x7f3ab2> 2.0") == {("<f at ...> ", "")}


def test_no_gradient_flows_through_a_comparison(tmp_path: Path) -> None:
    """The norm of what a condition compares may be 0, where it has no gradient."""
    (tmp_path / "program.py").write_text("def f(x):\n    return x\n")
    changed = {"program.py": "def f(x):\n    done = x.norm() < 3\n    y = x.norm()\n    return y\n"}
    rows = _rows_computed_always(tmp_path, {}, changed)
    assert [row.strip() for row in rows] == ["done = True", "y = x.norm()", "return y"]


def test_remedies_change_lines_of_the_program_alone() -> None:
    assert {r.id for r in list_remedies(ITEM)} >= {"torch_hint", "keep_tensor"}
    assert all(not r.own for r in list_remedies(replace(ITEM, owner="library")))
    marked = replace(ITEM, cause="disabled", owner="torch")
    assert "drop_marker" not in {r.id for r in list_remedies(marked)}
    assert len({r.id for r in REMEDIES}) == len(REMEDIES)


# --- the probe --------------------------------------------------------------------------------------------------------


def observed(folder: Path, mode: str, fn: Any, *args: Any, ignored: Sequence[str] = ()) -> probe.Probe:
    """A call of ``fn`` under a probe; the second run of a folder compares with the first."""
    names = {"recording": str(folder / "recording.pt"), "result": str(folder / "result.json")}
    spec = {"mode": mode, "ignored": ignored, **names}
    watching = probe.Probe(spec)
    if mode == "compare":
        watching.calls = torch.load(names["recording"], weights_only=False)
    try:
        watching._observe(torch, "f", fn, None, args, {})
    finally:
        watching.finish(torch)
    return watching


def test_the_same_function_agrees_on_recorded_inputs(tmp_path: Path) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sum() + torch.rand(())

    torch.manual_seed(5)
    observed(tmp_path, "record", f, torch.ones(3), torch.ones(3, requires_grad=True))
    torch.manual_seed(5)
    again = observed(tmp_path, "compare", f, torch.zeros(3), torch.ones(3, requires_grad=True))
    assert again.differences == []
    assert again.counts == {"outputs": 1, "gradients": 1, "calls": 1}


def test_what_a_call_draws_changes_no_later_number(tmp_path: Path) -> None:
    """An edit may draw numbers in front of a call, where the next one begins. More draws in a call would change what
    the program draws later, which the trial shows by the first of them alone."""
    states = list[tuple[Any, float]]()
    for mode, more in (("record", 0), ("compare", 3)):
        torch.manual_seed(5)
        random.seed(5)
        seen = observed(tmp_path, mode, lambda x, more=more: (torch.rand(more), x)[1], torch.ones(3))
        says = [d.partition(": ")[2] for d in seen.differences]
        assert says == (["the state of the random generator of torch differs behind it"] if more else [])
        states.append((torch.rand(()), random.random()))
    assert states[0] == states[1]


@pytest.mark.parametrize("generator", ["python", "numpy"])
def test_draws_of_other_generators_are_compared(tmp_path: Path, generator: str) -> None:
    draw = random.random if generator == "python" else np.random.rand
    observed(tmp_path, "record", lambda x: x * 2, torch.ones(3))
    seen = observed(tmp_path, "compare", lambda x: (draw(), x * 2)[1], torch.ones(3))
    assert seen.differences == [f"f, call 1: the state of the random generator of {generator} differs behind it"]
    assert seen.unstable  # a program that seeds them by the clock is compared without them


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda x, w: (x * w * 1.01).sum(), "outputs value differs"),
        (lambda x, w: (x * w.detach()).sum(), "it has other gradients"),
        (lambda x, w: (x * w).sum() * 1 + (w - w.detach()).sum(), "gradients"),
        (lambda x, w: ((x * w).sum(),), "it has other outputs"),
        (lambda x, w: (x * w).sum().item(), "is of type float instead of Tensor"),
    ],
)
def test_a_changed_function_differs(tmp_path: Path, other: Any, says: str) -> None:
    w = torch.arange(3.0).requires_grad_()
    observed(tmp_path, "record", lambda x, w: (x * w).sum(), torch.ones(3), w)
    assert says in " ".join(observed(tmp_path, "compare", other, torch.ones(3), w).differences)


def test_calls_are_counted_by_function(tmp_path: Path) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    watching = probe.Probe({"mode": "record"})
    site = ("program.py", 1, 0)
    observed_double = watching._wrap(torch, double, double, site)
    observed_model = watching._wrap(torch, double, torch.nn.Identity(), site)
    for call in (observed_double, observed_model, observed_double):
        call(torch.ones(2))
    (first, twice), (second, once) = watching.called.items()
    assert (first, twice) == (f"test_trial.py:{double.__code__.co_firstlineno}:double", 2)
    assert (second.rpartition(":")[2], once) == ("forward", 1)


def test_an_exception_is_a_result(tmp_path: Path) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"{x.shape} is refused")

    def crash(x: torch.Tensor) -> torch.Tensor:
        raise KeyError

    for mode in ("record", "compare"):
        with pytest.raises(ValueError, match="is refused"):
            observed(tmp_path, mode, refuse, torch.ones(2))
    watching = probe.Probe({"mode": "compare"})
    watching.calls = torch.load(tmp_path / "recording.pt", weights_only=False)
    with pytest.raises(KeyError):
        watching._observe(torch, "f", crash, None, (torch.ones(2),), {})
    assert watching.differences == ["f, call 1: it raises KeyError instead of ValueError"]
    accepting = probe.Probe({"mode": "compare"})
    accepting.calls = watching.calls
    accepting._observe(torch, "f", torch.sin, None, (torch.ones(2),), {})
    assert accepting.differences == ["f, call 1: it raises no exception instead of ValueError"]


def test_values_of_the_programs_own_classes_are_recorded_as_plain_ones() -> None:
    class Mode(IntEnum):
        DECODE = 2

    class Name(StrEnum):
        KEYS = "keys"

    assert [(type(v), v) for v in map(probe.plain_value, (Mode.DECODE, Name.KEYS, True, None))] == [
        (int, 2),
        (str, "keys"),
        (bool, True),
        (type(None), None),
    ]


def test_a_write_to_an_argument_is_seen(tmp_path: Path) -> None:
    observed(tmp_path, "record", lambda store: None, {"a": torch.ones(2)})
    changed = observed(tmp_path, "compare", lambda store: store["a"].add_(1), {"a": torch.ones(2)})
    assert any("state" in d for d in changed.differences)


def test_a_value_that_varies_by_itself_is_not_compared(tmp_path: Path) -> None:
    clock = iter(range(10))

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, next(clock)

    observed(tmp_path, "record", f, torch.ones(2))
    again = observed(tmp_path, "compare", f, torch.ones(2))
    assert again.unstable == ["f, call 1: outputs 1"]
    later = observed(tmp_path, "compare", f, torch.ones(2), ignored=again.unstable)
    assert later.differences == []
    halved = observed(tmp_path, "compare", lambda x: (x, next(clock)), torch.ones(2), ignored=again.unstable)
    assert len(halved.differences) == 1  # the tensor is compared still
    assert halved.zeroed == []
    observed(tmp_path, "record", lambda x: 2.5, torch.ones(2))
    stopped = observed(tmp_path, "compare", lambda x: 0.0, torch.ones(2), ignored=["f, call 1: outputs value"])
    assert len(stopped.zeroed) == 1


def test_a_missing_call_is_seen(tmp_path: Path) -> None:
    observed(tmp_path, "record", lambda x: x, torch.ones(2))
    spec = {"mode": "compare", "recording": str(tmp_path / "recording.pt"), "result": str(tmp_path / "result.json")}
    silent = probe.Probe(spec)
    silent.calls = torch.load(spec["recording"], weights_only=False)
    silent.finish(torch)
    assert json.loads((tmp_path / "result.json").read_text())["differences"] == ["0 calls instead of 1"]


def test_lines_of_the_output_are_the_same_but_for_their_numbers() -> None:
    assert zeros_in_output("took 1.5 s\n", "took 0.0 s\n") == ["took 1.5 s"]
    assert zeros_in_output("took 0 s\n", "took 0.0 s\n") == []
    # A sign that stands for a number elsewhere is none here.
    assert zeros_in_output("# 5\n3 4\n", "# 0\n3 4\n") == ["# 5"]


def test_what_runs_behind_an_early_return_is_computed_always(tmp_path: Path) -> None:
    before = "import torch\ndef f(x):\n    if x.sum() == 0:\n        return x\n    y = x / x.sum()\n    return y\n"
    picked = "import torch\ndef f(x):\n    early, done = x, x.sum() == 0\n    y = x / x.sum()\n"
    picked += "    return torch.where(done, early, y)\n"
    rows = _rows_computed_always(tmp_path, {"program.py": before}, {"program.py": picked})
    assert [r.strip() for r in rows] == ["early, done = (x, True)", *(r.strip() for r in picked.splitlines()[3:])]


# --- copies and commands --------------------------------------------------------------------------------------------


def test_a_copy_has_files_of_its_own_and_links_to_data(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "package").mkdir(parents=True)
    (root / "package" / "a.py").write_text("A = 1\n")
    (root / "package" / "table.bin").write_bytes(b"\0")
    (root / ".git").mkdir()
    copy = make_copy(root, tmp_path / "copy", {"package/a.py": "A = 2\n"})
    assert (copy / "package" / "a.py").read_text() == "A = 2\n"
    assert (root / "package" / "a.py").read_text() == "A = 1\n"
    assert (copy / "package" / "table.bin").is_symlink()
    assert diff_texts(root, {"package/a.py": "A = 2\n"}).endswith("-A = 1\n+A = 2\n")


def test_programs_that_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    script = parse_program([sys.executable, "-u", "a.py", "--flag"])
    assert (script.python, script.main_file()) == ((sys.executable, "-u"), "a.py")
    assert script.in_copy(Path("/copy")) == ("/copy/a.py", "--flag")
    module = parse_program([sys.executable, "-m", "a", "-x"])
    assert (module.arguments, module.main_file()) == (("-m", "a", "-x"), "a.py")
    for command in (["torchrun", "a.py"], [sys.executable, "-c", "pass"], [sys.executable]):
        with pytest.raises(ShiplapError, match="SL703"):
            parse_program(command)


SHARED = """
import torch

def scale(x):
    return x * 2

def compiled(fn):
    return torch.compile(fn, backend="eager")

fast = compiled(scale)
"""

CALLERS = """
import torch
from shared import fast, scale

other = torch.compile(scale)
class Net(torch.nn.Module):
    @torch.compile
    def forward(self, x):
        return scale(x)
net, double, once = Net(), torch.compile(scale), torch.compile(
    lambda x: x + 1)
for n in (2, 3):
    other(torch.ones(n))
    net(torch.ones(n, n))
    once(torch.ones(2))
fast(torch.ones(2, dtype=torch.int))
"""


def test_an_entry_knows_the_call_that_compiled_its_function(tmp_path: Path) -> None:
    """The line of the program that calls torch.compile, or that of the decorator."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "shared.py").write_text(SHARED)
    (root / "program.py").write_text(CALLERS)
    program = Program((sys.executable,), (str(root / "program.py"),), root)
    seen = Laboratory(program, tmp_path, None).run({}, "record")
    assert seen is not None
    rows = CALLERS.splitlines()
    sites = sorted(
        (e.place.function, [(f, rows[n - 1][c:][:13] if f == "program.py" else n) for f, n, c in case.compiled_at])
        for e in seen.diagnosis.recompiles
        for case in [make_case(program, e, {}, seen.sites)]
        if case.compiled_at
    )
    assert sites == [
        ("forward", [("program.py", "torch.compile")]),
        ("scale", [("program.py", "torch.compile")]),
        ("scale", [("shared.py", 8)]),
    ]
    assert len(seen.sites) == 5


PROGRAM = """
import torch

@torch.compile(backend="eager")
def f(x):
    if x.sum() > 0:
        x = x * 2
    return x * x.mean().item()

for sign in (1, -1, 1):
    f(torch.full((3,), 0.5 * sign))
"""


@pytest.mark.long
def test_a_program_is_treated_in_a_copy_and_then_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.cli.app import app

    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    treated = try_remedies([sys.executable, "program.py"], measure=False)
    assert treated.ok
    assert {t.remedy for t in treated.tried} == {"torch_hint", "where"}
    assert (tmp_path / "program.py").read_text() == PROGRAM
    done = CliRunner().invoke(app, ["doctor", "--json", "--apply", "--", sys.executable, "program.py"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert "torch.where" in (tmp_path / "program.py").read_text()
