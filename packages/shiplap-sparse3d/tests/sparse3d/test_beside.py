"""Tables that are built before a network asks for them are those that it would build, and it builds none then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import beside, geometry, spconv
from shiplap_sparse3d.geometry import NOTHING, Geometry
from tests.sparse3d.nets import UNet
from tests.sparse3d.scenes import scene

GRID = (12, 10, 8)
BUILDERS = ("submanifold_plan", "connect_voxels", "output_cells")


def new(seed: int = 0) -> sparse3d.SparseTensor:
    return scene(200 + 10 * seed, GRID, 5, dtype=torch.float32, seed=seed)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What builds tables and voxels, as often as it is called."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., object]:
        real = getattr(geometry, name)
        return lambda *arguments, **options: calls.append(name) or real(*arguments, **options)

    for name in BUILDERS:
        monkeypatch.setattr(geometry, name, noted(name))
    return calls


class Pooled(nn.Module):
    """Steps of other kinds: a pool, an even kernel, a transposed and a generative convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = sparse3d.Sequential(
            sparse3d.SubMConv3d(5, 4, 2),
            sparse3d.SparseMaxPool3d(2, 2),
            sparse3d.SubMConv3d(4, 4, 3, dilation=2),
            sparse3d.SparseConvTranspose3d(4, 4, 2, 2),
            sparse3d.GenerativeConv3d(4, 3, 3),
        )

    def rows(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        return self.layers(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("net", [lambda: UNet(None), Pooled], ids=["UNet", "Pooled"])
def test_a_network_builds_nothing_where_its_tables_are(net, training: bool, built: list[str]) -> None:
    torch.manual_seed(0)
    model = net().train(training)

    def answer(x: sparse3d.SparseTensor) -> list[torch.Tensor]:
        with nullcontext() if training else torch.inference_mode():
            out = model.rows(x).feats
        if not training:
            return [out]
        model.zero_grad()
        out.square().sum().backward()
        return [out, *(p.grad for p in model.parameters() if p.grad is not None)]

    before, wanted = new(0), new(1)
    answer(before)
    running = {name: value.clone() for name, value in model.state_dict().items()}
    expected = [value.clone() for value in answer(wanted)]
    model.load_state_dict(running)
    here = new(1)
    here.geometry.build(before.geometry.recipe)
    built.clear()
    for got, value in zip(answer(here), expected, strict=True):
        assert torch.equal(got, value)
    assert built == []
    assert here.geometry.recipe == before.geometry.recipe == wanted.geometry.recipe
    for got, value in zip(here.geometry.tensors, wanted.geometry.tensors, strict=True):
        assert torch.equal(got, value)


def test_nothing_is_built_twice(built: list[str]) -> None:
    before, here = new(0), new(1)
    UNet(None).rows(before)
    here.geometry.build(before.geometry.recipe)
    assert sorted(set(built)) == sorted(BUILDERS)
    built.clear()
    here.geometry.build(before.geometry.recipe)
    assert built == []


def test_a_recipe_holds_no_tensor() -> None:
    x = new()
    UNet(None).rows(x)

    def values(part: object) -> Iterator[object]:
        if isinstance(part, tuple):
            for each in part:
                yield from values(each)
        else:
            yield part

    assert {type(value) for value in values(x.geometry.recipe)} <= {int, bool, type(None)}


def test_inference_after_training_asks_for_less_and_training_after_inference_for_more(built: list[str]) -> None:
    """The way back is built where it was wanted, and completed where a gradient wants it later."""
    model, before = UNet(None), new(0)
    with torch.no_grad():
        model.enter(before)
        before.geometry.subm(2)
        before.geometry.strided(3, 2)
    here = new(1)
    here.geometry.build(before.geometry.recipe)
    assert not here.geometry.subm(2, back=False).whole
    built.clear()
    assert here.geometry.subm(2).whole
    assert here.geometry.strided(3, 2).plan.whole
    assert built == []


def test_padded_voxels_have_no_recipe_and_need_none() -> None:
    x = new(0).pad(300)
    UNet().rows(x)
    assert x.geometry.recipe == NOTHING
    other = new(0)
    UNet(None).rows(other)
    x = new(1).pad(300)
    x.geometry.build(other.geometry.recipe)
    assert x.geometry.recipe == NOTHING


def test_voxels_of_two_axes(built: list[str]) -> None:
    net = sparse3d.Sequential(sparse3d.SubMConv2d(5, 4, 3), sparse3d.SparseConv2d(4, 4, 2, 2))
    cells = torch.cartesian_prod(torch.arange(1), torch.arange(12), torch.arange(10)).int()
    before, here = (sparse3d.SparseTensor(torch.ones(n, 5), cells[:n], (12, 10)) for n in (50, 80))
    net(before)
    here.geometry.build(before.geometry.recipe)
    built.clear()
    net(here)
    assert built == []


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_cpu_gets_its_batches_as_they_are(built: list[str]) -> None:
    batches = [(new(seed), torch.ones(2)) for seed in range(3)]
    got = []
    for batch in sparse3d.ahead(iter(batches)):
        UNet(None).rows(batch[0])
        got.append(batch)
        assert built
        built.clear()
    assert all(a is b for a, b in zip(got, batches, strict=True))
    assert list(sparse3d.ahead([])) == []


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(sl.ShiplapError, match="SL208"):
        sparse3d.ahead([1], depth=0)  # and not with the first batch


class Streams:
    """Streams and events of a device that does nothing, and the order in which it was told things."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            wait_stream=lambda other: self.calls.append(f"{name} waits for {other.name}"),
            record_event=lambda: f"event of {name}",
            wait_event=lambda event: self.calls.append(f"{name} waits for {event}"),
            name=name,
        )

    def event(self, *, blocking: bool) -> SimpleNamespace:
        assert blocking
        number = sum(word.startswith("launched") for word in self.calls)
        record = self.calls.append
        return SimpleNamespace(
            record=lambda stream: record(f"launched {number}"), synchronize=lambda: record(f"waited for {number}")
        )

    def cuda(self) -> SimpleNamespace:
        main = self.stream("main")
        return SimpleNamespace(
            Stream=lambda device, priority: self.stream("beside"),
            Event=self.event,
            current_stream=lambda device: main,
            stream=lambda stream: nullcontext(),
        )


@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_waits_for_a_batch_that_long_ago_and_for_no_layer(
    depth: int, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On streams that do nothing: what is waited for, and where the tables are built."""
    streams = Streams()
    monkeypatch.setattr(beside, "torch", SimpleNamespace(cuda=streams.cuda()))
    model, first = UNet(None), new(0)
    model.rows(first)
    built.clear()
    for x in beside._build_beside(first, (new(seed) for seed in range(1, 5)), torch.device("cpu"), depth):
        assert "connect_voxels" in built
        built.clear()
        model.rows(x)
        assert built == []
    waits = [f"waited for {number}" for number in range(5 - depth)]
    assert [word for word in streams.calls if word.startswith("waited")] == waits
    assert streams.calls.index("waited for 0") > streams.calls.index(f"launched {depth}")
    assert streams.calls[0] == "beside waits for main"
    assert streams.calls.count("main waits for event of beside") == 4


def test_tensors_of_a_batch_and_of_its_tables_are_found() -> None:
    x, extra = new(), torch.ones(3)
    UNet(None).rows(x)
    tensors = {id(tensor) for tensor in beside._batch_tensors({"x": x, "more": [extra, 3, "text"]})}
    assert {id(t) for t in (x.feats, extra, *x.geometry.tensors)} == tensors
    assert len(x.geometry.tensors) == 6  # voxels of two grids, their neighbours, and the step both ways


def test_layers_of_the_facade_find_tables_that_were_built(built: list[str]) -> None:
    net = spconv.SparseSequential(
        spconv.SubMConv3d(5, 4, 3, indice_key="a"),
        spconv.SparseConv3d(4, 4, 2, 2, indice_key="b"),
        spconv.SparseInverseConv3d(4, 4, 2, indice_key="b"),
    )

    def tensor(seed: int) -> spconv.SparseConvTensor:
        x = new(seed)
        return spconv.SparseConvTensor(x.feats, x.coords, list(GRID), x.batch_size)

    before, here = tensor(0), tensor(1)
    (known,) = beside._batch_geometries([before])
    net(before)
    (there,) = beside._batch_geometries([here])
    assert isinstance(there, Geometry)
    there.build(known.recipe)
    expected = net(tensor(1)).features
    built.clear()
    assert torch.equal(net(here).features, expected)
    assert built == []


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("depth", [1, 3])
def test_training_ahead_of_a_gpu_learns_the_same(depth: int) -> None:
    """Again and again, since memory that is given away too early is wrong only now and then."""

    def batches() -> Iterator[tuple[sparse3d.SparseTensor, torch.Tensor]]:
        for seed in range(40):
            x = new(seed)
            wanted = torch.randint(3, (len(x.feats),), generator=torch.Generator().manual_seed(seed))
            yield sparse3d.SparseTensor(x.feats.cuda(), x.coords.cuda(), GRID, x.batch_size), wanted.cuda()

    def losses(of: Iterator[tuple[sparse3d.SparseTensor, torch.Tensor]]) -> torch.Tensor:
        torch.manual_seed(0)
        model = UNet(None).cuda()
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.01), []
        for x, wanted in of:
            loss = nn.functional.cross_entropy(model.rows(x).feats, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
            del x, wanted
        return torch.stack(seen).cpu()

    expected = losses(batches())
    assert torch.allclose(losses(sparse3d.ahead(batches(), depth=depth)), expected, rtol=1e-4)
    sparse3d.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_step_on_a_gpu_waits_for_nothing_where_its_tables_are() -> None:
    """Torch says of each call that would wait for the stream of the network; the tables are built before."""
    model, before = UNet(None).cuda(), new(0).to("cuda")
    model.rows(before).feats.sum().backward()
    model.rows(before).feats.sum().backward()
    here = new(1).to("cuda")
    here.geometry.build(before.geometry.recipe)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.rows(here).feats.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
