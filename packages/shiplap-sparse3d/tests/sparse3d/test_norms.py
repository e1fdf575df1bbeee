"""``norm_relu``: what it computes, and when ``SparseSequential`` runs it in place of a batch norm and a ReLU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import shiplap_sparse3d.spconv as spconv
from shiplap_sparse3d import norms
from shiplap_sparse3d.spconv import pairs
from shiplap_testing.forked import interpreted
from tests.sparse3d.scenes import scene

GRID = (9, 8, 7)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the op, where tensors of the CPU pass for those of a GPU."""
    seen = []

    def counted(*args):
        seen.append(args)
        return norms.norm_relu(*args)

    monkeypatch.setattr(pairs, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(pairs, "norm_relu", counted)
    return seen


def learned(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    """``norm`` with weights and statistics that are not those of a new one."""
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        if tensor is not None:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return norm


def layers(**options) -> tuple[nn.Module, nn.BatchNorm1d, nn.ReLU]:
    return spconv.SubMConv3d(4, 6, 3, bias=False), learned(nn.BatchNorm1d(6, eps=1e-3, **options)), nn.ReLU()


def given() -> spconv.SparseConvTensor:
    x = scene(80, GRID, 4, batch_size=2, dtype=torch.float32)
    return spconv.SparseConvTensor(x.feats, x.coords, GRID, 2)


def by_hand(net: spconv.SparseSequential, x: spconv.SparseConvTensor) -> torch.Tensor:
    """Layer by layer, without a container."""
    for module in net:
        x = module(x) if isinstance(module, spconv.SparseModule) else x.replace_feature(module(x.features))
    return x.features


def test_it_is_a_batch_norm_and_a_relu():
    norm, x = learned(nn.BatchNorm1d(7)).eval(), torch.randn(50, 7)
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    with torch.no_grad():
        got = norms.norm_relu(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(got, norm(x).relu(), equal_nan=True)


def test_the_kernel_agrees_with_the_reference():
    """In a process of its own, under Triton's interpreter."""
    done = interpreted("-m", "tests.sparse3d.interpret_norm")
    assert done.stdout.endswith("norm_relu agrees\n"), done.stderr


def test_pairs_are_one_op_and_give_what_the_modules_give(calls):
    more = learned(nn.BatchNorm1d(6)), nn.ReLU(inplace=True), learned(nn.BatchNorm1d(6)), nn.Tanh(), nn.BatchNorm1d(6)
    net, x = spconv.SparseSequential(*layers(), *more).eval(), given()
    with torch.no_grad():
        torch.testing.assert_close(net(x).features, by_hand(net, x), rtol=1e-5, atol=1e-6)
    assert len(calls) == 2


def test_what_was_given_is_not_written_to(calls):
    x = given()
    before = x.features.clone()
    with torch.no_grad():
        spconv.SparseSequential(learned(nn.BatchNorm1d(4)), nn.ReLU(inplace=True)).eval()(x)
    assert len(calls) == 1
    assert torch.equal(x.features, before)


@pytest.mark.parametrize(
    "case", ["training", "gradient", "statistics", "weights", "bias", "dtype", "another", "swapped"]
)
def test_modules_are_called_where_they_are_more_than_the_op(calls, case):
    conv, norm, relu = layers(track_running_stats=case != "statistics", affine=case != "weights")
    if case == "dtype":
        norm.double()
        conv.register_forward_hook(lambda module, args, out: out.replace_feature(out.features.double()))
    if case == "bias":
        norm.bias = None
    relu = nn.ReLU6() if case == "another" else relu
    net = spconv.SparseSequential(*((conv, relu, norm) if case == "swapped" else (conv, norm, relu)))
    with torch.set_grad_enabled(case == "gradient"):
        out = net.train(case == "training")(given()).features
    assert calls == []
    assert out.requires_grad == (case == "gradient")


@pytest.mark.parametrize("where", ["norm", "relu", "before", "global", "own forward"])
def test_hooks_see_their_modules(calls, where):
    conv, norm, relu = layers()
    net, seen = spconv.SparseSequential(conv, norm, relu).eval(), []

    def hook(module, *rest):
        seen.append(type(module))

    if where == "own forward":
        norm.forward = lambda x: seen.append(type(norm)) or x
        handle = None
    elif where == "before":
        handle = relu.register_forward_pre_hook(hook)
    else:
        handle = {"norm": norm.register_forward_hook, "relu": relu.register_forward_hook}.get(
            where, register_module_forward_hook
        )(hook)
    try:
        with torch.no_grad():
            net(given())
    finally:
        if handle is not None:
            handle.remove()
    assert calls == []
    assert (nn.ReLU if where in ("relu", "before") else nn.BatchNorm1d) in seen


def test_an_empty_scene_passes(calls):
    net = spconv.SparseSequential(learned(nn.BatchNorm1d(4)), nn.ReLU()).eval()
    x = spconv.SparseConvTensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int32), GRID, 1)
    with torch.no_grad():
        assert net(x).features.shape == (0, 4)
        assert net(torch.randn(3, 4)).shape == (3, 4)
    assert calls == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_network_on_a_gpu_gives_what_its_modules_give(dtype):
    net = spconv.SparseSequential(*layers(), spconv.SubMConv3d(6, 6, 3), learned(nn.BatchNorm1d(6)), nn.ReLU())
    net, x = net.eval().cuda().to(dtype), scene(80, GRID, 4, batch_size=2, dtype=torch.float32)
    x = spconv.SparseConvTensor(x.feats.cuda().to(dtype), x.coords.cuda(), GRID, 2)
    with torch.no_grad():
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(net(x).features, by_hand(net, x), **close)
