"""Which declared expressions may fail in a call, so that their errors are caught there; and sizes that are symbols."""

import ast
from types import SimpleNamespace

import pytest
import torch

from shiplap import torch_private
from shiplap.plan.expression import VariableNames, _node_can_fail, can_fail
from shiplap.plan.values import has_own_memory, memory_text

SAFE = ("n", "n // 2", "n % 7", "cdiv(n, 2)", "min(n, m)", "max(n, m, 3)", "broadcast(n, m)", "-1")
FAILS = ("n // m", "n // 0", "n % 0", "cdiv(n, m)", "cdiv(n, 0)", "min(n)", "-n", "n + m", "n * 2", "n[0]", "sum(n)")


@pytest.mark.parametrize("text", [*SAFE, *FAILS])
def test_what_may_fail(text):
    assert any(map(_node_can_fail, ast.walk(ast.parse(text, mode="eval")))) is (text in FAILS)


@pytest.mark.parametrize(
    ("scalars", "spread", "fails"), [({}, (), False), ({"n": "float"}, (), True), ({}, ("n",), True)]
)
def test_numbers_of_any_size_and_lists_may_fail(scalars, spread, fails):
    names = SimpleNamespace(scalars=scalars, spread=spread)
    expression = SimpleNamespace(names={"n"}, source="n")
    assert can_fail(expression, names) is fails


@pytest.mark.parametrize(
    ("name", "shown"),
    [("pads", "list(a_pads)"), ("c", "show(d_c)"), ("by", "a_by"), ("n", "d_n"), ("threads", "w_threads")],
)
def test_how_errors_print_what_is_declared(name, shown):
    """Tuples of sizes as shapes, and lists as lists, since generated code has tuples of both."""
    names = VariableNames.__new__(VariableNames)
    names.scalars, names.spread = {"pads": "list[int]", "by": "int"}, {"c"}
    assert names.term(name).shown[0] == shown


@pytest.mark.parametrize("view_of", [torch.Tensor.t, lambda x: x.as_strided(x.shape, (1, 1))], ids=["turned", "sums"])
def test_memory_of_unknown_sizes_is_not_looked_at(view_of):
    real = torch.empty(4, 6)
    with torch_private.fake_mode(symbolic=True) as mode:
        view = view_of(torch_private.make_fake_tensor(mode, real, True))
        assert not isinstance(view.shape[0], int)
        contiguous, before = view.is_contiguous(), len(mode.shape_env.guards)
        assert not contiguous
        assert has_own_memory(view)
        assert len(mode.shape_env.guards) == before


def test_the_words_for_what_was_passed_to_be_written_to():
    x = torch.zeros(2, 3)
    assert memory_text(x.t()) == "torch.float32 on cpu"
    assert memory_text(x.t(), extents=True) == "torch.float32 on cpu, (3, 2) by (1, 3)"
    assert memory_text(x.to_sparse(), extents=True) == "torch.float32 on cpu, torch.sparse_coo"
    assert memory_text([x]) == "list"
