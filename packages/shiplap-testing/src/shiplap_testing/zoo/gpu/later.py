"""More faults of capture and replay: what is loaded late, copied in secret, or left to the host."""

import ctypes
import importlib.util

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.gpu.common import M, bad, checked, cudart, double, good, stream_of
from shiplap_testing.zoo.specimen import register

# 3: a module that is compiled and loaded at the first launch of each size, and one that serves all sizes

if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _fixed_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr):
        """Write ``2 * x`` to ``out`` for the block of ``BLOCK`` elements that belongs to this program. ``x`` has ``N``
        elements in all. ``N`` is a constant of the kernel, so that a kernel is compiled and loaded for each size.
        """
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < N) * 2, at < N)

    @triton.jit(do_not_specialize=["n"])
    def _any_kernel(x, out, n, BLOCK: tl.constexpr):
        """Write ``2 * x`` to ``out`` for the block of ``BLOCK`` elements that belongs to this program. ``x`` has ``n``
        elements in all. The kernel is compiled once for all ``n``.
        """
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)

    def _launch(kernel):
        """Return a function that runs the Triton kernel ``kernel`` on a tensor and returns its result."""

        def run(x):
            """Return ``2 * x`` as a new tensor, computed by the Triton kernel ``kernel``, an argument of the enclosing
            function.
            """
            x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if x.numel():
                # Triton launches its kernels on the current device.
                with torch.cuda.device(x.device):
                    kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
            return out

        return run

    def _empty(x):
        """Return a contiguous, uninitialised tensor with the shape and dtype of ``x``, as the fake of the Triton
        operators.
        """
        return x.new_empty(x.shape)

    # Said to break captures, but CUDA 13.0 loads modules inside one (H200, torch 2.11, Triton 3.6, 2026-11-21).
    good("module loaded at the first launch of a size", double("gpu_module", _launch(_fixed_kernel), _empty))
    good("one module for all sizes", double("gpu_one_module", _launch(_any_kernel), _empty))

# 18: weights copied at every replay, since the op has a static buffer of its own

_staging = {}


def _staged(x, weight):
    """Return ``x * weight``. This function has a defect on purpose. Each replay of a CUDA graph copies ``weight`` to a
    buffer that the function keeps, which is not needed.
    """
    key = weight.shape, weight.dtype, weight.device, torch.cuda.current_stream(x.device).cuda_stream
    if key not in _staging:
        _staging[key] = torch.empty_like(weight)
    return x * _staging[key].copy_(weight)


@sl.adopt(
    register("gpu_staged(Tensor x, Tensor weight) -> Tensor", _staged, lambda x, weight: x.new_empty(x.shape)),
    autocast=None,
)
def staged(x: M, weight: M) -> M:
    """Return ``x * weight``, the reference of the wasteful operator ``zoo::gpu_staged``. The operator copies ``weight``
    to a buffer in each call, which is not needed.
    """
    return x * weight


bad(
    "weights copied into a staging buffer", staged, "bytes of weight into a buffer that the op keeps", "cudagraph_trees"
)


@sl.op("zoo_gpu::appended")
def appended(x: M, weight: Float[Tensor, "c"]) -> M:
    """Return ``x * weight``. The result begins as a copy of ``x``. That copy is no waste, so no check may fail on the
    operator.
    """
    return x.clone().mul_(weight)


good("result that starts as a copy of an input", appended)


def _on_host(x):
    """Return the number of positive elements of ``x`` as a tensor without dimensions on the CPU. This function has a
    defect on purpose, which shows under CUDA graph capture. The host waits for the device.
    """
    return (x > 0).sum().cpu()


@sl.adopt(
    register("gpu_on_host(Tensor x) -> Tensor", _on_host, lambda x: torch.empty((), dtype=torch.int64, device="cpu")),
    autocast=None,
)
def on_host(x: M) -> Int64[Tensor, ""]:
    """Return the number of positive elements of ``x`` as a tensor on the CPU, the reference of the broken operator
    ``zoo::gpu_on_host``. The host waits for the device, which a CUDA graph cannot record.
    """
    return (x > 0).sum().cpu()


bad("result on the host", on_host, "Cannot copy between CPU and CUDA tensors", "cudagraph_trees")

# 20: host code in the stream: free(NULL), which does nothing


def _callback(x):
    """Return ``2 * x``. This function has a defect on purpose. Each replay of a CUDA graph calls a function on the
    host, which does nothing.
    """
    y = x * 2
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    checked(cudart().cudaLaunchHostFunc(stream_of(x), nothing, None))
    return y


bad("host callback in the stream", double("gpu_callback", _callback), "every replay runs 1 host callbacks")
