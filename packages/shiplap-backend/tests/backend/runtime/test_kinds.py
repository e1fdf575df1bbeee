"""Tensors that are more than strided memory: the CPU in the device's place keeps what they are, or refuses them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

USES = {
    "cpu": lambda z: z.cpu(),
    "clone": lambda z: z.clone(),
    "add": lambda z: z + torch.ones_like(z),
    "native": lambda z: torch.ones_like(z) - z,
    "fallback": lambda z: torch.erfinv(z),
    "written": lambda z: torch.erfinv(z, out=torch.empty_like(z).fill_(1)),
    "view": lambda z: z.reshape(3, 1).t().contiguous(),
    "copy": lambda z: torch.ones(3, device=z.device).copy_(z),
    "to the CPU": lambda z: torch.ones(3).copy_(z),
    "stack": lambda z: torch.stack([z, z]).sum(0),
    "dot": lambda z: torch.dot(z, torch.ones_like(z)).expand(3),
    "number": lambda z: torch.full((3,), z[0].item()),
    "print": lambda z: torch.tensor([float(n) for n in repr(z).partition("[")[2].partition("]")[0].split(",")]),
}


@pytest.mark.parametrize("use", USES)
def test_an_efficient_zero_tensor_is_zeros(dev: Any, device: str, use: str) -> None:
    """It has sizes and no memory: reading the memory ended the process."""
    zeros = torch._efficientzerotensor((3,), device=device)
    assert zeros._is_zerotensor()
    assert zeros.device.type == device
    want = USES[use](torch.zeros(3))
    assert torch.equal(USES[use](zeros).cpu(), want)


def test_a_zero_tensor_is_not_written(dev: Any, device: str) -> None:
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        torch._efficientzerotensor((3,), device=device).erfinv_()
    assert torch.equal(torch._efficientzerotensor((3,)).to(device).cpu(), torch.zeros(3))


def test_gradients_that_are_zero_tensors(dev: Any, device: str) -> None:
    model = nn.Linear(3, 1).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    model(torch.ones(2, 3, device=device)).sgn().sum().backward()
    optimiser.step()
    assert all(torch.equal(p.detach().cpu(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_tangents_that_are_zero_tensors(dev: Any, device: str) -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.full((3,), 0.5, device=device), torch.ones(3, device=device))
        stacked = forward_ad.unpack_dual(torch.stack([x, torch.ones(3, device=device)]) * 2).tangent
        sign = forward_ad.unpack_dual(x.sgn()).tangent
    assert stacked.cpu().tolist() == [[2, 2, 2], [0, 0, 0]]
    assert sign.cpu().tolist() == [0, 0, 0]


def test_conjugate_and_negative_bits(dev: Any, device: str) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    ours, theirs = x.to(device).conj(), x.conj()
    for use in (
        lambda t: t.imag + 1,
        lambda t: torch.erfinv(t.imag / 10),
        lambda t: t @ t,
        lambda t: torch.view_as_real(t.resolve_conj()),
        lambda t: t.imag.relu(),
        lambda t: t.sin(),
    ):
        torch.testing.assert_close(use(ours).cpu(), use(theirs))


def test_what_the_device_cannot_hold_is_refused(dev: Any, device: str) -> None:
    x = torch.ones(2, 2, device=device)
    for make, kind in (
        (lambda: x.to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
    ):
        with pytest.raises(NotImplementedError, match=f"holds strided tensors\n  got      a {kind} tensor"):
            make()


class Wrapper(torch.Tensor):
    """A tensor without memory, whose operators work on the tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return Wrapper(func(*plain, **(kwargs or {})))


def test_a_wrapper_subclass_stays_one(dev: Any, device: str) -> None:
    wrapped = Wrapper(torch.full((2,), 0.5, device=device))
    result = torch.erfinv(wrapped)
    assert isinstance(result, Wrapper)
    assert torch.allclose(result.inner.cpu(), torch.erfinv(torch.tensor(0.5)).expand(2))


def test_a_tensor_whose_memory_is_gone_is_refused(dev: Any, device: str) -> None:
    """As FSDP frees a parameter: reading it ended the process."""
    x = torch.ones(3, device=device)
    x.untyped_storage().resize_(0)
    with pytest.raises(NotImplementedError, match="a tensor without memory of its own"):
        torch.erfinv(x)
    with pytest.raises(NotImplementedError, match="a tensor without memory of its own"):
        x.cpu()


def test_nested_tensors_are_computed_by_the_cpu(dev: Any, device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, torch says
        theirs = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])
        ours = theirs.to(device)
    assert ours.is_nested
    assert ours.device.type == device
    weight = torch.rand(5, 3)
    for use in (
        lambda t: t.relu(),
        lambda t: t * 2,
        lambda t: torch.nn.functional.linear(t, weight.to(t.device)),
        lambda t: torch.softmax(t, -1),
        lambda t: t.clone().relu_(),
    ):
        for got, want in zip(use(ours).cpu().unbind(), use(theirs).unbind(), strict=True):
            torch.testing.assert_close(got, want)
    padded = torch.nested.to_padded_tensor(ours, 0.0)
    assert padded.device.type == device
    assert torch.equal(padded.cpu(), torch.nested.to_padded_tensor(theirs, 0.0))


def test_a_padded_encoder_in_inference(dev: Any, device: str) -> None:
    """torch's fast path makes a nested tensor of the padded batch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    x = torch.randn(2, 9, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = model(x, src_key_padding_mask=padding)
        got = copy.deepcopy(model).to(device)(x.to(device), src_key_padding_mask=padding.to(device))
    torch.testing.assert_close(got.cpu(), want, atol=1e-5, rtol=1e-4)
