"""slidesparse on a GPU: products against float64 with every algorithm, activations bit by bit, layers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.dispatch.launch import poisoned_workspace
from shiplap_slidesparse import formats, layers, lt, ops
from shiplap_slidesparse.lt import native, tuning
from shiplap_slidesparse.quantise import quantise_rows
from shiplap_testing.paths import REPOSITORY
from tests.slidesparse.gpu.cases import CUDA, FP8, LAYERS, MARKS, SPARSE, check, layer, slid_weight, values
from tests.slidesparse.gpu.cases import sparse as sparse

pytestmark = MARKS
SIZES = ((16, 32, 64), (48, 96, 160), (128, 4096, 4096), (1024, 1024, 2048), (4096, 320, 96))


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense_products(size):
    m, n, k = size
    x, weight = values(m, k, torch.int8), values(n, k, torch.int8)
    check(ops.mm_int8(x, weight), x, weight)
    x, weight = values(m, k, FP8), values(n, k, FP8)
    for factor in (1.0, 0.01):  # the scales of a call, not of the first one
        rows, columns = (torch.rand(m, device=CUDA) + 0.5) * factor, torch.rand(n, device=CUDA) + 0.5
        check(ops.mm_fp8(x, weight, rows, columns), x, weight, rows, columns)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", SPARSE, ids=str)
def test_sparse_products(sparse, dtype, size):
    m, n, k = size
    x, weight = values(m, k, dtype), slid_weight(n, k, dtype)
    check(SPARSE[dtype](x, lt.compress_weight(weight), n, ops.CUSPARSELT), x, weight)


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_scales_of_the_weights_rows(sparse, dtype):
    """By the library or by PyTorch, whichever the library's answer is."""
    m, n, k = 128, 256, 512
    x, weight, scale = values(m, k, dtype), slid_weight(n, k, dtype), torch.rand(n, device=CUDA) + 0.5
    print(dtype, "scaled by cuSPARSELt:", lt.supports_product(x.device, dtype, torch.bfloat16, native.PER_ROW))
    check(lt.scaled_product(x, lt.compress_weight(weight), scale, torch.bfloat16), x, weight, None, scale)
    check(
        lt.multiply_weight(
            x, lt.compress_weight(weight), n, torch.float32 if dtype == FP8 else torch.int32, sparse=True
        ),
        x,
        weight,
    )


@pytest.mark.parametrize("pattern", ["4:6", "6:8", "8:10", "14:16"])
def test_a_slid_product_is_the_pruned_product_in_integers(sparse, pattern):
    pairs = formats.Pattern.parse(pattern).pairs
    for m, n, k in ((17, 64, 100), (16, 512, 3584)):
        pruned = formats.prune(values(n, k, torch.int8).float(), pattern).to(torch.int8)
        x = values(m, k, torch.int8)
        blob = lt.compress_weight(formats.slide_weight(pruned, pattern))
        got = ops.sparse_mm_int8(formats.lift_columns(x, pairs), blob, n, ops.CUSPARSELT)[:m]
        assert torch.equal(got, (x.double() @ pruned.double().t()).int())


@pytest.mark.parametrize("dtype", SPARSE, ids=str)
def test_what_is_compressed_comes_back(sparse, dtype):
    for n, k in ((32, 32), (96, 160), (512, 2080)):
        weight = slid_weight(n, k, dtype)
        assert torch.equal(lt.expand_weight(lt.compress_weight(weight), n, k, dtype).float(), weight.float())


@pytest.mark.parametrize("dtype", SPARSE, ids=str)
def test_wide_weights_have_the_workspace_they_want(sparse, dtype):
    m, n, k = 128, 28672, 12288
    weight = torch.zeros(n, k, device=CUDA, dtype=dtype)
    weight[:, 1::4], weight[:, 2::4] = values(n, k // 4, dtype), values(n, k // 4, dtype)
    x, blob = values(m, k, dtype), lt.compress_weight(weight)
    some = torch.randint(0, n, (512,), device=CUDA)
    check(SPARSE[dtype](x, blob, n, ops.CUSPARSELT)[:, some], x, weight[some])


def test_the_library_is_asked_before_torch_has_begun(sparse):
    text = "import torch; from shiplap_slidesparse import lt; print(lt.available('cuda', torch.float8_e4m3fn))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip().endswith("True"), done.stderr[-800:]


@pytest.mark.parametrize("dtype", SPARSE, ids=str)
@pytest.mark.parametrize("m", [16, 256, 4096])
def test_all_algorithms_agree(sparse, dtype, m):
    n, k = 1024, 2048
    op, x, weight = SPARSE[dtype], values(m, k, dtype), slid_weight(n, k, dtype)
    blob = lt.compress_weight(weight)
    problem = tuning.problem_of(op, 0, m, n, k)
    configs = tuning.list_algorithms(op, problem, torch.cuda.current_stream().cuda_stream)
    assert len(configs) > 1, f"{len(configs)} algorithms for {dtype} {m} x {n} x {k}"
    kernel = next(k for k in op.kernels["cuda"] if k.name == "lt")
    call, wrong = op.bind((x, blob, n, ops.CUSPARSELT)), []
    for config in configs:
        try:
            with poisoned_workspace(0xFF):
                (out,) = kernel.with_config(Config.of(config)).run_call(call)
            check(out, x, weight)
        except (AssertionError, sl.ShiplapError) as e:
            wrong.append(f"{config}: {str(e).splitlines()[0][:80]}")
    assert not wrong, f"{len(wrong)} of {len(configs)} algorithms, first {wrong[0]}"


def test_dense_algorithms_agree():
    x, weight = values(256, 2048, torch.int8), values(1024, 2048, torch.int8)
    configs = tuning.list_algorithms(ops.mm_int8, tuning.problem_of(ops.mm_int8, 0, 256, 1024, 2048))
    kernel, call = ops.mm_int8.kernels["cuda"][0], ops.mm_int8.bind((x, weight))
    for config in configs:
        check(kernel.with_config(Config.of(config)).run_call(call)[0], x, weight)


def test_half_precision_in_a_process_of_its_own(sparse):
    """cuSPARSELt 0.8.1 was seen to execute an illegal instruction there, which a process does not survive."""
    text = """
import torch
from tests.slidesparse.gpu.test_layers import *
x, w = values(64, 256, torch.float16), slid_weight(128, 256, torch.float16)
check(ops.sparse_mm_fp16(x, lt.compress(w), 128, ops.CUSPARSELT), x, w)
torch.cuda.synchronize()
print("right")"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120)
    assert done.stdout.strip().endswith("right"), done.stderr[-800:]


# --- activations ------------------------------------------------------------------------------------------------------


def same_bits(got: Tensor, want: Tensor) -> None:
    wide = want.element_size() > 1 and want.is_floating_point()
    nan = want.isnan() if wide else torch.zeros_like(want, dtype=torch.bool)
    assert got.shape == want.shape
    assert not wide or got[nan].isnan().all()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    wrong = (got.view(bits) != want.view(bits)) & ~nan
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} {want.dtype} of {tuple(want.shape)}"


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("floats", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantised_rows_have_the_bits_of_the_reference(dtype, floats):
    op = ops.quantise_int8 if dtype == torch.int8 else ops.quantise_fp8
    for m, k, pairs in (
        (1, 4096, 4),
        (17, 3584, 3),
        (16, 20000, 4),
        (300, 130, 8),
        (0, 64, 2),
        (5, 1, 2),
        (64, 28672, 2),
    ):
        x = torch.randn(m, k, device=CUDA) * torch.logspace(-30, 4, max(m, 1), device=CUDA)[:m, None]
        if m > 4:
            x[1], x[2, 0], x[3, k // 2] = 0, float("nan"), float("inf")
        x = x.to(floats)
        for view in (x, x[:, 1:], x.t().contiguous().t()):
            q, scale = op(view, pairs)
            want_q, want_scale = op.run_reference((view.cpu(), pairs))
            same_bits(q.cpu(), want_q)
            same_bits(scale.cpu(), want_scale)
            for got, want in zip(op.run_reference((view, pairs)), (want_q, want_scale), strict=True):
                same_bits(got.cpu(), want)  # of the reference on CUDA, too
        lifted = ops.lift(x, pairs)
        same_bits(lifted.cpu(), ops.lift.run_reference((x.cpu(), pairs)))


@pytest.mark.whole_device
def test_offsets_beyond_31_bits():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    x = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device=CUDA)
    x[-3:] = torch.randn(3, 32_768, device=CUDA).bfloat16()
    q, scale = ops.quantise_int8(x, 4)
    want, scales = quantise_rows(x[-3:], torch.int8)
    assert torch.equal(q[69_997:70_000].cpu(), formats.lift_columns(want, 4)[:3].cpu())
    assert torch.equal(scale[69_997:70_000], scales)
    assert not q[70_000:].any()


def within(got: Tensor, want: Tensor, allowed: Tensor | float) -> bool:
    return bool(((got.float() - want.float()).abs() <= allowed).all())


def told(got: Tensor, want: Tensor) -> str:
    """One line, for a failure."""
    error = (got.float() - want.float()).abs()
    return f"off by {error.max():.3g} of {want.float().abs().max():.3g}, {int((error > 0).sum())} of {error.numel()}"


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", LAYERS, ids=lambda op: op.spec.opname)
@pytest.mark.parametrize("form", ["dense", "slide"])
def test_layers_agree_with_their_reference(sparse, op, form):
    for m, n, k, pairs, bias in (
        (1, 64, 96, 4, True),
        (17, 512, 1024, 3, False),
        (256, 320, 3584, 2, True),
        (0, 32, 32, 4, True),
    ):
        x, second, weight, packed, added, *rest = layer(op, m, n, k, pairs, bias)
        args = (x, second, weight if form == "dense" else None, packed if form == "slide" else None, added, *rest)
        got, want = op(*args), op.run_reference((x, second, weight, None, added, *rest))
        heavy = x.float().abs() @ (weight.float() * (second[:, None] if isinstance(second, Tensor) else 1)).abs().t()
        exact = op is layers.linear_int8
        allowed = 0 if exact else want.float().abs() * 2**-7 + heavy * 2**-7 + 1e-4
        assert within(got, want, allowed), f"{(m, n, k, pairs)}: {told(got, want)}"


@pytest.mark.parametrize("floats", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", LAYERS[:2], ids=lambda op: op.spec.opname)
def test_8_bit_layers_take_every_float_type(sparse, op, floats):
    x, second, weight, packed, added, *rest = layer(op, 33, 256, 512)
    x, added = x.to(floats), added.to(floats)
    want = op.run_reference((x, second, weight, None, added, *rest))
    heavy = x.float().abs() @ (weight.float() * second[:, None]).abs().t()
    for form in ((weight, None), (None, packed)):
        got = op(x, second, *form, added, *rest)
        assert got.dtype == floats
        allowed = 0 if op is LAYERS[0] else heavy * 2**-9 + want.float().abs() * 2**-10
        assert within(got, want, allowed), told(got, want)
