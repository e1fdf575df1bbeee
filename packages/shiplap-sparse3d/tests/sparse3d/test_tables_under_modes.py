"""Tables that are built under a mode of torch serve calls after that mode: same values, same gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shiplap.torch_private as compat
import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap_sparse3d.flexgemm.ops.spconv import sparse_submanifold_conv3d
from shiplap_testing.effort import sampled

Net = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]


def scene(axes: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    cells = torch.unique(torch.randint(0, 6, (40, axes)), dim=0).int()
    return torch.randn(len(cells), 4), torch.nn.functional.pad(cells, (1, 0))


def native(axes: int) -> Net:
    """All steps of the native modules, on one geometry that every call shares."""
    made = {name: getattr(sparse3d, f"{name}{axes}d") for name in ("SubMConv", "SparseConv", "SparseInverseConv")}
    net = sparse3d.Sequential(
        made["SubMConv"](4, 4, 3), made["SparseConv"](4, 4, 2, stride=2), made["SparseInverseConv"](4, 4, 2)
    )
    _, coords = scene(axes)
    voxels = sparse3d.Geometry(coords, 6, 1)
    return net, lambda net, feats: net(sparse3d.SparseTensor(feats, geometry=voxels)).feats


def growing() -> Net:
    net = sparse3d.Sequential(sparse3d.SparseConvTranspose3d(4, 4, 2, stride=2), sparse3d.GenerativeConv3d(4, 4, 3))
    voxels = sparse3d.Geometry(scene()[1], 6, 1)
    return net, lambda net, feats: net(sparse3d.SparseTensor(feats, geometry=voxels)).feats


def facade(axes: int, *, twins: bool = False) -> Net:
    made = {name: getattr(spconv, f"{name}{axes}d") for name in ("SubMConv", "SparseConv", "SparseInverseConv")}
    strided = made["SparseConv"](4, 4, 2, 2, indice_key="b"), made["SparseInverseConv"](4, 4, 2, indice_key="b")
    net = spconv.SparseSequential(made["SubMConv"](4, 4, 3, indice_key="a"), *(() if twins else strided))
    feats, coords = scene(axes)
    if twins:
        coords[3] = coords[5]
    x = spconv.SparseConvTensor(feats, coords, [6] * axes, 1)
    assert x.geometry is not None
    return net, lambda net, feats: net(x.replace_feature(feats)).features


def flexgemm() -> Net:
    net, held, coords = nn.Module(), [None], scene()[1]
    net.weight = nn.Parameter(torch.randn(4, 3, 3, 3, 4))

    def run(net: Any, feats: Tensor) -> Tensor:
        out, held[0] = sparse_submanifold_conv3d(feats, coords, (1, 4, 6, 6, 6), net.weight, None, held[0])
        return out

    return net, run


NETS: dict[str, Callable[[], Net]] = {
    "native": lambda: native(3),
    "native of two axes": lambda: native(2),
    "growing": growing,
    "facade": lambda: facade(3),
    "facade of two axes": lambda: facade(2),
    "facade, shared cells": lambda: facade(3, twins=True),
    "flexgemm": flexgemm,
}


def within(mode: Callable[[], AbstractContextManager[object]]) -> Callable[..., None]:
    def under(run: Callable[[Tensor], Tensor], feats: Tensor) -> None:
        with mode():
            run(feats)

    return under


def of_fakes(run: Callable[[Tensor], Tensor], feats: Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run(mode.from_tensor(feats))


MODES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "inference": within(torch.inference_mode),
    "fake": of_fakes,
    "device": within(lambda: torch.device("meta")),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "grad": lambda run, feats: torch.func.grad(lambda f: run(f).sum())(feats),
    "vmap of grad": lambda run, feats: torch.vmap(torch.func.grad(lambda f: run(f).sum()))(feats[None]),
    "functionalize": lambda run, feats: torch.func.functionalize(run)(feats),
    "trace": lambda run, feats: make_fx(run)(feats),
}


def check_served(net: str, under: Callable[[Callable[[Tensor], Tensor], Tensor], object]) -> None:
    """A training step after a call ``under`` a mode equals one on voxels that have no table yet."""
    layers, run = NETS[net]()
    axes = 2 if "two" in net else 3
    feats, _ = scene(axes)
    under(lambda given: run(layers, given), feats)
    fresh, run_fresh = NETS[net]()
    fresh.load_state_dict(layers.state_dict())
    given, wanted = feats.clone().requires_grad_(), feats.clone().requires_grad_()
    out, expected = run(layers, given), run_fresh(fresh, wanted)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert type(out) is Tensor
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(given.grad, wanted.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("net", NETS)
def test_tables_of_a_mode_serve_a_training_step_after_it(net: str, mode: str) -> None:
    check_served(net, MODES[mode])


@pytest.mark.parametrize("net", sampled(["native", "facade"], long=["native"]))
def test_tables_of_a_graph_in_inference_mode_are_left_behind(net: str) -> None:
    def under(run: Callable[[Tensor], Tensor], feats: Tensor) -> None:
        compat.reset_compiler()
        compiled = torch.compile(run, backend="aot_eager")
        with torch.inference_mode():
            compiled(feats)
        compiled(feats.clone().requires_grad_()).sum().backward()

    check_served(net, under)


def test_voxels_of_a_fake_mode_keep_its_tables() -> None:
    _, coords = scene()
    with compat.fake_mode(symbolic=False) as mode:
        voxels = sparse3d.Geometry(mode.from_tensor(coords), 6, 1)
        plan = voxels.subm(3)
        assert type(plan.table) is type(voxels.coords)
        assert voxels.subm(3) is plan
