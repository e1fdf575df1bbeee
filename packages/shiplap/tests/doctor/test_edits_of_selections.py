"""A selection is used in each call only where an empty one changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shiplap.doctor.edits_of_selections import refuse_no_selection, use_selection
from tests.doctor.programs import proposals

BODIES = [
    "if mask.any():  # HERE\n    x[mask] = 0.0\nreturn x",
    "if mask.sum() > 0:  # HERE\n    x = x.masked_fill(mask, 7.0)\nreturn x",
    "if (x > 1).any().item():  # HERE\n    x[x > 1] = x[x > 1].mean()\nreturn x",
    "rows = mask.nonzero()[:, 0]\nif len(rows) > 0:  # HERE\n    part = x[rows] * 2\n    x[rows] = part\nreturn x",
    "rows = mask.nonzero()[:, 0]\nif rows.numel() == 0:  # HERE\n    return x.new_zeros(0)\nreturn x[rows]",
    "for k in (mask, ~mask):\n    if not k.any():  # HERE\n        continue\n    x.masked_fill_(k, 3.0)\nreturn x",
]


def program(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"import torch\ndef f(x, mask):\n    x = x.clone()\n{lines}"


@pytest.mark.parametrize("body", BODIES)
def test_an_empty_selection_changes_nothing(tmp_path: Path, body: str) -> None:
    changed, captured = proposals(tmp_path, program(body), use_selection)
    assert "capture_dynamic_output_shape_ops = True" in captured
    assert "any()" not in changed.partition("def f")[2] or "pass" in changed
    (refusing,) = proposals(tmp_path, program(body), refuse_no_selection)
    exec(program(body), before := {})
    exec(changed, after := {})
    exec(refusing, strict := {})
    x = torch.tensor([0.5, -1.0, 0.25])
    for mask in (torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool)):
        torch.testing.assert_close(after["f"](x, mask), before["f"](x, mask))
    with pytest.raises(AssertionError, match="nothing is selected"):
        strict["f"](x, torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize(
    "body",
    [
        "if mask.any():  # HERE\n    x = x.clamp(max=1.0)\nreturn x",  # it may change nothing in one call alone
        "if mask.any():  # HERE\n    x[~mask] = 0.0\nreturn x",
        "if mask.any():  # HERE\n    x[mask] = torch.rand(3)[mask]\nreturn x",  # later numbers would be others
        "if mask.any():  # HERE\n    print(x)\nreturn x",
        "if mask.all():  # HERE\n    x[mask] = 0.0\nreturn x",
        "if mask.any() and x.sum() > 0:  # HERE\n    x[mask] = 0.0\nreturn x",
        "y = 1\nif mask.any():  # HERE\n    y = 2\n    x[mask] = 0.0\nreturn x * y",
        "if mask.any():  # HERE\n    x[mask] = 0.0\nelse:\n    x = -x\nreturn x",
        "if len(x) == 0:  # HERE\n    return x.new_zeros(3)\nreturn x[x]",
        "if len(x) == 0:  # HERE\n    return x.new_zeros(0)\nreturn x.sum(-1)",
        "if x.sum() == 1:  # HERE\n    x[x] = 0.0\nreturn x",
        "if ~mask.any():  # HERE\n    x[~mask] = 0.0\nreturn x",  # no part of the question is about ~mask
        "if x is None:\n    return x\nelif mask.any():  # HERE\n    x[mask] = 0.0\nreturn x",
    ],
)
def test_what_an_empty_selection_may_change_stays(tmp_path: Path, body: str) -> None:
    assert proposals(tmp_path, program(body), use_selection) == []
    assert proposals(tmp_path, program(body), refuse_no_selection) == []


def test_indices_are_no_mask(tmp_path: Path) -> None:
    """The index 0 selects an item, though its sum is 0."""
    body = "if mask.sum() > 0:  # HERE\n    x[mask] = 0.0\nreturn x"
    changed, _ = proposals(tmp_path, program(body), use_selection)
    exec(changed, after := {})
    with pytest.raises(AssertionError):
        after["f"](torch.ones(3), torch.tensor([0]))
