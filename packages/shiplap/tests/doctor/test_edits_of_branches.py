"""Both sides of a branch run where nobody can notice it, and the values of one are picked."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
import torch

from shiplap.doctor import edits_of_branches, edits_of_values
from tests.doctor.programs import CountingBackend, proposals

PICK = """
    import torch
    kept = []
    @torch.compile(backend=count, fullgraph=True)
    def f(x, grads, limit):
        loss = x.sum()
        if loss > limit:  # HERE
            scale = limit / loss
            grads = [g * scale for g in grads]
            loss = torch.zeros_like(loss)
            x[0] = 2.0
            kept.append("large")
        else:
            loss = loss + 1
        return loss, grads, x
"""


def test_values_of_a_branch_are_picked_and_its_calls_are_made_later(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, PICK, edits_of_branches.pick_for_branch)
    plain = textwrap.dedent(PICK).replace("@torch.compile(backend=count, fullgraph=True)\n", "")
    graphs = CountingBackend()
    with torch._dynamo.config.patch(reorderable_logging_functions=set()):
        exec(changed, ran := {"count": graphs})
        exec(plain, before := {})
        for value in (1.0, 5.0, 0.5, 7.0):
            given = [(torch.full((2,), value), [torch.ones(2), torch.ones(3)], torch.tensor(4.0)) for _ in range(2)]
            for got, wanted in zip(ran["f"](*given[0]), before["f"](*given[1]), strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            torch.testing.assert_close(given[0], given[1], rtol=0, atol=0)
    assert (ran["kept"], graphs.frame_count) == (["large", "large"], 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale = limit / loss", "return x"),
        ("scale = limit / loss", "scale = torch.rand(())"),
        ("scale = limit / loss", "scale = net(loss)"),
        ("scale = limit / loss", "scale = limit / loss.item()"),
        ("scale = limit / loss", "scale = torch.linalg.inv(x)"),
        ("scale = limit / loss", "scale = x[x > 0]"),
        ("scale = limit / loss", "scale = x.mul_(2)"),
        ("scale = limit / loss", "x.mul_(2)"),
        ("scale = limit / loss", "torch.nn.utils.clip_grad_norm_(grads, 1.0)"),
        ("loss = torch.zeros_like(loss)", "fresh = loss"),
        ("x[0] = 2.0", "x.note = 2.0"),
        ("x[0] = 2.0", "x[limit] = 2.0"),
        ("x[0] = 2.0", "loss = x[limit]"),
        ("x[0] = 2.0", "x[loss.long()] = 2.0"),
        ('kept.append("large")', "grads.append(loss)"),
        ("return loss, grads, x", "x.add_(1)\n        return loss, grads, x"),
        ("scale = limit / loss", "scale = net.layer(loss)"),
        ("scale = limit / loss", "scale = torch.normal(loss, limit)"),
        ("scale = limit / loss", "scale = torch.mul(loss, limit, out=x)"),
        ("scale = limit / loss", "scale = torch.relu(loss, inplace=True)"),
        ("scale = limit / loss", "x += 1"),
        ("if loss > limit:", "if limit is not None and loss > limit:"),
        ("loss = x.sum()", "global scale\n        loss = x.sum()"),
        ("loss = x.sum()", "loss = x.sum()\n        count = len(kept)"),
        ("loss = x.sum()", "loss = x.sum()\n        later = lambda: scale"),
    ],
)
def test_a_branch_that_could_be_noticed_stays(tmp_path: Path, old: str, new: str) -> None:
    assert old in PICK
    source = PICK.replace(old, new, 1)
    source = source.replace("grads, x\n", "grads, x, fresh\n") if "fresh" in new else source
    assert proposals(tmp_path, source, edits_of_branches.pick_for_branch) == []


ROUNDS = """
    import torch
    @torch.compile(backend=count, fullgraph=True)
    def f(z, limit, most):
        steps = 0
        residual = torch.tensor(9.0)
        while residual > limit and steps < 6:  # HERE
            new = z * 0.5 + steps
            residual = (new - z).abs().max()
            z = new
            steps += 1
        return z, steps
"""


def test_a_loop_with_a_greatest_number_of_rounds_runs_them_all(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, ROUNDS, edits_of_branches.pick_for_loop)
    plain = textwrap.dedent(ROUNDS).replace("@torch.compile(backend=count, fullgraph=True)\n", "")
    graphs = CountingBackend()
    with torch._dynamo.config.patch(capture_scalar_outputs=False):
        exec(changed, ran := {"count": graphs})
        exec(plain, before := {})
        for limit in (10.0, 9.0, 2.0, 1.9, 0.0):
            given = torch.ones(2), torch.tensor(limit), 6
            (z, steps), (wanted, rounds) = ran["f"](*given), before["f"](*given)
            torch.testing.assert_close(z, wanted, rtol=0, atol=0)
            assert (steps, type(steps)) == (rounds, int)
    assert graphs.frame_count == 1


def test_the_greatest_number_of_rounds_may_be_an_attribute(tmp_path: Path) -> None:
    source = ROUNDS.replace("def f(z,", "def f(self, z,").replace("steps < 6", "steps < self.most")
    (changed,) = proposals(tmp_path, source, edits_of_branches.pick_for_loop)
    assert "for steps in range(steps, self.most):" in changed
    changing = textwrap.dedent(source) + "def reset(self):\n    self.most = 2\n"
    assert proposals(tmp_path, changing, edits_of_branches.pick_for_loop) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("z = new", "z += new"),
        ("z = new", "kept.append(z)"),
        ("z = new", "z = new + torch.rand(2)"),
        ("z = new", "z = new\n            steps = 3"),
        ("z = new", "if residual == 0:\n                break"),
        ("steps += 1", "steps += 2"),
        ("steps += 1", "z = z * 2"),
        ("steps = 0", "steps = most"),
        ("steps < 6", "steps <= 6"),
        (" and steps < 6", ""),
        ("residual > limit and steps < 6", "steps < 6"),
        ("residual > limit and", "residual > limit or"),
        ("steps < 6", "steps < new"),
        ("return z, steps", "return new"),
    ],
)
def test_other_loops_stay(tmp_path: Path, old: str, new: str) -> None:
    assert old in ROUNDS
    assert proposals(tmp_path, ROUNDS.replace(old, new), edits_of_branches.pick_for_loop) == []


def test_no_value_is_picked_from_two_kinds(tmp_path: Path) -> None:
    """The other side may come in a later call alone, and torch.where would give both sides one size and dtype."""
    (changed,) = proposals(tmp_path, PICK, edits_of_branches.pick_for_branch)
    exec(changed[changed.index("def pick_values") : changed.index("@torch")], ran := {"torch": torch})
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64), 1.0, None, [torch.ones(2)]):
        with pytest.raises(TypeError, match="no choice between"):
            ran["pick_values"](torch.tensor(True), torch.ones(2), other)


COUNTS = """
    import torch
    def f(hits, x, y):
        if not hits.sum():  # HERE
            x = x + 1
            y = y * 2
        return x, y
"""


def test_an_integer_is_no_condition(tmp_path: Path) -> None:
    """The operator ~ inverts its bits, and 0 is the only integer for which that agrees with ``not``."""
    (changed,) = proposals(tmp_path, COUNTS, edits_of_branches.pick_for_branch)
    exec(changed, ran := {})
    x = torch.ones(2)
    for hits in ([0], [2]):
        with pytest.raises(AssertionError):
            ran["f"](torch.tensor(hits), x, x)


SKIPS = """
    import torch
    def f(x, flags):
        total = torch.zeros(2)
        for i in range(3):
            if not flags[i]:  # HERE
                continue
            part = x * i
            total = total + part
        return total
"""


def test_the_rest_of_a_round_is_picked(tmp_path: Path) -> None:
    (changed,) = proposals(tmp_path, SKIPS, edits_of_branches.pick_for_branch)
    exec(changed, ran := {})
    exec(textwrap.dedent(SKIPS), before := {})
    for flags in ([True, False, True], [False, False, False], [True, True, True]):
        given = torch.ones(2), torch.tensor(flags)
        torch.testing.assert_close(ran["f"](*given), before["f"](*given), rtol=0, atol=0)
    graphs = CountingBackend()
    torch.compile(ran["f"], backend=graphs, fullgraph=True)(torch.ones(2), torch.tensor([True, False, True]))
    assert graphs.frame_count == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [("return total", "return total, part"), ("part = x * i", "part = part * i"), ("part = x * i", "x.add_(i)")],
)
def test_a_rest_that_could_be_noticed_stays(tmp_path: Path, old: str, new: str) -> None:
    assert old in SKIPS
    assert proposals(tmp_path, SKIPS.replace(old, new), edits_of_branches.pick_for_branch) == []


def test_the_other_side_starts_from_the_values_before(tmp_path: Path) -> None:
    source = """
        import torch
        def f(x, scale):
            if x.sum() > 0:  # HERE
                scale = scale * 2
                x = x * scale
            else:
                x = x + scale
            return x
    """
    (changed,) = proposals(tmp_path, source, edits_of_branches.pick_for_branch)
    exec(changed, ran := {})
    assert ran["f"](torch.tensor([3.0]), torch.tensor(5.0)).tolist() == [30.0]
    assert ran["f"](torch.tensor([-3.0]), torch.tensor(5.0)).tolist() == [2.0]


def test_a_question_of_python_stays_in_front_of_a_tensor() -> None:
    """A tensor that is None must not be read, and a number is no bool."""
    node = ast.parse("mask is not None and mask.any() and not done", mode="eval").body
    text = edits_of_values.condition_of_tensors(node)
    assert text == "torch.as_tensor(mask.any() & ~done if mask is not None else False)"
    assert not eval(text, {"torch": torch, "mask": None})
    either = edits_of_values.condition_of_tensors(ast.parse("self.always or x.any()", mode="eval").body)
    assert either == "torch.as_tensor(True if self.always else x.any())"
