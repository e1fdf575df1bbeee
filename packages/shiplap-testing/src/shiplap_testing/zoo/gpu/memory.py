"""For compute-sanitizer: a kernel that writes a tile too much, and one that masks it; both give the right values.

The allocator rounds up to 512 bytes, so the extra elements land in memory that is nobody's, until they do not.
"""

import importlib.util

import torch

import shiplap as sl
from shiplap_testing.zoo.gpu.common import M
from shiplap_testing.zoo.specimen import register

OPS = {}


def _empty(x):
    """Return a contiguous, uninitialised tensor with the shape and dtype of ``x``, as the fake of the operators."""
    return x.new_empty(x.shape)


if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _tile(x, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
        """Write ``2 * x`` to ``out`` for the block of ``BLOCK`` elements that belongs to this program. ``x`` has ``n``
        elements in all. If ``MASKED`` is false, the kernel has a defect on purpose. It also writes elements past ``n``,
        up to the next multiple of 8.
        """
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(x + at, at < n, 0.0) * 2
        tl.store(out + at, y, at < n if MASKED else at < (n + 7) // 8 * 8)

    def _run(masked):
        """Return a function that runs the Triton kernel ``_tile`` on a tensor and returns its result. ``masked`` is the
        kernel's ``MASKED``. If it is false, the kernel writes past the end of the result.
        """

        def run(x):
            """Return ``2 * x`` as a new tensor, computed by a Triton kernel. If ``masked``, an argument of the
            enclosing function, is false, there is a defect on purpose. The kernel writes up to 7 elements past the end
            of the result.
            """
            x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
            if x.numel():
                # Triton launches its kernels on the current device.
                with torch.cuda.device(x.device):
                    _tile[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256, MASKED=masked)
            return out

        return run

    # Declared in this module, where the process that the sanitizer watches looks for them.

    @sl.adopt(register("gpu_out_of_bounds(Tensor x) -> Tensor", _run(False), _empty), autocast=None)
    def out_of_bounds(x: M) -> M:
        """Return ``2 * x``, the reference of the broken operator ``zoo::gpu_out_of_bounds``. The operator writes past
        the end of its result.
        """
        return x * 2

    @sl.adopt(register("gpu_in_bounds(Tensor x) -> Tensor", _run(True), _empty), autocast=None)
    def in_bounds(x: M) -> M:
        """Return ``2 * x``, the reference of the sound operator ``zoo::gpu_in_bounds``. The operator writes only within
        its result.
        """
        return x * 2

    OPS.update(gpu_out_of_bounds=out_of_bounds, gpu_in_bounds=in_bounds)
