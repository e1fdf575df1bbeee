"""A network whose graph breaks, as ``torch.unique`` or ``tolist`` break it: batches and grids may still vary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap import torch_private
from shiplap_sparse3d.axes import same_number, same_numbers
from shiplap_testing.effort import sampled
from tests.sparse3d.consumers.specimens import cells

Grid = tuple[int, int, int]
SCENES: list[tuple[int, Grid, int]] = [(90, (8, 10, 6), 2), (110, (8, 10, 6), 3), (100, (12, 7, 8), 4)]
CASES = [f"{kind} {cut}" for kind in ("plain", "dynamic") for cut in range(3)]


@pytest.fixture(autouse=True)
def fresh():
    torch_private.reset_compiler()
    yield
    torch_private.reset_compiler()


class Sizes:
    """A backend that says which sizes a graph needs and is not given.

    A size is given by an argument that was it from the start, or by the shape of a tensor. Inductor binds no other, and
    its code ends in a NameError.
    """

    def __init__(self) -> None:
        self.missing: list[tuple[str, str]] = []
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        given: set[str] = set()
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder":
                given |= _symbols(value, "_expr" if isinstance(value, torch.SymInt) else "expr")
            else:
                backed = {name for name in _symbols(value, "expr") if name.startswith("s")}
                self.missing += [(node.name, name) for name in backed - given]
        return aot_eager(graph, inputs)


def _symbols(value: Any, of: str) -> set[str]:
    if isinstance(value, torch.SymInt):
        return {str(symbol) for symbol in getattr(value.node, of).free_symbols}
    if isinstance(value, Tensor):
        value = *value.shape, *value.stride()
    return set().union(*(_symbols(v, of) for v in value)) if isinstance(value, (tuple, list)) else set()


class Levels(nn.Module):
    """Each line of ``forward`` may be behind a break: what it reads then comes from objects, number by number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (spconv.SubMConv3d(c, 8, 3, indice_key="s") for c in (4, 8))
        self.down = spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="d")
        self.up = spconv.SparseInverseConv3d(8, 8, 3, indice_key="d")
        self.join, self.mean, self.most = spconv.JoinTable(), spconv.SparseGlobalAvgPool(), spconv.SparseGlobalMaxPool()

    def forward(self, features: Tensor, indices: Tensor, grid: Grid, scenes: int, cut: int) -> list[Tensor]:
        x = spconv.SparseConvTensor(features, indices, list(grid), scenes)
        x = self.first(x)
        if cut == 0:
            torch._dynamo.graph_break()
        x = self.second(x)
        pooled = self.most(x)
        y = self.down(x)
        if cut == 1:
            torch._dynamo.graph_break()
        z = self.up(y)
        if cut == 2:
            torch._dynamo.graph_break()
        both = self.join([z, x])
        union = spconv.tables.sparse_add(z, x)
        dense = both.dense()
        return [pooled, self.mean(both), dense.sum((2, 3, 4)), y.dense().amax((2, 3, 4)), union.features.sum(0)]


def scene(n: int, grid: Grid, scenes: int) -> tuple[Any, ...]:
    features, indices = cells(n, n, grid, scenes)
    return features.double(), indices, grid, scenes


@pytest.mark.long
@pytest.mark.parametrize("case", sampled(CASES, long=[case for case in CASES if case != "dynamic 1"]))
def test_every_size_of_a_graph_is_given_to_it(case):
    kind, cut = case.split()
    torch.manual_seed(0)
    net, sizes = Levels().double().eval(), Sizes()
    compiled = torch.compile(net, backend=sizes, dynamic=True if kind == "dynamic" else None)
    with torch.no_grad():
        for arguments in (scene(*each) for each in SCENES):
            torch.testing.assert_close(compiled(*arguments, int(cut)), net(*arguments, int(cut)))
    assert sizes.missing == []
    assert sizes.graphs >= 2


@pytest.mark.long
def test_inductor_runs_what_is_behind_a_break_for_every_batch():
    torch.manual_seed(0)
    net = Levels().double().eval()
    compiled = torch.compile(net)
    with torch.no_grad():
        for arguments in (scene(*each) for each in SCENES):
            torch.testing.assert_close(compiled(*arguments, 0), net(*arguments, 0))


@pytest.mark.long
def test_own_tensors_may_be_added_behind_a_break():
    sizes = Sizes()

    def added(x: sparse3d.SparseTensor, feats: Tensor) -> Tensor:
        y = x.replace(feats)
        torch._dynamo.graph_break()
        return (x + y).dense().sum()

    compiled = torch.compile(added, backend=sizes, dynamic=True)
    for n, grid, scenes in SCENES:
        features, indices = cells(n, n, grid, scenes)
        x = sparse3d.SparseTensor(features, indices, grid, scenes)
        torch.testing.assert_close(compiled(x, features), added(x, features))
    assert sizes.missing == []


def test_numbers_are_compared_one_by_one():
    assert same_number(3, 3)
    assert not same_number(3, 4)
    assert not same_number(4, 3)
    assert same_numbers((1, 2, 3), [1, 2, 3])
    assert same_numbers((1, 2, 3), [2, 3])
    assert same_numbers((2, 3), [2, 3])
    assert not same_numbers((2, 3), [1, 2, 3])
    for wrong in ([0, 2, 3], [2, 2, 3], [1, 1, 3], [1, 3, 3], [1, 2, 2], [1, 2, 4], [2, 2], [3]):
        assert same_numbers((1, 2, 3), wrong) is (wrong == [3])
