"""``tools/consumers.py``: the networks of a checkout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from shiplap import torch_private

pytestmark = pytest.mark.docs

CONSUMER = """
import torch

class StandIn(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

def networks():
    return {"net": (torch.nn.Sequential(torch.nn.Linear(4, 4), StandIn()), [(torch.randn(3, 4),)])}
"""


def test_a_graph_may_have_functions_of_the_checkout_in_it(tmp_path: Path) -> None:
    (tmp_path / "consumer.py").write_text(CONSUMER)
    networks_of = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "consumers.py"))["networks_of"]
    before, path = set(sys.modules), [*sys.path]
    (net, [arguments]) = networks_of(str(tmp_path))["net"]
    try:
        torch_private.reset_compiler()
        torch.testing.assert_close(torch.compile(net, backend="eager")(*arguments), net(*arguments))
        assert sys.path == path
    finally:
        torch_private.reset_compiler()
        for name in set(sys.modules) - before:
            if name.startswith("consumer_of"):
                del sys.modules[name]
