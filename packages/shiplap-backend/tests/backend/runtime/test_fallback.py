"""The CPU in the device's place: right, counted by reason, and an error where it is asked to be one."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch


@pytest.mark.usefixtures("subset")
def test_it_is_counted_by_op_and_reason(dev: Any, device: str) -> None:
    x = torch.randn(3, 3, device=device)
    dev.reset_counters()
    x.sin()
    x.sin()
    x @ x
    x.double() @ x.double()
    counts = dev.counters()
    assert counts["aten::sin.out"] == {"native": 0, "fallback": {"unregistered": 2}}
    assert counts["aten::mm.out"]["native"] == 1
    assert [r.partition(":")[0] for r in counts["aten::mm.out"]["fallback"]] == ["dtype"]
    dev.reset_counters()
    assert dev.counters() == {}


MIXED = {
    "mm": (torch.mm, (2, 2), (2, 2)),
    "addmm": (torch.addmm, (2, 2), (2, 2), (2, 2)),
    "linear": (torch.nn.functional.linear, (2, 2), (3, 2)),
    "conv2d": (torch.nn.functional.conv2d, (1, 2, 4, 4), (3, 2, 2, 2)),
}


@pytest.mark.usefixtures("of_openvino")
@pytest.mark.parametrize("name", MIXED)
def test_a_product_of_two_dtypes_is_refused_as_on_the_cpu(dev: Any, device: str, name: str) -> None:
    """The library takes both dtypes, and torch promotes none here."""
    call, *sizes = MIXED[name]
    for wide in range(len(sizes)):
        operands = [torch.ones(s, dtype=torch.float32 if i == wide else torch.float16) for i, s in enumerate(sizes)]
        for where in ("cpu", device):
            with pytest.raises(RuntimeError, match=r"(?i)type"):
                call(*(x.to(where) for x in operands))


@pytest.mark.usefixtures("of_openvino")
def test_an_output_that_is_promoted_is_native(dev: Any, device: str) -> None:
    here, x, y = torch.tensor([True, False]), torch.ones(2), torch.zeros(2, dtype=torch.float16)
    dev.reset_counters()
    got = torch.where(here.to(device), x.to(device), y.to(device))
    assert (got.dtype, got.cpu().tolist()) == (torch.float32, [1.0, 0.0])
    assert dev.counters()["aten::where.self"] == {"native": 1, "fallback": {}}


def test_it_can_be_an_error(dev: Any, device: str) -> None:
    x = torch.ones(3, 3, device=device)
    with dev.fallback_policy("error"):
        x @ x
        with pytest.raises(NotImplementedError) as caught:
            x.erfinv()
    assert str(caught.value) == (
        "aten::erfinv.out would run on the CPU in the device's place\n"
        "  got      unregistered\n"
        '  expected no fallback: the policy is "error"\n'
        '  fix      give the op an entry in ops.yaml, allow it by name, or set fallback_policy("count")'
    )
    x.erfinv()  # the policy ended with the block
    assert dev.fallback_policy.current() == "count"


@pytest.mark.usefixtures("subset")
@pytest.mark.parametrize("name", ["aten::erfinv", "aten::erfinv.out"])
def test_ops_can_be_allowed(dev: Any, device: str, name: str) -> None:
    x = torch.zeros(3, device=device)
    with dev.fallback_policy("error", allow=[name]):
        x.erfinv()
        assert dev.allowed_fallbacks() == [name]
        with pytest.raises(NotImplementedError, match=r"aten::cosh\.out would run"):
            x.cosh()


@pytest.mark.usefixtures("subset")
def test_the_policy_holds_in_backward_threads(dev: Any, device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.sin().sum()
    with dev.fallback_policy("error"), pytest.raises(NotImplementedError, match="would run on the CPU"):
        y.backward()


@pytest.mark.usefixtures("subset")
def test_it_can_warn_once(dev: Any, device: str) -> None:
    x = torch.zeros(3, device=device)
    with dev.fallback_policy("warn"):
        with pytest.warns(UserWarning, match=r"aten::cosh\.out runs on the CPU in the device's place \(unregistered\)"):
            x.cosh()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x.cosh()


def test_no_such_policy(dev: Any) -> None:
    with pytest.raises(ValueError, match="fallback policy 'ignore': expected 'count', 'warn' or 'error'"):
        dev.fallback_policy("ignore")


def test_in_place_ops_write_to_the_device(dev: Any, device: str) -> None:
    x = torch.rand(4, 5)
    d = x.to(device)
    view = d.t()[1:3]
    view.sigmoid_()
    x.t()[1:3].sigmoid_()
    torch.testing.assert_close(d.cpu(), x)
    assert view.erfinv_() is view


@pytest.mark.parametrize("size", [(), (0,), (7,), (3, 2)])
def test_out_is_resized(dev: Any, device: str, size: tuple[int, ...]) -> None:
    x, out = torch.rand(3, 4, device=device), torch.empty(0, device=device)
    if size:
        out = torch.empty(size, device=device)
        if out.numel():
            with pytest.warns(UserWarning, match="was resized"):
                torch.cosh(x, out=out)
        else:
            torch.cosh(x, out=out)
    else:
        torch.cosh(x, out=out)
    assert out.shape == (3, 4)
    torch.testing.assert_close(out.cpu(), x.cpu().cosh())
    assert out.untyped_storage().device.type == device


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss"])  # native in the subset, and on the CPU
def test_a_loss_does_not_resize_its_result(dev: Any, device: str, loss: str, reduction: str) -> None:
    """Their `meta` makes the result as large as the inputs first; torch's warning is for an `out=` that was resized."""
    call = getattr(torch.nn.functional, loss)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = call(x.to(device), y.to(device), reduction=reduction)
    torch.testing.assert_close(got.cpu(), call(x, y, reduction=reduction))
    with pytest.warns(UserWarning, match=r"was resized since it had shape \[2\], which does not match .* \[4, 3\]"):
        torch.add(x.to(device), y.to(device), out=torch.empty(2, device=device))


def test_several_outputs_and_lists(dev: Any, device: str) -> None:
    x = torch.randn(4, 6)
    values, indices = torch.sort(x.to(device), dim=1)
    assert torch.equal(values.cpu(), x.sort(dim=1).values)
    assert indices.device.type == device
    values, _ = torch.max(
        x.to(device), dim=1, out=(torch.empty(0).to(device), torch.empty(0, dtype=torch.int64).to(device))
    )
    assert torch.equal(values.cpu(), x.max(dim=1).values)
    for got, want in zip(torch.linalg.svd(x.to(device))[1:2], torch.linalg.svd(x)[1:2], strict=True):
        torch.testing.assert_close(got.cpu(), want)
    rows = x.to(device)[torch.tensor([2, 0]).to(device), None]
    assert torch.equal(rows.cpu(), x[torch.tensor([2, 0]), None])
    outs = [torch.zeros(6).to(device) for _ in range(4)]
    torch.unbind_copy(x.to(device), out=outs)
    assert torch.equal(outs[3].cpu(), x[3])


def test_data_dependent_and_scalar_results(dev: Any, device: str) -> None:
    x = torch.tensor([0.0, 2.0, 0.0, 3.0])
    assert torch.equal(x.to(device).nonzero().cpu(), x.nonzero())
    assert torch.equal(x.to(device)[x.to(device) > 1].cpu(), x[x > 1])
    assert bool((x.to(device) > 1).any())
    assert torch.equal(x.to(device), x.to(device))


def test_two_names_of_one_memory(dev: Any, device: str) -> None:
    x = torch.rand(6, device=device)
    want = x.cpu().clone()
    x[1:].sub_(x[:-1].clone()).sigmoid_()
    want[1:].sub_(want[:-1].clone()).sigmoid_()
    torch.testing.assert_close(x.cpu(), want)


def test_convolutions_run_whatever_is_native(dev: Any, device: str) -> None:
    """torch has no kernel for them that a new device could use: without ours they would raise."""
    layer = torch.nn.Conv2d(2, 4, 3, padding=1)
    x = torch.randn(2, 2, 5, 5)
    want = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    layer = layer.to(device)
    got = torch.autograd.grad(layer(x.to(device)).square().sum(), list(layer.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)


def test_what_neither_has(dev: Any, device: str) -> None:
    with pytest.raises(NotImplementedError, match=r"Only sparse|sparse|Sparse|layout"):
        torch.eye(3, device=device).to_sparse().coalesce()


@pytest.mark.usefixtures("subset")
def test_counting_is_safe_between_threads(dev: Any, device: str) -> None:
    x = torch.ones(2, device=device)
    dev.reset_counters()

    def work() -> None:
        for _ in range(200):
            x.cosh()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert dev.counters()["aten::cosh.out"]["fallback"] == {"unregistered": 800}
