"""What an op writes to: autograd is told, so that no backward uses what it saved of a tensor that has changed since."""

from pathlib import Path

import pytest
import torch
from jaxtyping import Complex64, Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c

BODY = """
int shifted(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + ((float*)y->data)[i];
  return SL_OK;
}
int shift_(const sl_context* ctx, DLTensor* x, const DLTensor* y) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)x->data)[i] += ((float*)y->data)[i];
  return SL_OK;
}"""
V = Float[Tensor, "n"]


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    """A kernel behind a C function, which tells torch nothing: an out-variant, and an op that writes."""

    @sl.op("written::shifted")
    def shifted(x: V, y: V) -> V:
        return x + y

    @sl.op("written::shift_", mutates=["x"])
    def shift_(x: V, y: V) -> None:
        x.add_(y)

    folder: Path = tmp_path_factory.mktemp("written")
    library = compile_c(folder, "written", {"shifted": shifted, "shift_": shift_}, BODY)
    shifted.kernel("cpu", sl.cabi(library, "shifted"), dtypes=["float32"])
    shift_.kernel("cpu", sl.cabi(library, "shift_"), dtypes=["float32"])
    yield shifted, shift_
    for op in (shifted, shift_):
        op.drop_native()


DOORS = {
    "out": lambda shifted, shift_, x, y: shifted.out(x.clone(), y, out=x),
    "op": lambda shifted, shift_, x, y: shift_(x, y),
    "keyword": lambda shifted, shift_, x, y: shift_(x, y=y),
    "torch.ops": lambda shifted, shift_, x, y: torch.ops.written.shift_(x, y),
    "torch.ops default": lambda shifted, shift_, x, y: torch.ops.written.shift_.default(x, y),
    "compiled": lambda shifted, shift_, x, y: torch.compile(lambda x, y: shift_(x, y), backend="aot_eager")(x, y),
}


@pytest.mark.parametrize("how", ["python", "native"])
def test_a_backward_does_not_use_what_was_written_to(ops, how):
    for op in ops:
        op.drop_native() if how == "python" else binding.build(op)
    for name, write in DOORS.items():
        for grads in (True, False):
            w, x, y = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3)
            product = w * x
            with torch.set_grad_enabled(grads):
                write(*ops, x, y)
            assert torch.equal(x, torch.full((3,), 2.0)), (name, grads)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


@pytest.mark.parametrize("how", ["python", "native"])
def test_inference_mode_has_no_versions(ops, how):
    for op in ops:
        op.drop_native() if how == "python" else binding.build(op)
    with torch.inference_mode():
        x, y = torch.ones(3), torch.ones(3)
        for write in DOORS.values():
            before = x.clone()
            write(*ops, x, y)
            assert torch.equal(x, before + 1)


def test_lazily_negated_and_conjugated_tensors_are_written_to(ops, ns):
    """Torch's own copies of such tensors are written back for one returned tensor only."""
    shifted, shift_ = ops

    @sl.op(f"{ns}::turn_", mutates=["xs", "y"])
    def turn_(xs: list[Complex64[Tensor, "n"]], y: Complex64[Tensor, "n"], by: int = 1) -> None:
        for x in (*xs, y):
            x.mul_(1j * by)

    shift_.drop_native()
    for native in (False, True):
        binding.build(shift_) if native else None
        for call in (shift_, lambda x, y: shift_(y=y, x=x), torch.compile(shift_, backend="aot_eager", fullgraph=True)):
            z = torch.tensor([1 + 2j, 3 - 4j])
            call(z.conj().imag, torch.ones(2))
            assert z.tolist() == [1 + 1j, 3 - 5j]
        z = torch.zeros(2, dtype=torch.complex64)
        assert shifted.out(torch.ones(2), torch.ones(2), out=z.conj().imag).is_neg()
        assert z.imag.tolist() == [-2, -2]
    a, b = torch.tensor([1 + 2j]), torch.tensor([3 + 1j])
    turn_([a.conj(), b], y=(c := torch.tensor([2 + 0j])).conj())
    assert (a.item(), b.item(), c.item()) == ((1j * (1 - 2j)).conjugate(), 1j * (3 + 1j), -2j)


def test_lazily_negated_tensors_that_share_memory_are_refused(ns):
    """Copies of them share none, and what the op writes to the first would be lost."""

    @sl.op(f"{ns}::both_", mutates=["x", "y"])
    def both_(x: V, y: V) -> None:
        x.add_(1)
        y.add_(1)

    z = torch.tensor([1 + 2j, 3 - 4j])
    for negated in (z.conj().imag, z.imag):
        with pytest.raises(sl.ShiplapError, match="SL210"):
            both_(negated, y=negated)
    assert z.tolist() == [1 + 2j, 3 - 4j]
