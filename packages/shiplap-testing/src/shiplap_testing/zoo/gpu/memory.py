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
    """Return a contiguous, uninitialised tensor with the shape and dtype of ``x``. This is the fake of the
    operators.
    """
    return x.new_empty(x.shape)


if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _tile(x, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
        """Write ``2 * x`` to ``out`` for a block of ``BLOCK`` elements, of which there are ``n`` in all. If ``MASKED``
        is true, there is no defect. If it is false, there is one on purpose: elements up to the next multiple of 8 are
        written too.
        """
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(x + at, at < n, 0.0) * 2
        tl.store(out + at, y, at < n if MASKED else at < (n + 7) // 8 * 8)

    def _run(masked):
        """Return a function that launches the Triton kernel ``_tile`` over all elements of a tensor, with ``MASKED``
        set to ``masked``.
        """

        def run(x):
            """Return ``2 * x``, computed by the Triton kernel. If ``masked`` (argument of ``_run``) is true, there is
            no defect. If it is false, there is one on purpose: up to 7 elements past the end of the result are written.
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
        """Return ``2 * x``. The broken operator writes past the end of its result."""
        return x * 2

    @sl.adopt(register("gpu_in_bounds(Tensor x) -> Tensor", _run(True), _empty), autocast=None)
    def in_bounds(x: M) -> M:
        """Return ``2 * x``. The sound operator writes only within its result."""
        return x * 2

    OPS.update(gpu_out_of_bounds=out_of_bounds, gpu_in_bounds=in_bounds)
