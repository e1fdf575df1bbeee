"""A part of a function is compiled in place of the whole where nobody can notice that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shiplap.doctor import edits_of_calls, edits_of_parts, edits_of_values
from shiplap.doctor.diagnosis import Diagnosis
from shiplap.doctor.edits import Case
from shiplap.doctor.laboratory import Run
from shiplap.doctor.recompiles import parse_failed_guard
from shiplap.doctor.remedies import REMEDIES
from shiplap.doctor.scratch import apply_edits
from shiplap.doctor.trial import _reason_by_remedy
from tests.doctor.programs import proposals

BEHIND = """
import torch


@torch.compile(backend="eager")
def f(x, w):
    y = torch.tanh(x @ w)
    z = y.mean()
    found = [z.item()]  # HERE
    return y, found
"""


def test_what_stands_in_front_of_the_break_is_compiled(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, BEHIND, edits_of_parts.compile_part)
    assert '@torch.compile(backend="eager", disable=True)\ndef f(x, w):\n    y, z = f_part(x, w)\n' in changed
    part = '@torch.compile(backend="eager")\ndef f_part(x, w):\n    y = torch.tanh(x @ w)\n    z = y.mean()\n'
    assert f"{part}    return y, z\n" in changed


FRONT = """
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        n = int(self.limit)  # HERE
        if n:
            return x * n
        return -x


net = torch.compile(Net(), backend="eager")
"""


def test_what_stands_behind_the_break_is_compiled(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, FRONT, edits_of_parts.compile_part, function="forward")
    assert "        n = int(self.limit)  # HERE\n        return self.forward_part(x, n)\n" in changed
    assert '    @torch.compile(backend="eager")\n    def forward_part(self, x, n):\n        if n:\n' in changed
    assert 'net = torch.compile(Net(), backend="eager", disable=True)' in changed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "y = torch.tanh(x @ w)",
            "if w is None:\n        return x\n    y = torch.tanh(x @ w)",
        ),  # it leaves the function
        ("z = y.mean()", "if w is None:\n        z = y.mean()"),  # z may be missing
        ("z = y.mean()", "if w is None:\n        z = y\n    z[0] = y.mean()"),  # which assigns no variable
        ("z = y.mean()", "z = y.mean()\n    g = lambda: z\n    y = g()"),  # g is passed on, and holds the other z
        ("y = torch.tanh(x @ w)", "y = torch.tanh(x @ w) * len(locals())"),
        ("y = torch.tanh(x @ w)", "global z\n    y = torch.tanh(x @ w)"),  # z outlives the call
        ("z = y.mean()", "z = yield y"),
        ("    found = [z.item()]  # HERE", "    for v in y:\n        found = [v.sin() + v.cos().item()]  # HERE"),
        ("import torch\n", "import torch\nprint(f._orig_mod)\n"),
        ("import torch\n", "import torch\nNAMES = dict(NET.named_parameters())\n"),  # of the compiled object
        ("import torch\n", "import torch\ndef twice(y, x):\n    return grad(y, x, create_graph=True)\n"),
        ('backend="eager"', "backend=BACKEND"),  # which may be another one by then
    ],
)
def test_a_part_that_could_be_noticed_stays(tmp_path: Path, old: str, new: str) -> None:
    assert old in BEHIND
    source = BEHIND.replace(old, new)
    if "g = lambda" in new:
        source = source.replace("found = [z.item()]", "z = [g().item()]").replace("return y, found", "return g, z")
    assert proposals(tmp_path, source, edits_of_parts.compile_part) == []


def test_what_a_condition_compiles_stays(tmp_path: Path) -> None:
    source = FRONT.replace('backend="eager")', 'backend="eager") if COMPILED else Net()')
    assert proposals(tmp_path, source, edits_of_parts.compile_part, function="forward") == []


BOUND = """
import torch


@torch.compile(backend="eager")
def f(x, w, deep=False):
    {}
    n = x.sum().item()  # HERE
    y = torch.tanh(x @ w) * n
    return y * g if deep else y
"""


@pytest.mark.parametrize(
    ("bound", "count"),
    [
        ("g = 2", 1),
        ("from math import pi as g", 0),
        ("def g():\n        return 2", 0),
        ("class g:\n        pass", 0),
        ("match w:\n        case g:\n            pass", 0),
        ("g = 2\n    del g", 0),
        ("g = 2\n    try:\n        w.item()\n    except RuntimeError as g:\n        pass", 0),
    ],
)
def test_a_part_finds_each_variable_that_it_reads(tmp_path: Path, bound: str, count: int) -> None:
    found = proposals(tmp_path, BOUND.format(bound), edits_of_parts.compile_part)
    assert ["return f_part(x, w, deep, g, n)" in text for text in found] == [True] * count


@pytest.mark.parametrize("change", ["del y", "y += 1"])
def test_a_variable_that_is_changed_later_is_left(tmp_path: Path, change: str) -> None:
    source = BEHIND.replace("# HERE", f"\n    if w is None:\n        {change}").replace(
        "return y, found", "return found"
    )
    source = source.replace("[z.item()]", "[z.item()]  # HERE")
    (changed,) = proposals(tmp_path, source, edits_of_parts.compile_part)
    assert "    y, z = f_part(x, w)\n" in changed


def test_a_variable_of_the_module_is_not_passed(tmp_path: Path) -> None:
    """A function that the part calls may change it."""
    source = FRONT.replace("n = int(self.limit)", "global N\n        N = n = int(self.limit)").replace(
        "x * n", "x * n * N"
    )
    (changed,) = proposals(tmp_path, source, edits_of_parts.compile_part, function="forward")
    assert "def forward_part(self, x, n):" in changed


def test_an_inner_function_of_another_compiled_one_stays_whole(tmp_path: Path) -> None:
    called = '\n\n@torch.compile(backend="eager")\ndef g(x, w):\n    return f(x, w)\n'
    assert proposals(tmp_path, BEHIND + called, edits_of_parts.compile_part) == []


@pytest.mark.parametrize(("kept", "refused"), [(5, True), (6, False)])
def test_most_operations_stay_compiled(kept: int, refused: bool) -> None:
    (remedy,) = (r for r in REMEDIES if r.id == "part")
    now, after = (Run(Diagnosis("p", (), (), operations=n), 0, 1.0) for n in (12, kept))
    reason = _reason_by_remedy(remedy, now, after, (), set())
    assert reason == ("5 of 12 operations would be compiled" if refused else "")
    assert not _reason_by_remedy(replace(remedy, parts=False), now, after, (), set())


ROUNDS = """
import torch


@torch.compile(backend="eager")
def f(x, w, most=5):
    n = 0
    frames = []
    for i in range(most):
        old = x
        x = torch.tanh(x @ w) + old
        frames.append(x)
        n += 1
        if x.sum() > 3:  # HERE
            break
    return x, n
"""


def test_the_rounds_of_a_loop_are_compiled(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, ROUNDS, edits_of_parts.compile_part)
    part = "def f_part(x, w):\n    old = x\n    x = torch.tanh(x @ w) + old\n    return x\n"
    assert part in changed
    assert "        x = f_part(x, w)\n        frames.append(x)\n        n += 1\n        if x.sum() > 3:" in changed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("old = x\n", "old = x if i else z\n        z = x.sin()\n"),  # z is of an earlier round
        ("x = torch.tanh(x @ w) + old", "if i:\n            z = torch.tanh(x @ w)\n        x = z"),
        ("x = torch.tanh(x @ w) + old", "x = torch.tanh(x @ w)\n        if i == most:\n            break"),
    ],
)
def test_a_round_that_could_be_noticed_stays(tmp_path: Path, old: str, new: str) -> None:
    assert old in ROUNDS
    found = proposals(tmp_path, ROUNDS.replace(old, new), edits_of_parts.compile_part)
    assert all("z" not in text.partition("def f(")[0] and "break" not in text.partition("def f(")[0] for text in found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("old = x\n", "old = x\n        g = lambda: x.sin()\n"),  # the rounds have one variable x
        ('backend="eager"', 'mode="reduce-overhead"'),  # the frames would be overwritten
    ],
)
def test_rounds_that_depend_on_each_other_stay(tmp_path: Path, old: str, new: str) -> None:
    assert old in ROUNDS
    assert not proposals(tmp_path, ROUNDS.replace(old, new, 1), edits_of_parts.compile_part)


def test_a_part_gets_no_variable_that_another_part_keeps(tmp_path: Path) -> None:
    source = ROUNDS.replace("            break\n", "            break\n        if i:\n            old = x.sin()\n")
    (changed,) = proposals(tmp_path, source, edits_of_parts.compile_part)
    assert "        x = f_part(x, w)\n" in changed
    assert "        if i:\n            old = x.sin()\n" in changed


BRANCHES = """
import torch


@torch.compile(backend="eager")
def f(x, w, items):
    for v in items:
        x = x + v
    else:
        if x.sum() > 3:  # HERE
            x = torch.tanh(x @ w) * w
        elif w is None:
            x = torch.sin(x @ w) * v
        elif len(x):
            x = torch.cos(x @ w) * w
    return x
"""


def test_branches_of_elif_are_parts(tmp_path: Path) -> None:
    """``v`` is missing in the second one if there are no items."""
    changed = proposals(tmp_path, BRANCHES, edits_of_parts.compile_part)[0]
    assert "        elif w is None:\n            x = torch.sin(x @ w) * v\n        elif len(x):\n" in changed
    assert [f"def f_part{end}(x, w):" in changed for end in ("", "_", "__")] == [True, True, False]


HELPER = """
import torch


def masked(x, w):
    y = torch.tanh(x @ w)
    n = int(y.sum())  # HERE
    return y.cos() * n


@torch.compile(backend="eager")
def f(x, w):
    return masked(x, w)
"""


def test_parts_of_a_function_that_is_called_are_compiled(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HELPER)
    line = HELPER.splitlines().index("    n = int(y.sum())  # HERE") + 1
    case = Case(tmp_path, "program.py", "program.py", line, "masked", "", "", callers=(("program.py", line + 6),))
    case = replace(case, frames=(("program.py", line + 5),), compiled_at=(("program.py", line + 4, -1),))
    found = [apply_edits({}, tmp_path, edits) for edits in edits_of_parts.compile_part(case)]
    first = found[0]["program.py"] if found and found[0] else ""
    assert "    y = masked_part(x, w)\n    n = int(y.sum())  # HERE\n    return masked_part_(y, n)\n" in first
    assert '@torch.compile(backend="eager", disable=True)\ndef f(x, w):' in first


def test_a_function_that_calls_itself_is_edited_once(tmp_path: Path) -> None:
    source = HELPER.replace("    n = int", "    y = masked(y, w) if len(y) > 9 else y\n    n = int")
    (tmp_path / "program.py").write_text(source)
    line = source.splitlines().index("    n = int(y.sum())  # HERE") + 1
    callers = (("program.py", line - 1), ("program.py", line + 6))
    case = Case(tmp_path, "program.py", "program.py", line, "masked", "", "", callers=callers)
    case = replace(case, frames=(("program.py", line + 5),), compiled_at=(("program.py", line + 4, -1),))
    found = [apply_edits({}, tmp_path, edits) for edits in edits_of_parts.compile_part(case)]
    assert found
    assert None not in found
    assert len({str(each) for each in found}) == len(found)


@pytest.mark.parametrize(
    ("guard", "cause", "subject"),
    [
        ("L['n'].item() == 3", "value", "n.item()"),
        ("L['self'].shape[2] == 8", "attribute", "self.shape[2]"),
        ("L['self'].x.shape[2] == 8", "size", "self.x, dim 2"),
    ],
)
def test_a_number_is_no_attribute_and_an_attribute_no_size(guard: str, cause: str, subject: str) -> None:
    failure = parse_failed_guard(f"0/0: {guard}  # y = g(x)  # program.py:5 in f")
    assert (failure.cause, failure.subject) == (cause, subject)


LOOP = """
import torch
@torch.compile
def f(chunks, out):
    for chunk in chunks:  # HERE
        out = out + chunk
    return out
"""


def test_an_iterator_is_passed_as_a_list(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, LOOP, edits_of_calls.wrap_listed)
    assert "@with_listed_chunks_0\n@torch.compile\n" in changed
    space: dict[str, Any] = {}
    exec(changed.partition("@with_listed")[0], space)
    listed = space["with_listed_chunks_0"](lambda *args, **kwargs: (args, kwargs))
    numbers = itertools.count()  # a list of them has no end
    assert listed(iter("ab"), numbers, x=numbers) == ((["a", "b"], numbers), {"x": numbers})
    assert listed(chunks=iter("c"), x=numbers) == ((), {"chunks": ["c"], "x": numbers})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("out = out + chunk", "out = out + chunk\n        if n:\n            break"),  # it is not used up
        ("out = out + chunk", "out += chunk"),  # the iterator may read out
        ("out = out + chunk", "out = out + torch.rand(2)"),  # the iterator may draw as well
        ("out = out + chunk", "log(chunk)"),
        ("return out", "return out, next(chunks, None)"),
        ("import torch", "import torch\ndef draw():\n    yield torch.rand(2)"),  # a module may draw as well
    ],
)
def test_an_iterator_that_more_depends_on_stays(tmp_path: Path, old: str, new: str) -> None:
    assert proposals(tmp_path, LOOP.replace(old, new), edits_of_calls.wrap_listed) == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("a if b is None or a > b else b", "(a if b is None else torch.where(a > b, a, b))"),
        ("a if b is not None and b.any() else b", "(torch.where(b.any(), a, b) if b is not None else b)"),
        (
            "a if a is not None and b is not None and b.any() else b",
            "((torch.where(b.any(), a, b) if b is not None else b) if a is not None else b)",
        ),
        ("a if b.any() and b is not None else b", ""),  # b may be None where it is computed
        ("(a, b) if b is None or a > b else b", ""),
    ],
)
def test_python_decides_what_it_can(tmp_path: Path, choice: str, expected: str) -> None:
    source = f"import torch\ndef f(a, b):\n    return {choice}  # HERE\n"
    found = proposals(tmp_path, source, edits_of_values.where_for_branch)
    assert [expected in text for text in found] == [True] * bool(expected)


@pytest.mark.parametrize(
    ("first", "count"), [("bad = torch.where(b)[0].tolist()", 1), ("log(b)", 0), ("a.bad = b", 0), ("bad = log(b)", 0)]
)
def test_what_only_the_message_reads_may_be_left_out(tmp_path: Path, first: str, count: int) -> None:
    source = f"import torch\ndef f(a, b):\n    if b.any():  # HERE\n        {first}\n        raise ValueError('bad')\n"
    found = proposals(tmp_path, source, edits_of_values.assert_on_device)
    assert ["torch._assert_async(~b.any(), 'bad')" in text for text in found] == [True] * count


def test_a_form_feed_ends_no_line(tmp_path: Path) -> None:
    source = "import torch\n\x0c\ndef f(x):\n    return x if x.all() else -x  # HERE\n"
    (tmp_path / "program.py").write_text(source)
    case = Case(tmp_path, "program.py", "program.py", 4, "f", "", "")
    ((edit,),) = edits_of_values.where_for_branch(case)
    assert source[edit.start : edit.end] == "x if x.all() else -x"
