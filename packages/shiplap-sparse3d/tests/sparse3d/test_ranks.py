"""What docs/many-devices.md says of sparse networks on several ranks, done by two of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import shiplap_sparse3d as sparse3d
from shiplap.errors import ShiplapError
from shiplap_sparse3d import spconv
from shiplap_testing import ranks
from shiplap_testing.places import PLACES
from tests.sparse3d.scenes import scene

EXPECTED = ranks.table("sparse3d")
LONG = ("FSDP2, compiled",)


@pytest.fixture(scope="module", params=PLACES)
def reported(request) -> dict[str, str]:
    return ranks.outcomes("tests.sparse3d.rank_cells", kind=request.param)


@pytest.mark.docs
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in LONG])
def test_two_ranks_do_what_the_page_says(name, reported):
    assert reported.get(name, ranks.NO_SUCH_CELL) == EXPECTED[name]


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACES)
def test_two_ranks_do_what_the_page_says_for_longer(kind):
    assert ranks.outcomes("tests.sparse3d.rank_cells", *LONG, kind=kind) == {name: EXPECTED[name] for name in LONG}


def test_norms_of_two_ranks_differentiate_twice_and_evaluate_alone():
    """The second derivative lacked the sum over the ranks, and an evaluation waited for the other rank."""
    cells = {"second derivative": "1e-9", "evaluation alone": "the same", "evaluation alone, torch's norm": "the same"}
    wanted = {name: f"equal ({how})" for name, how in cells.items()}
    assert ranks.outcomes("tests.sparse3d.rank_norms", *cells, kind="gloo") == wanted


@pytest.mark.docs
def test_every_combination_is_on_the_page(reported):
    assert set(reported) <= set(EXPECTED)


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACES)
def test_other_networks_do_what_the_page_says(kind):
    wanted = ranks.table("sparse networks")
    names = [name for name in wanted if wanted[name] != ranks.NO_SUCH_CELL]
    assert ranks.outcomes("tests.sparse3d.rank_networks", *names, kind=kind) == {name: wanted[name] for name in names}


def spconv_tensor() -> spconv.SparseConvTensor:
    x = scene(40, (6, 6, 6), 4, seed=0)
    return spconv.SparseConvTensor(x.feats, x.coords, [6, 6, 6], 2)


def test_a_tree_with_the_same_coordinates_has_the_same_voxels():
    x = scene(40, (6, 6, 6), 4, seed=0)
    leaves, shape = pytree.tree_flatten({"x": x})
    assert [type(leaf) for leaf in leaves] == [torch.Tensor, torch.Tensor]
    assert pytree.tree_unflatten(leaves, shape)["x"].geometry is x.geometry
    half = pytree.tree_map(lambda t: t.half() if t.is_floating_point() else t, x)
    assert half.feats.dtype == torch.float16
    assert half.geometry is x.geometry
    moved = pytree.tree_map(torch.clone, x)
    assert moved.geometry is not x.geometry
    assert torch.equal(moved.coords, x.coords)
    other = scene(30, (6, 6, 6), 4, seed=1)
    assert shape == pytree.tree_structure({"x": other})
    assert pytree.tree_structure(x) != pytree.tree_structure(scene(30, (6, 6, 8), 4, seed=1))


def test_plans_and_steps_are_trees():
    step = scene(40, (6, 6, 6), 4, seed=0).geometry.strided(2, 2)
    repeated = pytree.tree_map(lambda t: t, step)
    assert repeated.geometry is step.geometry
    assert repeated.plan == step.plan


@pytest.mark.parametrize("make", [lambda: scene(40, (6, 6, 6), 4, seed=0), spconv_tensor], ids=["ours", "spconv"])
def test_walkers_of_dataclasses_find_the_features(make):
    x = make()
    narrow = _apply_to_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, [x])[0]
    assert type(narrow) is type(x)
    name = "feats" if isinstance(x, sparse3d.SparseTensor) else "features"
    assert getattr(narrow, name).dtype == torch.bfloat16
    if name == "feats":
        assert narrow.geometry is x.geometry
    else:
        assert narrow.indices is x.indices
        repeated = pytree.tree_map(lambda t: t * 2, x)
        assert torch.equal(repeated.features, x.features * 2)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_reentrant_checkpoint_is_refused_where_it_would_lose_a_gradient():
    x, layer = scene(40, (6, 6, 6), 4, seed=0), sparse3d.SubMConv3d(4, 4, 3).double()
    with pytest.raises(ShiplapError, match="SL215"):
        checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ShiplapError, match="SL215"):
        checkpoint(spconv.SubMConv3d(4, 4, 3).double(), spconv_tensor(), use_reentrant=True)
    feats = x.feats.clone().requires_grad_()
    out = checkpoint(lambda f: layer(x.replace(f)), feats, use_reentrant=True)
    with pytest.raises(ShiplapError, match=r"SL215(.|\n)*returned"):
        layer(out)
    inside = checkpoint(lambda f: layer(x.replace(f)).feats, feats, use_reentrant=True)  # tensors in and out are right
    inside.square().sum().backward()
    got, feats.grad, layer.weight.grad = (feats.grad, layer.weight.grad), None, None
    layer(x.replace(feats)).feats.square().sum().backward()
    torch.testing.assert_close(got, (feats.grad, layer.weight.grad))


def test_features_that_are_not_those_of_the_voxels_are_refused_by_a_layer():
    """As the micro-batches of a pipeline would be, whose tensors are cut along their first dim."""
    x = scene(40, (6, 6, 6), 4, seed=0)
    half = pytree.tree_map(lambda t: t[:20] if t.is_floating_point() else t, x)
    with pytest.raises(ShiplapError, match="SL202"):
        sparse3d.SubMConv3d(4, 4, 3).double()(half)
    with pytest.raises(ShiplapError, match=r"SL219(.|\n)*20 rows of 40"):
        pytree.tree_map(lambda t: t[:20], x)


def test_conversion_keeps_parameters_and_takes_ours_only_where_it_has_to():
    net = nn.Sequential(sparse3d.BatchNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    weights = [net[0].weight, net[1].weight]
    made = sparse3d.SyncBatchNorm.convert_sync_batchnorm(net)
    assert [type(m) for m in made] == [sparse3d.SyncBatchNorm, nn.SyncBatchNorm, nn.Linear]
    assert made[0].weight is weights[0]
    assert made[1].weight is weights[1]
    assert made[0].num_batches_tracked.device.type == "cpu"
    x = scene(40, (6, 6, 6), 4, seed=0, dtype=torch.float32)
    assert torch.equal(made[0](x).feats, sparse3d.BatchNorm(4)(x).feats)  # nobody to share with


def test_an_exported_network_takes_and_gives_sparse_tensors():
    x, other = (scene(n, (6, 6, 6), 4, seed=n) for n in (40, 40))
    net = sparse3d.Sequential(sparse3d.SubMConv3d(4, 8, 3), nn.ReLU(), sparse3d.SubMConv3d(8, 2, 3)).double().eval()
    program = torch.export.export(net, (x,), strict=False).module()
    torch.testing.assert_close(program(other).feats, net(other).feats)
    shape = pytree.tree_structure({"x": x})
    assert pytree.treespec_loads(pytree.treespec_dumps(shape)) == shape  # as torch.export.save writes it
