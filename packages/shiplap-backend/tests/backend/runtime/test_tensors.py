"""Tensors of the device: copies of every dtype and layout, views, storages, files."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def sample(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.testing.make_tensor(*sizes, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_every_dtype(device: str, dtype: torch.dtype) -> None:
    x = sample(dtype, 4, 6)
    d = x.to(device)
    assert torch.equal(d.cpu(), x)
    assert torch.equal(d.clone().cpu(), x)
    for other in (torch.float32, torch.int32, torch.bool):
        if not dtype.is_complex:
            assert torch.equal(d.to(other).cpu(), x.to(other))
    assert torch.equal(d[1, 2].cpu(), x[1, 2])
    assert d[1, 2].item() == x[1, 2].item()


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "offset": lambda t: t[1:, 2:],
    "strided": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:, :1].expand(4, 5),
    "flipped": lambda t: t.flip(0),
    "permuted": lambda t: t.reshape(2, 2, 6).permute(2, 0, 1),
    "empty": lambda t: t[:0],
    "0-dim": lambda t: t[0, 0],
    "channels_last": lambda t: t.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "unfolded": lambda t: t.unfold(1, 3, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_every_layout(device: str, layout: str) -> None:
    x = sample(torch.float32, 4, 6)
    view, on = LAYOUTS[layout](x), LAYOUTS[layout](x.to(device))
    assert (on.shape, on.stride(), on.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
    assert torch.equal(on.cpu(), view)
    assert torch.equal(view.to(device).cpu(), view)
    into = torch.zeros(view.shape).to(device)
    into.copy_(view)  # host to device
    assert torch.equal(into.cpu(), view)
    into.zero_().copy_(on)  # device to device
    assert torch.equal(into.cpu(), view)
    if layout != "expanded":
        on.copy_(torch.full(view.shape, 3.0))
        assert torch.equal(on.cpu(), torch.full(view.shape, 3.0))
    assert torch.equal(on.contiguous().cpu(), on.cpu())


def test_views_share_memory(device: str) -> None:
    x = torch.arange(12.0, device=device)
    v = x.view(3, 4).t()[1:].unsqueeze(0)
    assert v._base is x
    v.fill_(-1)
    want = torch.arange(12.0)
    want.view(3, 4)[:, 1:] = -1
    assert torch.equal(x.cpu(), want)
    parts = x.split(5)
    parts[1].mul_(2)
    assert x.cpu()[5].item() == want[5].item() * 2
    assert x.view(torch.int32).data_ptr() == x.data_ptr()


def test_conjugates_and_negatives(device: str) -> None:
    """A lazy conjugate is a bit on the tensor; its copies, results and views carry it as on the CPU."""
    x = sample(torch.complex64, 5)
    d = x.to(device)
    assert torch.equal(d.conj().cpu(), x.conj())
    assert torch.equal(d.conj().resolve_conj().cpu(), x.conj().resolve_conj())
    assert torch.equal(d.conj().imag.cpu(), x.conj().imag)
    assert torch.equal(torch.view_as_real(d).cpu(), torch.view_as_real(x))
    torch.testing.assert_close(torch.fft.fft(d.conj()).cpu(), torch.fft.fft(x.conj()))
    torch.testing.assert_close((d.conj() * 2).cpu(), x.conj() * 2)


def test_resizing(device: str) -> None:
    x = torch.arange(4.0, device=device)
    x.resize_(2, 3)
    assert torch.equal(x.cpu().flatten()[:4], torch.arange(4.0))
    x.untyped_storage().resize_(64)
    assert x.untyped_storage().nbytes() == 64
    assert torch.equal(x.cpu().flatten()[:4], torch.arange(4.0))
    x.resize_(0)
    assert x.cpu().shape == (0,)


def test_setting_storage(device: str) -> None:
    x = torch.arange(6.0, device=device)
    y = torch.empty(0, device=device)
    y.set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    assert torch.equal(y.cpu(), torch.tensor([[2.0, 4.0], [3.0, 5.0]]))
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage())
    assert y.shape == (6,)
    y.set_()
    assert y.numel() == 0
    assert y.device.type == device


def test_files(device: str) -> None:
    x = torch.arange(6.0).reshape(2, 3).to(device)
    file = io.BytesIO()
    torch.save({"whole": x, "view": x.t()}, file)
    for where, expected in ((None, device), ("cpu", "cpu"), (device, device)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["whole"].device.type == expected
        assert loaded["view"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
        assert torch.equal(loaded["view"].cpu(), x.t().cpu())


def test_state_dicts(device: str) -> None:
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).to(device)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy.weight.cpu(), model.weight)
    model.load_state_dict(copy.cpu().state_dict())
    assert getattr(model, device)().weight.device.type == device


def test_uninitialised_memory_is_filled_where_torch_is_told_to(device: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=device).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_the_device_cannot_hold(dev: Any, device: str) -> None:
    with pytest.raises(NotImplementedError, match=r"arguments from the 'Sparse"):
        torch.empty(2, 2, layout=torch.sparse_coo, device=device)
    with pytest.raises(RuntimeError, match=r"Only dense CPU tensors can be pinned"):
        torch.empty(2, pin_memory=True, device=device)
    with pytest.raises(RuntimeError, match=r"same device|all tensors on device"):
        torch.ones(2, 2, device=device) @ torch.ones(2, 2)


def test_text(device: str) -> None:
    assert repr(torch.tensor([1.0, 2.0], device=device)) == f"tensor([1., 2.], device='{device}:0')"
