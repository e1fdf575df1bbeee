"""Weights in cuSPARSELt's own format: made at load, for the present device and version, and never stored."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_slidesparse.lt import libraries, native
from shiplap_slidesparse.lt.native import RESULT

__all__ = ["compress_weight", "expand_weight", "multiply_weight", "scaled_product"]

ROWS = 2048  # of an identity matrix at a time


def compress_weight(slid: Tensor) -> Tensor:
    """Return a 2:4 weight ``[n, k']`` on a GPU in cuSPARSELt's own packed format, as a uint8 vector. Both sizes must be
    multiples of 32.

    An empty weight has no bytes. Raise ``SL211`` for another dtype or size, ``SL401`` without a usable cuSPARSELt, and
    ``SL305`` if the library refuses the weight.
    """
    where = "slidesparse.lt.compress"
    n, k = slid.shape
    if slid.dtype not in RESULT or n % 32 or k % 32:
        raise error(
            "SL211",
            where=where,
            got=f"{slid.dtype} {n} x {k}",
            fix="pass what slide() returned",
            expected="int8, float8_e4m3fn, bfloat16 or float16, sizes that are multiples of 32",
        )
    libraries.require_sparse(slid.device, where)
    if not slid.numel():
        return slid.new_empty(0, dtype=torch.uint8)
    slid = slid.contiguous()
    problem = _product_problem(slid.device, 16, n, k, slid.dtype)
    with torch.cuda.device(slid.device):
        stream = torch.cuda.current_stream().cuda_stream
        try:
            size, scratch_size = native.compressed_size(problem)
            packed = slid.new_zeros(size, dtype=torch.uint8)
            scratch = slid.new_empty(max(scratch_size, 16), dtype=torch.uint8)
            native.compress_at(problem, slid.data_ptr(), packed.data_ptr(), scratch.data_ptr(), stream)
        except native.LibraryRefusal as e:
            raise error("SL305", where=where, got=str(e), expected="a compressed weight") from None
    return packed


def multiply_weight(
    x: Tensor, weight: Tensor, n: int, result: torch.dtype, *, sparse: bool, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return ``x [m, k]`` times the transpose of a weight with ``n`` rows, in the dtype ``result``. If ``sparse`` is
    true, ``weight`` was packed by cuSPARSELt. Otherwise it is a row-major matrix. ``m`` must be a multiple of 16, and
    ``n`` and ``k`` of 32.

    This function has cases that the ops lack. It gives other dtypes of results, and multiplies FP8 with one scale for
    all of ``x`` and one for all of a row-major weight. ``scales`` holds these two as float32 tensors of one element.
    Raise ``SL211`` for operands that do not fit, and ``SL305`` if the library refuses.
    """
    problem = _product_problem(x.device, x.shape[0], n, x.shape[1], x.dtype).with_fields(result=result)
    if scales is None:
        return _run_product(problem, sparse, x, weight, (0, 0))
    places = scales[0].data_ptr(), scales[1].data_ptr()
    return _run_product(problem.with_fields(scaling=native.PER_TENSOR), sparse, x, weight, places)


def scaled_product(x: Tensor, packed: Tensor, scale: Tensor, result: torch.dtype) -> Tensor:
    """Return ``x [m, k]`` times the transpose of a packed weight, times the float32 ``scale`` of each weight row, in
    the dtype ``result``.

    cuSPARSELt applies the scales if :func:`libraries.supports_product` allows it. Otherwise PyTorch applies them to the
    product in int32 or float32. Either way the result is rounded once.
    """
    n, scale = len(scale), scale.contiguous()
    # One kernel instead of two, and no intermediate result in memory.
    if libraries.supports_product(x.device, x.dtype, result, native.PER_ROW) is True:
        problem = _product_problem(x.device, x.shape[0], n, x.shape[1], x.dtype).with_fields(
            result=result, scaling=native.PER_ROW
        )
        return _run_product(problem, True, x, packed, (0, scale.data_ptr()))
    wide = torch.int32 if x.dtype == torch.int8 else torch.float32
    return (multiply_weight(x, packed, n, wide, sparse=True) * scale).to(result)


def _run_product(
    problem: native.ProductProblem, sparse: bool, x: Tensor, weight: Tensor, scales: tuple[int, int]
) -> Tensor:
    """Return the product of ``problem``, computed by the library. Operands that are not aligned are copied first.
    ``sparse`` is true for a compressed ``weight``, and false for a row-major one. ``scales`` holds the addresses of the
    scales of ``x`` and ``weight``, or 0 for none. Raise ``SL211`` for operands that do not fit, and ``SL305`` if the
    library refuses.
    """
    where, x, weight = "slidesparse.lt.product", _align_operand(x), _align_operand(weight)
    _check_operands(where, problem, sparse, x, weight)
    out = torch.empty(problem.m, problem.n, dtype=problem.result, device=x.device)
    # The libraries refuse empty products.
    if not out.numel() or not problem.k:
        return out.zero_()
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        try:
            plan = native.prepare_plan(problem, sparse, stream)
            if weight.numel() < plan.compressed:  # 0 of a dense one
                raise error(
                    "SL211",
                    where=where,
                    got=f"{weight.numel()} bytes",
                    fix="pack the weight anew",
                    expected=f"those of {problem.n} rows of {problem.k} {x.dtype}",
                )
            scratch = torch.empty(plan.workspace, dtype=torch.uint8, device=x.device)
            native.multiply_at(
                problem,
                sparse,
                x.data_ptr(),
                weight.data_ptr(),
                scales,
                out.data_ptr(),
                (scratch.data_ptr(), plan.workspace),
                stream,
            )
        except native.LibraryRefusal as e:
            raise error("SL305", where=where, got=str(e), expected="a product") from None
    return out


def _check_operands(where: str, p: native.ProductProblem, sparse: bool, x: Tensor, weight: Tensor) -> None:
    """Raise ``SL211`` for operands that the library would read beyond their end, or from a wrong device. An invalid
    access on a GPU would end the CUDA context of the process. ``sparse`` is true for a compressed ``weight``, and false
    for a row-major one. ``where`` names the caller in the error.
    """
    wanted = (torch.uint8, weight.shape[:1]) if sparse else (p.source, (p.n, p.k))
    fits = (weight.dtype, tuple(weight.shape)) == (wanted[0], tuple(wanted[1])) and weight.device == x.device
    if p.m % 16 or p.n % 32 or p.k % 32 or not fits:
        raise error(
            "SL211",
            where=where,
            got=f"x {tuple(x.shape)} of {x.dtype} on {x.device}, weight "
            f"{tuple(weight.shape)} of {weight.dtype} on {weight.device}, {p.n} rows",
            expected="m of 16, n and k of 32, and a weight that has them",
            fix="pad the tensors to these multiples",
        )


def _align_operand(t: Tensor) -> Tensor:
    """Return ``t`` if it is contiguous and its address is a multiple of 16 bytes. Otherwise return a copy for which
    both hold. Views may need the copy, since they can begin at any element.
    """
    t = t.contiguous()
    # Plans are made for addresses that are multiples of 16 bytes.
    return t.clone() if t.data_ptr() & 15 else t


def expand_weight(packed: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[n, k]`` from ``packed``, which is in cuSPARSELt's format. It is computed as the product with
    an identity matrix, ``ROWS`` columns at a time.
    """
    libraries.require_sparse(packed.device, "slidesparse.lt.expand")
    weight = torch.empty(n, k, dtype=dtype, device=packed.device)
    for start in range(0, k, ROWS):
        rows = min(ROWS, k - start)
        # ``torch.eye`` has no float8, so the identity is cast afterwards.
        eye = torch.eye(k, rows, device=packed.device, dtype=torch.float16).roll(start, 0).t()
        columns = multiply_weight(eye.to(dtype).contiguous(), packed, n, RESULT[dtype], sparse=True)
        weight[:, start : start + rows] = columns.t().to(dtype)
    return weight


def _product_problem(device: torch.device, m: int, n: int, k: int, dtype: torch.dtype) -> native.ProductProblem:
    """Return the description of the library's product of ``[m, k]`` and ``[n, k]`` of ``dtype`` on ``device``. The
    dtype of the result is ``RESULT[dtype]``.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    return native.ProductProblem(index, m, n, k, dtype, RESULT[dtype])
