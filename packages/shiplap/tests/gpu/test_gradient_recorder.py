"""Gradients that C++ records on a GPU: equal to those of the reference, on side streams and in a captured graph."""

import subprocess

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.c.header import header_text
from shiplap_headers import include_dir
from tests.gpu.test_native_cuda import nvcc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

V = Float[Tensor, "n"]
BODY = """
#include "mul.h"
SL_SIGNATURES
namespace {
__global__ void forward(const float* x, const float* y, float* out, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) out[i] = x[i] * y[i];
}
__global__ void backward(const float* g, const float* x, const float* y, float* gx, float* gy, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) gx[i] = g[i] * y[i], gy[i] = g[i] * x[i];
}
float* at(const DLTensor* t) { return static_cast<float*>(t->data); }
}
extern "C" int mul(const sl_context* ctx, const DLTensor* x, const DLTensor* y, DLTensor* out) {
  forward<<<1, 256, 0, (cudaStream_t)ctx->stream>>>(at(x), at(y), at(out), x->shape[0]);
  return SL_OK;
}
extern "C" int mul_grad(const sl_context* ctx, const DLTensor* grad, const DLTensor* x, const DLTensor* y, DLTensor* gx,
                        DLTensor* gy) {
  backward<<<1, 256, 0, (cudaStream_t)ctx->stream>>>(at(grad), at(x), at(y), at(gx), at(gy), x->shape[0]);
  return SL_OK;
}
"""


@pytest.fixture(scope="module")
def mul(tmp_path_factory):
    @sl.op("gpu_gradients::mul")
    def mul(x: V, y: V) -> V:
        return x * y

    @sl.op("gpu_gradients::mul_grad", outputs=("grad_x", "grad_y"))
    def mul_grad(grad: V, x: V, y: V) -> tuple[V, V]:
        return grad * y, grad * x

    folder = tmp_path_factory.mktemp("gpu_gradients")
    (folder / "mul.h").write_text(header_text({"mul": mul.spec, "mul_grad": mul_grad.spec}, "mul"))
    (folder / "mul.cu").write_text(BODY)
    library = folder / "libmul.so"
    flags = ["-O2", "-shared", "-Xcompiler", "-fPIC", "-arch=native"]
    subprocess.run([nvcc(), *flags, f"-I{include_dir()}", f"-I{folder}", "-o", library, folder / "mul.cu"], check=True)
    for op, name in ((mul, "mul"), (mul_grad, "mul_grad")):
        op.kernel("cuda", sl.cabi(library, name), dtypes="float32")
    mul.backward(mul_grad)
    mul.build()
    assert mul.native.records
    return mul


def leaves(n=1000):
    torch.manual_seed(0)
    return [torch.randn(n, device="cuda", requires_grad=True) for _ in range(2)]


def gradients(f, x, y):
    out = f(f(x, y), y)
    return out, *torch.autograd.grad(out.sin().sum(), (x, y))


@pytest.mark.parametrize("side", [False, True])
def test_gradients_equal_those_of_the_reference(mul, monkeypatch, side):
    def refused(*args):
        raise AssertionError("Python records the call")

    monkeypatch.setattr(mul, "record_call", refused)
    monkeypatch.setattr(mul, "_record_plain_call", refused)
    args = leaves()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        for call in (mul, torch.ops.gpu_gradients.mul):
            got, expected = gradients(call, *args), gradients(mul.reference, *args)
            assert got[0].grad_fn.name() == "mul_backward"
            torch.testing.assert_close(got, expected)
    torch.cuda.synchronize()


def test_a_captured_step_has_the_gradients_of_new_values(mul):
    x, y = leaves()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(mul, x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gradients(mul, x, y)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            y.copy_(torch.randn_like(y))
        graph.replay()
        torch.testing.assert_close(made, gradients(mul.reference, x, y))


def test_a_gradient_of_a_gradient_and_compiled_autograd(mul, fresh_compiler):
    x, y = leaves(8)

    def second(f):
        first = torch.autograd.grad(f(x, y).sin().sum(), (x, y), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))

    torch.testing.assert_close(second(mul), second(mul.reference))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        mul(x, y).sin().sum().backward()
    torch.testing.assert_close([x.grad, y.grad], list(torch.autograd.grad(mul.reference(x, y).sin().sum(), (x, y))))
