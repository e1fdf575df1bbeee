"""What torch asks of an accelerator and the CPU has no kernel for: recurrent nets, counts of integers, out=."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shiplap.torch_private.graph_objects import leaves
from shiplap_testing.effort import sampled


class Packed(nn.Module):
    """A net over sequences of three lengths."""

    def __init__(self, net: Callable[..., nn.Module], ordered: bool) -> None:
        super().__init__()
        self.net, self.lengths = net(4, 6, bidirectional=True), torch.tensor([5, 4, 2] if ordered else [2, 5, 4])
        self.ordered = ordered

    def forward(self, x: Tensor) -> Any:
        out, state = self.net(pack_padded_sequence(x, self.lengths, enforce_sorted=self.ordered))
        return pad_packed_sequence(out)[0], state


SEQUENCE, STEP = (5, 3, 4), (3, 4)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{f"{k.__name__} plain": (lambda k=k: k(4, 6), SEQUENCE) for k in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"{k.__name__} no bias": (lambda k=k: k(4, 6, bias=False), SEQUENCE) for k in (nn.LSTM, nn.GRU)},
    **{
        f"{k.__name__} deep": (lambda k=k: k(4, 6, num_layers=2, bidirectional=True, batch_first=True), SEQUENCE)
        for k in (nn.LSTM, nn.GRU)
    },
    **{f"{k.__name__} one sequence": (lambda k=k: k(4, 6), (5, 4)) for k in (nn.LSTM, nn.GRU)},
    **{f"{k.__name__} packed": (lambda k=k: Packed(k, True), SEQUENCE) for k in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"{k.__name__} packed out of order": (lambda k=k: Packed(k, False), SEQUENCE) for k in (nn.LSTM, nn.GRU)},
    **{k.__name__: (lambda k=k: k(4, 6), STEP) for k in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
    **{f"{k.__name__} no bias": (lambda k=k: k(4, 6, bias=False), STEP) for k in (nn.LSTMCell, nn.GRUCell)},
    **{f"{k.__name__} one": (lambda k=k: k(4, 6), (4,)) for k in (nn.LSTMCell, nn.GRUCell)},
}


@pytest.mark.parametrize("name", sampled(NETS, 4))
def test_recurrent_nets(dev: Any, device: str, name: str) -> None:
    """Outputs, states and every gradient are the CPU's."""
    torch.manual_seed(0)
    make, sizes = NETS[name]
    net, x = make(), torch.randn(sizes)
    values: list[list[Any]] = []
    strides: list[list[tuple[int, ...]]] = []
    for where in ("cpu", device):
        ours, given = copy.deepcopy(net).to(where), x.clone().to(where).requires_grad_()
        results = [t for t in leaves(ours(given)) if isinstance(t, Tensor)]
        sum((t.square().sum() for t in results), torch.zeros((), device=where)).backward()
        strides.append([t.stride() for t in results])
        values.append([*results, given.grad, *(p.grad for p in ours.parameters())])
    assert strides[0] == strides[1]
    for want, got in zip(*values, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_a_gradient(dev: Any, device: str) -> None:
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(3, 2).double(), torch.randn(2, 3, dtype=torch.float64)
    values = []
    for where in ("cpu", device):
        ours, given = copy.deepcopy(cell).to(where), x.clone().to(where).requires_grad_()
        (first,) = torch.autograd.grad(ours(given)[0].square().sum(), given, create_graph=True)
        values.append(torch.autograd.grad(first.square().sum(), given)[0].cpu())
    torch.testing.assert_close(values[1], values[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_histc_counts_integers_as_accelerators_do(dev: Any, device: str, dtype: torch.dtype) -> None:
    """Mixture-of-experts layers count int32 on every device but the CPU."""
    x = torch.tensor([0, 1, 1, 3, 2, 1, 7], dtype=dtype, device=device)
    want = torch.tensor([1, 3, 1, 1], dtype=dtype)
    out = torch.empty(0, dtype=dtype, device=device)
    for got in (torch.histc(x, bins=4, min=0, max=3), torch.histc(x, bins=4, min=0, max=3, out=out), out):
        assert got.device.type == device
        assert torch.equal(got.cpu(), want)


def test_out_of_ops_that_ask_for_the_device_by_name(dev: Any, device: str) -> None:
    x = torch.tensor([[2, 1, 2], [0, 0, 5]])
    out = torch.empty(0, dtype=x.dtype, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.mode(x.to(device), 1, out=out)
    assert [t.cpu().tolist() for t in out] == [t.tolist() for t in torch.mode(x, 1)]
    z = torch.randn(4, 3, dtype=torch.complex64)
    assert torch.equal(z.to(device).conj_physical_().cpu(), z.conj_physical())
    u, s, v = (torch.empty(0, dtype=d, device=device) for d in (z.dtype, torch.float32, z.dtype))
    torch.svd(z.to(device), out=(u, s, v))
    torch.testing.assert_close((u.cpu() * s.cpu()) @ v.cpu().mH, z, rtol=1e-4, atol=1e-4)


def _unpooled(x: Tensor) -> Tensor:
    pooled, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
    return nn.functional.max_unpool2d(pooled, indices, 2)


OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "pixel_shuffle": lambda x: torch.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: torch.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: torch.channel_shuffle(x, 2),
    "replication pad": lambda x: nn.functional.pad(x, (1, 2, 0, 1), mode="replicate"),
    "max_unpool2d": _unpooled,
}


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_strides_are_the_cpus(dev: Any, device: str, name: str, format: torch.memory_format) -> None:
    x = torch.randn(2, 8, 4, 4).to(memory_format=format)
    f = OF_IMAGES[name]
    got, want = f(x.to(device)), f(x)
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu(), want)


# Orders in which the dims of a query may be stored. Most models have positions first.
STORED = {
    "heads first": (0, 1, 2, 3),
    "positions first": (0, 2, 1, 3),
    "heads outermost": (1, 0, 2, 3),
    "positions outermost": (2, 0, 1, 3),
    "features before positions": (0, 1, 3, 2),  # the CPU multiplies and takes a softmax
}
SEEN = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.4
SEEN[2] = False  # a row that sees nothing
SEEING: dict[str, dict[str, Any]] = {
    "all": {},
    "earlier": {"is_causal": True},
    "some": {"attn_mask": SEEN},
    "more or less": {"attn_mask": torch.randn(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)), "scale": 0.3},
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_of_queries_share_those_of_keys(dev: Any, device: str, stored: str, heads: int) -> None:
    check_attention(device, STORED[stored], {"enable_gqa": True, "is_causal": True}, torch.float32, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seeing", SEEING)
@pytest.mark.parametrize("stored", STORED)
def test_attention_and_its_gradients_lie_as_the_cpus(
    dev: Any, device: str, stored: str, seeing: str, dtype: torch.dtype
) -> None:
    options = dict(SEEING[seeing])
    if seeing == "more or less":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    check_attention(device, STORED[stored], options, dtype)


def check_attention(
    device: str, order: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype, heads: int = 4
) -> None:
    """Values and strides of the result and of three gradients. ``heads``: of keys and values."""
    torch.manual_seed(0)
    back = [order.index(d) for d in range(4)]
    three = (2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 8)
    tensors = [torch.randn([sizes[d] for d in order]).to(dtype).permute(back) for sizes in three]
    upstream, values = torch.randn(2, 4, 5, 8).to(dtype), []
    for where in ("cpu", device):
        given = [t.to(where).requires_grad_() for t in tensors]
        there = {k: v.to(where) if isinstance(v, Tensor) else v for k, v in options.items()}
        result = nn.functional.scaled_dot_product_attention(*given, **there)
        values.append([result, *torch.autograd.grad(result, given, upstream.to(where))])
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-4
    for want, got in zip(*values, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


def test_the_sums_of_attention_lie_as_the_cpus(dev: Any, device: str) -> None:
    q = torch.randn(2, 4, 5, 8)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for got, want in zip(attention(*[q.to(device)] * 3), attention(q, q, q), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


def test_a_norm_that_the_target_lacks_is_the_cpus(dev: Any, device: str) -> None:
    """Torch's composite would view the permuted image as if it were contiguous, and raise."""
    x = torch.randn(2, 3, 3, 4).permute(0, 3, 1, 2)
    got, want = nn.functional.group_norm(x.to(device), 2), nn.functional.group_norm(x, 2)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want)
