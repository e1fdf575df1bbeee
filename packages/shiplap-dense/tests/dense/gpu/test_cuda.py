"""The Triton templates of kernels/dense on a real GPU: one kernel, the reference's values."""

import pytest
import torch

import shiplap_dense as dense
from shiplap.inductor import fusion_choices, switches
from shiplap_dense import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

gelu = torch.nn.functional.gelu
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def weights(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)


def launched(fn, args, dynamic: bool) -> list[str]:
    """Kernels that one call of the compiled function starts."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        torch.compile(fn, dynamic=dynamic, fullgraph=True)(*args)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if "Mem" not in name]


def check(fn, *args, kernels: int = 1, dynamic: bool = False, templates: int = 1) -> None:
    """``fn`` compiled: values of float64, and so many kernels in all."""
    torch._dynamo.reset()
    before = len(fusion_choices())
    with torch.no_grad():
        got = torch.compile(fn, dynamic=dynamic, fullgraph=True)(*args)
        want = fn(*[a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args])
    got, want = ((v,) if isinstance(v, torch.Tensor) else v for v in (got, want))
    for g, w in zip(got, want, strict=True):
        assert float((g.double() - w.double()).norm() / w.double().norm()) < TOLERANCE[g.dtype]
    made = fusion_choices()[before:]
    assert [d.chosen != "reference" for d in made] == [True] * templates, made
    assert len(names := launched(fn, args, dynamic)) == kernels, names


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (70, 50, 90), (1, 129, 257), (256, 512, 128)])
def test_mm(dtype, m, n, k):
    args = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype), randn(n, dtype=dtype)
    check(lambda a, b, c: gelu(ops.mm(a, b, c)), *args)
    # Inductor fuses no prologue that needs float32 into a kernel of 16-bit operands.
    check(lambda a, b, c: ops.mm(torch.sigmoid(a), b) + c, *args, kernels=1 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_raw_output_transposes_and_views(dynamic):
    a, b, c = randn(90, 70, dtype=torch.float32), randn(50, 90, dtype=torch.float32), randn(50, dtype=torch.float32)
    check(lambda a, b, c: (lambda y: (y, torch.relu(y + c)))(ops.mm(a.t(), b.t())), a, b, c, dynamic=dynamic)
    # On a GPU, Inductor of torch 2.11 compares loops before it merges them: behind a view, an epilogue stays outside.
    kernels = 2 if torch.__version__.startswith("2.11") else 1
    args = a.t().view(7, 10, 90), b, c
    check(lambda a, b, c: gelu(dense.matmul(a, b.t(), c)), *args, dynamic=dynamic, kernels=kernels)


def test_bulk_copies():
    args = randn(512, 1024, dtype=torch.bfloat16), randn(768, 1024, dtype=torch.bfloat16)
    for fn in (lambda a, b: torch.relu(ops.mm(a, b.t())), lambda a, b: torch.relu(ops.mm(b, a.t()))):
        with switches(ops.mm, only="mm_tma"):
            check(fn, *args)
    with switches(ops.mm, only="mm_tma"):
        check(
            lambda a, b: torch.relu(ops.mm(a.t(), b)), randn(1024, 512, dtype=torch.bfloat16), args[1].t().contiguous()
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bmm_int8_grouped_conv(dtype):
    check(lambda a, b: torch.relu(dense.matmul(a, b)), randn(3, 40, 50, dtype=dtype), randn(3, 50, 33, dtype=dtype))
    scale = torch.rand(50, device="cuda").to(dtype) / 127
    check(lambda a, w, s: gelu(dense.matmul_int8(a, w, s)), randn(70, 90, dtype=dtype), weights(50, 90), scale)
    ends = torch.tensor([10, 10, 40, 45, 60], dtype=torch.int32, device="cuda")
    check(
        lambda a, b: torch.relu(dense.grouped_matmul(a, b, ends)),
        randn(70, 90, dtype=dtype),
        randn(5, 90, 50, dtype=dtype),
    )
    x = randn(2, 16, 13, 11, dtype=dtype).to(memory_format=torch.channels_last)
    w = randn(24, 16, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    check(lambda x, w, c: torch.relu(dense.conv2d(x, w, c, stride=2, padding=1)), x, w, randn(24, dtype=dtype))


def test_a_training_step_goes_through_templates():
    a = randn(64, 96, dtype=torch.float32).requires_grad_()
    b = randn(96, 128, dtype=torch.float32).requires_grad_()
    torch._dynamo.reset()
    before = len(fusion_choices())
    torch.compile(lambda a, b: gelu(ops.mm(a, b)).sum(), fullgraph=True)(a, b).backward()
    got, (a.grad, b.grad) = (a.grad, b.grad), (None, None)
    gelu(a @ b).sum().backward()
    for g, w in zip(got, (a.grad, b.grad), strict=True):
        assert float((g - w).norm() / w.norm()) < 1e-4
    assert [d.chosen != "reference" for d in fusion_choices()[before:]] == [True] * 3
