"""Sound ops: each does, in the right way, what some fault does in the wrong one."""

import importlib.util

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.gpu.common import M, V, double, good

good("pointwise", double("gpu_good", lambda x: x * 2))


@sl.op("zoo_gpu::mm")
def mm(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
    """Return the matrix product ``x @ y``."""
    return x @ y


good("matrix product through cuBLAS", mm)


@sl.op("zoo_gpu::softmax")
def softmax(x: M) -> M:
    """Return the softmax of each row of ``x``."""
    return torch.softmax(x, 1)


@softmax.kernel("cuda", workspace="n * itemsize")
def _(x, *, out, workspace):
    """Write the softmax of each row of ``x`` to ``out``. ``workspace`` holds the row maxima meanwhile."""
    if not x.numel():
        return
    top = workspace.view(x.dtype)[: x.shape[0], None]
    torch.amax(x, 1, keepdim=True, out=top)
    torch.sub(x, top, out=out)
    out.exp_().div_(out.sum(1, keepdim=True))


good("out-style kernel with a workspace", softmax)


@sl.op("zoo_gpu::update_", mutates=["table"])
def update_(table: M, x: M, alpha: float = 1.0) -> V:
    """Add ``alpha * x`` to ``table`` in place, and return the sum of each row of ``table``."""
    table.add_(x, alpha=alpha)
    return table.sum(1)


good("mutates an argument, captured", update_)


@sl.op("zoo_gpu::optional")
def optional(x: M, bias: Float[Tensor, "c"] | None = None) -> tuple[M, Float[Tensor, "c"]]:
    """Return ``2 * y`` and the sum of each column of ``y``. ``y`` is ``x + bias``, or ``x`` if ``bias`` is None."""
    y = x if bias is None else x + bias
    return y * 2, y.sum(0)


good("optional argument, two outputs", optional)


def _forks(x):
    """Return ``2 * x`` as the sum of ``x + 1``, computed on a second CUDA stream, and ``x - 1``."""
    here, there = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        y = x + 1
    z = x - 1
    here.wait_stream(there)
    out = y + z
    # The allocator must not reuse the memory of ``y`` before this stream has read it.
    y.record_stream(here)
    return out


good("forks to a second stream and joins", double("gpu_forks", _forks))


@sl.op("zoo_gpu::capacity")
def capacity(x: V) -> tuple[Int64[Tensor, "n"], Int64[Tensor, ""]]:
    """Return the positions of positive elements of ``x``, padded with -1 to the length of ``x``, and their number.
    Unlike those of ``nonzero``, the sizes of the results do not depend on data.
    """
    keep = x > 0
    place = torch.where(keep, keep.cumsum(0) - 1, x.shape[0])
    rows = torch.arange(x.shape[0], device=x.device)
    # All positions that are left out are written to one more place at the end.
    padded = torch.full((x.shape[0] + 1,), -1, device=x.device, dtype=torch.int64).scatter(0, place, rows)
    padded = torch.where(torch.arange(x.shape[0] + 1, device=x.device) < keep.sum(), padded, -1)
    return padded[:-1], keep.sum()


good("capacity form of a data-dependent output", capacity)

if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _scale_kernel(x, out, n, BLOCK: tl.constexpr):
        """Write ``2 * x`` to ``out`` for the block of ``BLOCK`` elements that belongs to this program. ``x`` has ``n``
        elements in all.
        """
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)

    def _triton(x):
        """Return ``2 * x`` as a new tensor, computed by a Triton kernel."""
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            # Triton launches its kernels on the current device.
            with torch.cuda.device(x.device):
                _scale_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out

    good("Triton kernel", double("gpu_triton", _triton, lambda x: x.new_empty(x.shape)))
