"""Networks of every kind under torch.compile: one graph, few recompiles, eager's results, training included."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import shiplap_sparse3d as sparse3d
from shiplap import torch_private
from shiplap_sparse3d.steps import StepWindow, connect_voxels, output_cells
from tests.sparse3d.scenes import scene

GRID = (32, 30, 28)  # far from full, or levels of different scenes have the same number of voxels
COUNTS = (100, 130, 77, 150, 90, 201, 160, 55)


def subm() -> sparse3d.Sequential:
    return sparse3d.Sequential(
        sparse3d.SubMConv3d(5, 8, 3),
        sparse3d.BatchNorm(8),
        nn.ReLU(),
        sparse3d.SubMConv3d(8, 8, 2, groups=4),
        sparse3d.SubMConv3d(8, 4, (1, 3, 1), dilation=2),
        sparse3d.GlobalPool("max"),
    )


def u_net() -> sparse3d.Sequential:
    return sparse3d.Sequential(
        sparse3d.SubMConv3d(5, 8, 3),
        sparse3d.BatchNorm(8),
        nn.ReLU(),
        sparse3d.SparseConv3d(8, 8, 2, 2),
        sparse3d.BatchNorm(8),
        nn.ReLU(),
        sparse3d.SparseInverseConv3d(8, 4, 2),
        sparse3d.SubMConv3d(4, 4, 3),
        sparse3d.GlobalPool("avg"),
    )


def others() -> sparse3d.Sequential:
    return sparse3d.Sequential(
        sparse3d.SparseMaxPool3d(2),
        sparse3d.SparseConvTranspose3d(5, 8, 2, 2),
        sparse3d.GenerativeConv3d(8, 8, 3),
        sparse3d.SparseAvgPool3d(3, 2, 1),
        nn.LeakyReLU(),
        sparse3d.GlobalPool("sum"),
        nn.Linear(8, 2),
    )


def fresh(x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
    """The same scene without its tables."""
    return sparse3d.SparseTensor(x.feats, x.coords, x.spatial_shape, x.batch_size)


@pytest.fixture(autouse=True)
def nothing_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code that the background has built would be used from some call on, and cost one recompilation more."""
    monkeypatch.setenv("SHIPLAP_NATIVE", "0")


def step(net: nn.Module, x: sparse3d.SparseTensor, run) -> list[torch.Tensor]:
    net.zero_grad()
    value = run(x)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize(
    ("build", "tables", "mode"),
    [
        (subm, "built in the graph", "training"),
        pytest.param(u_net, "built in the graph", "training", marks=pytest.mark.long),
        pytest.param(others, "built in the graph", "training", marks=pytest.mark.long),
        pytest.param(u_net, "built in the graph", "eval", marks=pytest.mark.long),
        pytest.param(subm, "built before", "training", marks=pytest.mark.long),
        pytest.param(u_net, "built before", "training", marks=pytest.mark.long),
        pytest.param(others, "built before", "eval", marks=pytest.mark.long),
    ],
)
def test_all_sizes_are_one_graph(build, tables, mode):
    torch_private.reset_compiler()
    torch.manual_seed(0)
    net = build().train(mode == "training")

    def loss(x: sparse3d.SparseTensor) -> torch.Tensor:
        return net(x).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in COUNTS:
        x = scene(n, GRID, 5, dtype=torch.float32)
        if tables == "built before":
            loss(x)
        eager, traced = step(net, fresh(x), loss), step(net, x, compiled)
        for a, b in zip(traced, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    counts = torch_private.compile_counts()
    assert counts.graph_breaks == 0
    assert counts.recompiles <= 1


@pytest.mark.long
def test_a_submanifold_network_has_no_size_that_only_the_data_knows():
    seen = []

    def backend(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        seen.append([free_unbacked_symbols(v) for v in values if isinstance(v, torch.Tensor)])
        return graph.forward

    for build, some in ((subm, False), (u_net, True)):  # the second shows that the check sees them
        torch_private.reset_compiler()
        net = build()
        with torch.no_grad():
            torch.compile(net, fullgraph=True, backend=backend, dynamic=True)(scene(90, GRID, 5, dtype=torch.float32))
        assert any(seen.pop()) == some


@pytest.mark.long
def test_inductor_agrees_with_eager():
    torch_private.reset_compiler()
    net = sparse3d.Sequential(
        sparse3d.SparseConv3d(5, 8, 2, 2), sparse3d.BatchNorm(8), nn.ReLU(), sparse3d.GlobalPool("avg")
    )

    def loss(x: sparse3d.SparseTensor) -> torch.Tensor:
        return net(x).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for n in (100, 60):
        x = scene(n, GRID, 5, dtype=torch.float32)
        for a, b in zip(step(net, fresh(x), compiled), step(net, x, loss), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_sorted_tables_of_any_size_are_one_graph():
    """As on a GPU, where each table is sorted into a number of parts that depends on its rows."""
    torch_private.reset_compiler()
    weight = torch.randn(3, 27, 3, dtype=torch.float64)

    def run(x: sparse3d.SparseTensor) -> torch.Tensor:
        step = x.geometry.strided(3, 2, 1)
        rows = step.plan.sorted().conv(x.geometry.subm(3).sorted().conv(x.feats, weight), weight)
        return step.geometry.subm(3).sorted().conv(rows, weight).sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for n in (100, 130, 77, 150, 90, 201, 160, 240):
        x = scene(n, GRID, 3)
        torch.testing.assert_close(compiled(x), run(fresh(x)))
    assert torch_private.compile_counts().recompiles <= 1


@pytest.mark.long
def test_what_is_done_to_padded_tensors_is_one_graph_for_all_scenes():
    torch_private.reset_compiler()
    layer = sparse3d.GenerativeConv3d(6, 4, 3, capacity=2000, dtype=torch.float64)
    bounded = sparse3d.SparseMaxPool3d(2), sparse3d.SparseConvTranspose3d(4, 2, 2, 2, dtype=torch.float64)

    def run(x: sparse3d.SparseTensor, y: sparse3d.SparseTensor) -> torch.Tensor:
        both = sparse3d.cat([x, x + y])
        grown = layer(sparse3d.cat([both[0], both[1:]], 0))
        for step in bounded:  # of as many rows as there can be: a number that is worked out while the graph is traced
            grown = step(grown)
        return grown.dense()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for n in (60, 80, 50):
        x = scene(n, (9, 9, 9), 3)
        y = x.pad(100)
        torch.testing.assert_close(compiled(y, y.replace(y.feats * 2)), run(x, x.replace(x.feats * 2)))
    assert torch_private.compile_counts().recompiles == 0


@pytest.mark.long  # other numbers of axes: tests/sparse3d/test_axes.py
def test_two_axes_are_one_graph_for_all_sizes():
    torch_private.reset_compiler()
    net = sparse3d.Sequential(
        sparse3d.SubMConv2d(4, 8, 3),
        sparse3d.BatchNorm(8),
        nn.ReLU(),
        sparse3d.SparseConv2d(8, 8, 3, 2, 1),
        sparse3d.SparseMaxPool2d(2),
        sparse3d.SparseInverseConv2d(8, 8, 2),
        sparse3d.SparseInverseConv2d(8, 4, 3),
    )

    def loss(x: sparse3d.SparseTensor) -> torch.Tensor:
        return net(x).dense().square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (60, 80, 50):
        flat = scene(n, (1, 19, 21), 4, dtype=torch.float32)
        x, y = (sparse3d.SparseTensor(flat.feats, flat.coords[:, [0, 2, 3]], (19, 21), 2) for _ in range(2))
        for a, b in zip(step(net, x, compiled), step(net, y, loss), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert torch_private.compile_counts().recompiles <= 1


@pytest.mark.parametrize("extra", [None, (0, 1, 0)])
@pytest.mark.long
def test_a_step_of_sorted_tables_is_one_graph(extra):
    """As on a GPU, to voxels whose number only the data knows."""
    torch_private.reset_compiler()
    window = StepWindow((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), extra)

    def tables(coords: torch.Tensor) -> list[torch.Tensor]:
        plan = connect_voxels(window, coords, GRID, output_cells(window, coords, GRID), ordered=True, back=True)
        assert plan.order is not None
        return plan.unsorted().tensors

    compiled = torch.compile(tables, fullgraph=True, dynamic=True)
    for n in COUNTS[:3]:
        coords = scene(n, GRID, 1).coords
        for actual, want in zip(compiled(coords), tables(coords), strict=True):
            assert torch.equal(actual, want)
    assert torch_private.compile_counts().recompiles == 0


class AttentionBelow(nn.Module):
    """A strided layer, and attention of torch between all of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = sparse3d.SparseConv3d(5, 8, 3, 2, 1)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: sparse3d.SparseTensor) -> torch.Tensor:
        """Return the sum of the features after the attention, weighted by channel."""
        # The grid of ``x`` is a symbol of this graph, of which nothing is known.
        fixed = sparse3d.SparseTensor(x.feats, x.coords, GRID, 2)
        rows = self.down(fixed).feats[None]
        return (self.attend(rows, rows, rows, need_weights=False)[0] * torch.arange(8.0)).sum()


def test_attention_of_torch_over_voxels_that_the_data_count_is_one_graph() -> None:
    torch.manual_seed(0)
    torch_private.reset_compiler()
    net = AttentionBelow()
    run = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in COUNTS[:3]:
        x = scene(n, GRID, 5, dtype=torch.float32)
        for got, want in zip(step(net, x, run), step(net, fresh(x), net), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch_private.compile_counts().recompiles == 0


def test_a_graph_of_a_layer_that_may_lose_all_voxels_takes_a_scene_of_which_none_is_left() -> None:
    net = sparse3d.SparseConv3d(5, 8, 2, 2)  # cells 4 along x are in no window
    run = torch.compile(lambda x: net(x).feats, fullgraph=True, backend="eager", dynamic=True)
    for cells in ([0, 1, 2, 3, 4], [4, 4, 4, 4, 4, 4]):
        coords = torch.tensor([[0, x, y, 0] for y, x in enumerate(cells)]).int()
        x = sparse3d.SparseTensor(torch.randn(len(cells), 5), coords, (5, 6, 2), 1)
        torch.testing.assert_close(run(x), net(fresh(x)).feats)
    assert len(net(x)) == 0


def test_an_eager_step_does_not_compute_a_fact_that_only_a_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepWindow, "keeps_voxels", lambda self, grid: pytest.fail("it takes as long as a launch"))
    assert len(scene(20, GRID, 5).geometry.strided(3, 2, 1).geometry.coords) > 0


@pytest.mark.parametrize("back", [False, True], ids=["strided", "transposed"])
def test_windows_that_keep_each_voxel_do(back: bool) -> None:
    counts = {False: 0, True: 0}
    for w, k, s, p, d in itertools.product(range(1, 9), range(1, 5), range(1, 4), range(3), (1, 2)):
        window = StepWindow((k, 1, 1), (s, 1, 1), (p, 0, 0), (d, 1, 1), (0, 0, 0) if back else None)
        outputs = window.shape((w, 1, 1))[0]
        taps = [tap * d - p for tap in range(k)]
        kept = all(
            any((c * s + tap if back else o * s + tap) == (o if back else c) for tap in taps for o in range(outputs))
            for c in range(w)
        )
        claimed = window.keeps_voxels((w, 1, 1))
        assert kept or not claimed, window
        counts[claimed] += 1
        # Without gaps little is left unknown.
        assert claimed or not kept or d > 1 or p >= k or s > k, window
    assert min(counts.values()) > 100
