"""Attention within patches of voxels, against a loop over the patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import shiplap_sparse3d as sparse3d
from shiplap.errors import ShiplapError
from tests.sparse3d.scenes import scene

GRID = (8, 7, 6)


def by_hand(layer: sparse3d.SparseAttention, x: sparse3d.SparseTensor) -> Tensor:
    out = torch.zeros_like(x.feats)
    codes = sparse3d.encode_seq(x.coords, (x.batch_size, 1, *x.spatial_shape), layer.order)
    for b in range(x.batch_size):
        rows = (x.coords[:, 0] == b).nonzero()[:, 0]
        for patch in rows[codes[rows].argsort()].split(layer.patch_size):
            q, k, v = (
                t.unflatten(1, (layer.num_heads, -1)).transpose(0, 1) for t in layer.qkv(x.feats[patch]).chunk(3, 1)
            )
            mixed = functional.softmax(q @ k.transpose(1, 2) / q.shape[2] ** 0.5, -1) @ v
            out[patch] = layer.proj(mixed.transpose(0, 1).flatten(1))
    return out


@pytest.mark.parametrize(("patch", "order"), [(1, "z_order"), (7, "hilbert"), (64, "z_order")])
def test_voxels_attend_to_those_of_their_patch(patch: int, order: str) -> None:
    x = scene(90, GRID, 6, batch_size=3)
    layer = sparse3d.SparseAttention(6, 2, patch, order, dtype=torch.float64)
    torch.testing.assert_close(layer(x).feats, by_hand(layer, x))
    padded = layer(x.pad(100)).feats
    torch.testing.assert_close(padded[:90], by_hand(layer, x))
    assert not padded[90:].any()
    torch.testing.assert_close(layer(x[1]).feats, layer(x)[1].feats)


def test_gradients_and_scenes_without_voxels() -> None:
    x = scene(9, (4, 4, 4), 4, batch_size=2)
    layer = sparse3d.SparseAttention(4, 2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda f: layer(x.replace(f)).feats, x.feats.clone().requires_grad_(), fast_mode=True
    )
    empty = sparse3d.SparseTensor(x.feats[:0], x.coords[:0], (4, 4, 4), 2)
    layer(empty).feats.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


def test_any_number_of_voxels_is_one_graph() -> None:
    layer = sparse3d.SparseAttention(4, 2, 16)
    compiled = torch.compile(
        lambda f, c: layer(sparse3d.SparseTensor(f, c, GRID, 2)).feats, fullgraph=True, backend="eager", dynamic=True
    )
    for n in (50, 33, 80):
        x = scene(n, GRID, 4, dtype=torch.float32)
        torch.testing.assert_close(compiled(x.feats, x.coords), layer(x).feats)


@pytest.mark.parametrize(
    ("id", "arguments"), [("SL208", (4, 3)), ("SL209", (4, 1.5)), ("SL208", (4, 1, 0)), ("SL208", (4, 1, 8, "random"))]
)
def test_wrong_arguments_are_refused(id: str, arguments: tuple) -> None:
    with pytest.raises(ShiplapError, match=id):
        sparse3d.SparseAttention(*arguments)
    with pytest.raises(ShiplapError, match="SL202"):
        sparse3d.SparseAttention(5, dtype=torch.float64)(scene(9, GRID, 4))
