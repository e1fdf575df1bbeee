"""The native binding on a GPU: values, streams, devices, graphs, out-variants and errors of a kernel built by nvcc."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.dispatch.launch import poisoned_workspace
from shiplap.kernels.c.header import header_text
from shiplap.kernels.native import binding
from shiplap_headers import include_dir
from shiplap_testing.support import fails

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

INCLUDE = include_dir()
BODY = """
#include "scale.h"
#include <cstdio>
SL_SIGNATURES
namespace {
__global__ void scale_kernel(const float* x, int64_t sx, int64_t sy, float* y, int64_t* info, int64_t rows,
                             int64_t cols, float k, int64_t stream, int64_t device, const unsigned char* scratch) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < rows * cols) y[i] = x[i / cols * sx + i % cols * sy] * k;
  if (i == 0) { info[0] = stream; info[1] = device; info[2] = scratch ? scratch[0] : -1; info[3] = (int64_t)scratch; }
}
}
extern "C" int scale(const sl_context* ctx, const DLTensor* x, DLTensor* y, DLTensor* info, int64_t k) {
  if (k == 13) { snprintf(ctx->error, ctx->error_size, "k is unlucky"); return SL_INVALID_ARGUMENT; }
  if (k == 14) return 77;
  int device = -1;
  cudaGetDevice(&device);
  const int64_t n = x->shape[0] * x->shape[1];
  const unsigned char* scratch = ctx->workspace_size ? (const unsigned char*)ctx->workspace : nullptr;
  scale_kernel<<<n / 256 + 1, 256, 0, (cudaStream_t)ctx->stream>>>(
      (const float*)x->data, x->strides[0], x->strides[1], (float*)y->data, (int64_t*)info->data, x->shape[0],
      x->shape[1], (float)k, (int64_t)ctx->stream, device, scratch);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return SL_OK;
  snprintf(ctx->error, ctx->error_size, "%s", cudaGetErrorString(status));
  return SL_INTERNAL;
}
"""


def nvcc():
    from torch.utils.cpp_extension import CUDA_HOME

    path = shutil.which("nvcc") or (f"{CUDA_HOME}/bin/nvcc" if CUDA_HOME else "")
    if not path or not Path(path).is_file():
        pytest.skip("no nvcc")
    return path


@pytest.fixture(scope="module")
def scale(tmp_path_factory):
    @sl.op("gpu_native::scale", outputs=["y", "info"])
    def scale(x: Float[Tensor, "n c"], k: int = 2) -> tuple[Float[Tensor, "n c"], Int64[Tensor, "4"]]:
        return x * k, torch.zeros(4, dtype=torch.int64, device=x.device)

    folder = tmp_path_factory.mktemp("gpu")
    (folder / "scale.h").write_text(header_text({"scale": scale.spec}, "scale"))
    (folder / "scale.cu").write_text(BODY)
    library = folder / "libscale.so"
    call = [
        nvcc(),
        "-O2",
        "-std=c++17",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-arch=native",
        f"-I{INCLUDE}",
        "-o",
        library,
    ]
    subprocess.run([*call, folder / "scale.cu"], check=True)
    scale.kernel("cuda", sl.cabi(library, "scale", strided=["x"]), workspace="n * itemsize", dtypes="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder / "cache"))
        patch.setenv("SHIPLAP_NATIVE", "1")
        binding.build(scale)
        yield scale


@pytest.fixture(params=["native", "python"])
def either(scale, request, monkeypatch):
    """The op under each binding."""
    if request.param == "python":
        monkeypatch.setenv("SHIPLAP_NATIVE", "0")
        scale.drop_native()
    elif scale.native is None:
        binding.build(scale)
    assert (scale.native is not None and "cuda" in scale.native.devices) == (request.param == "native")
    return scale


@pytest.fixture
def counted(monkeypatch):
    """How often Python picked a kernel: never, where native code serves."""
    calls = []
    original = sl.Op.pick_kernel
    monkeypatch.setattr(sl.Op, "pick_kernel", lambda self, call: (calls.append(1), original(self, call))[1])
    return calls


def test_values_over_layouts(either, counted):
    base = torch.randn(64, 48, device="cuda")
    for x in (base, base.T, base[::2, ::3], base[5:, 7:], base[:1].expand(5, 48), base[:0], base[:, :0]):
        y, info = either(x, 3)
        assert torch.equal(y, x * 3)
        assert y.is_contiguous()
        if x.numel():
            assert info[0] == torch.cuda.current_stream().cuda_stream
            assert info[1] == x.device.index
    assert bool(counted) == (either.native is None)


def test_the_current_stream_is_used(either):
    stream, x = torch.cuda.Stream(), torch.zeros(1000, 10, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.add_(1)  # late
        y, info = either(x, 2)
    stream.synchronize()
    assert info[0] == stream.cuda_stream
    assert torch.equal(y, torch.full_like(y, 2.0))


@pytest.mark.whole_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_a_device_that_is_not_current(either):
    x = torch.randn(5, 6, device="cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(stream), torch.cuda.device(0):
        y, info = either(x, 2)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert y.device == x.device
    assert torch.equal(y, x * 2)
    assert info.tolist()[:2] == [stream.cuda_stream, 1]
    with fails("SL212"):
        either.out(x, out=either(torch.randn(5, 6, device="cuda:0")))


def test_capture_and_replay(either):
    static = torch.randn(33, 7, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        either(static, 2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = either(static, 2)
        z, _ = either(y, 5)
    for _ in range(3):
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert torch.equal(z, static * 2 * 5)


def test_out_variant(either, counted):
    x = torch.randn(64, 32, device="cuda")
    y, info = torch.empty_like(x), torch.empty(4, dtype=torch.int64, device="cuda")
    scratch = torch.empty(either.workspace_bytes(x), dtype=torch.uint8, device="cuda")
    counted.clear()
    with torch.no_grad():
        either.out(x, 2, out=(y, info), workspace=scratch)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        either.out(x, 3, out=(y, info), workspace=scratch)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "nothing is allocated"
        assert torch.equal(y, x * 3)
        assert info[3] == scratch.data_ptr()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            either.out(x, 4, out=(y, info), workspace=scratch)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, x * 4)
        assert bool(counted) == (either.native is None)
        for keywords, id, got in (
            ({"out": (y[:5], info)}, "SL212", "shape (5, 32)"),
            ({"out": (y.cpu(), info)}, "SL212", "torch.float32 on cpu"),
            ({"out": (x, info)}, "SL210", "memory of 'x'"),
            ({"out": (y, info), "workspace": scratch[:5]}, "SL213", "5 bytes"),
            ({"out": (y, info), "workspace": scratch.cpu()}, "SL213", None),
        ):
            with fails(id, **({"got": got} if got else {})):
                either.out(x, **keywords)


def test_errors_have_their_text(either):
    x = torch.randn(3, 4, device="cuda")
    with fails("SL211", got="k is unlucky"):
        either(x, 13)
    with fails("SL305", got="status 77"):
        either(x, 14)
    with fails("SL201", got="1 dims, shape (4)"):
        either(x[0])
    with fails("SL204"):
        either(x.long())
    with pytest.raises((RuntimeError, sl.ShiplapError), match="k is unlucky"):
        torch.ops.gpu_native.scale(x, 13)
    with fails("SL304", got="a tensor that requires grad"):
        either.out(x.clone().requires_grad_(), out=either(x))


def test_a_text_of_python_reaches_those_who_call_torch_ops(scale):
    if scale.native is None:
        binding.build(scale)
    x = torch.randn(3, 4, device="cuda")
    y, info = scale(x)
    with pytest.raises(RuntimeError, match="SL304: an out-variant has no gradient"):  # said by Python, thrown by C++
        torch.ops.gpu_native.scale__out(x.clone().requires_grad_(), y=y, info=info)


def test_a_dtype_that_the_kernel_does_not_take_runs_the_reference(either):
    x = torch.randn(3, 4, device="cuda").double()
    assert torch.equal(either(x, 3)[0], x * 3)


def test_poison_reaches_the_device(either):
    x = torch.randn(3, 4, device="cuda")
    for byte in (0xA5, 0x7F):
        with poisoned_workspace(byte):
            assert either(x)[1][2] == byte


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_compiled(scale, counted, fresh_compiler, cpp_wrapper):
    if scale.native is None:
        binding.build(scale)
    x = torch.randn(30, 40, device="cuda")
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        f = torch.compile(lambda x: scale(x.sin(), 3)[0].cos(), fullgraph=True)
        torch.testing.assert_close(f(x), (x.sin() * 3).cos())
        f(x)
    assert not counted


def test_reduce_overhead(scale, fresh_compiler):
    f = torch.compile(lambda x: scale(x.sin(), 3)[0].cos(), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(30, 40, device="cuda")
        torch.testing.assert_close(f(x).clone(), (x.sin() * 3).cos())
