"""The README's first example, as a newcomer would paste it; then one wrong input."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shiplap as sl

pytestmark = pytest.mark.docs

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_runs_and_explains_a_wrong_input(tmp_path):
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    file = tmp_path / "example.py"  # a file, so that annotations and sources can be read
    file.write_text(example.group(1), encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "readme_example"}
    exec(compile(example.group(1), str(file), "exec"), scope)
    op, x, y = scope["scaled_add"], torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(op(x, y, 2.0), x + 2 * y)
    op(x, y, 2.0).sum().backward()
    assert y.grad is not None
    assert (y.grad == 2).all()
    assert sl.audit(op, checks=["numerics", "gradient", "fake"]).proven
    with pytest.raises(sl.ShiplapError, match="SL202"):
        op(x, torch.randn(2, 4))
