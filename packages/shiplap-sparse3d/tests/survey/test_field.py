"""The receptive field is that of the layers, by hand; the probe sees exactly that, and what goes beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap import ShiplapError
from shiplap_sparse3d import SparseTensor
from shiplap_sparse3d.survey import probe, receptive_field
from shiplap_sparse3d.survey.field import rows_of, takes_batches
from shiplap_testing.effort import sampled
from tests.survey.models import UNet


def known(reach: int, stride: int) -> tuple[Any, ...]:
    return (reach,) * 3, (reach,) * 3, (stride,) * 3


# A U-Net of kernels 3, 2 and 3: 2 at the finest level, and per level below 3 * stride and 1 for the inverse, and so on.
@pytest.mark.parametrize(
    ("levels", "reach", "stride"),
    sampled([pytest.param(*case) for case in [(1, 2, 1), (2, 6, 2), (3, 14, 4), (4, 30, 8)]], 2),
)
def test_unets(levels: int, reach: int, stride: int) -> None:
    net = UNet(4, 4, levels, 2)
    field = receptive_field(net, 4)
    assert (field.before, field.after, field.stride) == known(reach, stride)
    assert field.exact
    seen = probe(net, 4, field)
    assert (seen.before[:2], seen.after[:2]) == ((reach,) * 2, (reach,) * 2)


def test_dilation_and_even_kernels_per_axis() -> None:
    net = sparse3d.Sequential(sparse3d.SubMConv3d(4, 4, 3, dilation=3), nn.ReLU(), sparse3d.SubMConv3d(4, 4, (1, 4, 2)))
    field = receptive_field(net, 4)
    assert (field.before, field.after) == ((3, 5, 4), (3, 4, 3))
    assert probe(net, 4, field).before[:2] == (3, 5)


class SceneNumber(nn.Module):
    """An output that depends on the number of the scene; ``most`` scenes are accepted."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: SparseTensor) -> Tensor:
        if x.batch_size > self.most:
            raise ValueError("one scene")
        return x.feats + x.coords[:, :1]


class FewScenes(nn.Module):
    """A network that keeps three scenes apart, and takes the voxels of all further ones to be the third's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: SparseTensor) -> Tensor:
        coords, rows = torch.cat([x.coords[:, :1].clamp(max=2), x.coords[:, 1:]], 1).unique(dim=0, return_inverse=True)
        feats = x.feats.new_zeros(len(coords), x.feats.shape[1]).index_copy(0, rows, x.feats)
        return rows_of(self.net(SparseTensor(feats, coords, x.spatial_shape, min(x.batch_size, 3))))[rows]


@pytest.mark.parametrize(
    ("net", "right"),
    [
        (UNet(4, 4, 2, 2), True),
        (nn.Identity(), True),
        (SceneNumber(2), False),
        (SceneNumber(1), False),
        (FewScenes(UNet(4, 4, 2, 2)), False),
    ],
)
def test_scenes_are_batched_if_they_keep_their_outputs(net: nn.Module, right: bool) -> None:
    assert takes_batches(net, 4, receptive_field(UNet(4, 4, 2, 2), 4), net) is right


class Branches(nn.Module):
    """Three branches side by side: the widest one counts, and not their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(sparse3d.SubMConv3d(4, 4, 3, dilation=d) for d in (1, 2, 4))

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.replace(sum(branch(x).feats for branch in self.branches))


def test_branches_are_not_added() -> None:
    field = receptive_field(Branches(), 4)
    assert (field.before, field.after) == ((4, 4, 4), (4, 4, 4))


class Detached(nn.Module):
    """Nothing to follow: autograd does not see the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = sparse3d.SubMConv3d(4, 4, 3), sparse3d.SubMConv3d(4, 4, 5)

    def forward(self, x: SparseTensor) -> SparseTensor:
        with torch.no_grad():
            x = self.one(x)
        return self.two(x)


def test_without_a_path_all_layers_are_added() -> None:
    field = receptive_field(Detached(), 4)
    assert (field.before, field.exact) == ((3, 3, 3), False)
    assert probe(Detached(), 4, field).before[:2] == (3, 3)


def test_pooling_and_inverse() -> None:
    net = sparse3d.Sequential(
        sparse3d.SubMConv3d(4, 4, 3),
        sparse3d.SparseMaxPool3d(3, 2, 1),
        sparse3d.SubMConv3d(4, 4, 3),
        sparse3d.SparseInverseConv3d(4, 4, 3),
    )
    field = receptive_field(net, 4)
    assert (field.before, field.after, field.stride) == known(5, 2)
    probe(net, 4, field)


def test_layers_of_the_spconv_facade() -> None:
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 4, 3, indice_key="fine"),
        spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="down"),
        nn.ReLU(),
        spconv.SubMConv3d(4, 4, 3, indice_key="coarse"),
        spconv.SparseInverseConv3d(4, 4, 3, indice_key="down"),
    )

    def run(voxels: SparseTensor) -> Any:
        return net(spconv.SparseConvTensor(voxels.feats, voxels.coords, voxels.spatial_shape, 1))

    field = receptive_field(net, 4, run)
    assert (field.before, field.after, field.stride) == known(5, 2)
    probe(net, 4, field, run)


def test_modes_and_hooks_are_given_back() -> None:
    net = UNet(4, 4, 2, 2).train()
    net.stem.eval()
    probe(net, 4, receptive_field(net, 4))
    assert net.training
    assert not net.stem.training
    assert not any(module._forward_hooks for module in net.modules())


# --- what has no field, and what hides its own


class Beyond(nn.Module):
    """A convolution, and something beside it that looks further."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = sparse3d.SubMConv3d(4, 4, 3)

    def other(self, x: SparseTensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: SparseTensor) -> Tensor:
        return self.conv(x).feats + self.other(x)


class Mean(Beyond):
    def other(self, x: SparseTensor) -> Tensor:
        return x.feats.mean(0)


class Count(Beyond):
    def other(self, x: SparseTensor) -> Tensor:
        return x.feats / len(x.feats)


class Attention(Beyond):
    def other(self, x: SparseTensor) -> Tensor:
        return (x.feats @ x.feats.T).softmax(1) @ x.feats


class OwnTable(Beyond):
    def other(self, x: SparseTensor) -> Tensor:
        return x.geometry.subm(3, 2).conv(x.feats, self.conv.weight.flatten(1, -2), None, 1)


@pytest.mark.parametrize("kind", [Mean, Count, Attention, OwnTable])
def test_the_probe_refuses_what_looks_further(kind: type[Beyond]) -> None:
    torch.manual_seed(0)
    net = kind()
    field = receptive_field(net, 4)
    assert field.before == (1, 1, 1)
    with pytest.raises(ShiplapError, match="SL820: the network looks beyond the receptive field"):
        probe(net, 4, field)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (sparse3d.Sequential(sparse3d.SubMConv3d(4, 4, 3), sparse3d.GlobalPool()), "a pooling over all voxels"),
        (sparse3d.SparseConv3d(4, 4, 2, stride=2), "rows"),
        (sparse3d.SparseConvTranspose3d(4, 4, 2, stride=2), "a grid finer than the input's"),
    ],
)
def test_networks_without_a_field(net: nn.Module, reason: str) -> None:
    with pytest.raises(ShiplapError, match=reason) as caught:
        receptive_field(net, 4)
    assert caught.value.id == "SL820"


def test_a_network_gets_its_modes_back_and_one_that_evaluates_is_left_alone() -> None:
    from shiplap_sparse3d.modes import evaluation_mode

    net = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.ReLU()))
    net[1].eval()
    modes = [module.training for module in net.modules()]
    assert set(modes) == {True, False}
    with evaluation_mode(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == modes

    class Counted(nn.Module):
        calls = 0

        def train(self, mode: bool = True) -> Counted:
            self.calls += 1
            super().train(mode)
            return self

    still = Counted().eval()
    with evaluation_mode(still):
        assert not still.training
    assert (still.calls, still.training) == (1, False)
