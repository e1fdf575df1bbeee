"""The low-level ops of sparse3d on the audit's samples: a kernel beside the reference, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.sampling.case import SampleCase, tree_map
from shiplap.sampling.run import op_effects
from shiplap.sampling.samples import Samples

OPS = (
    "hash_insert",
    "hash_lookup",
    "hash_insert_3d",
    "hash_insert_3d_index",
    "hash_lookup_3d",
    "z_order_encode",
    "z_order_decode",
    "hilbert_encode",
    "hilbert_decode",
    "nearest_map",
    "trilinear_map",
    "indice_weighted_sum",
    "indice_weighted_sum_grad",
    "masked_gemm_signals",
    "masked_gemm_kernels",
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def cases(op: sl.Op, seed: int, device: str) -> Iterator[SampleCase]:
    samples = Samples(op, seed, device)
    yield from chain(samples.edges(), samples.scalars(), samples.dtypes(), samples.layouts(), samples.grown(2))


def disagreements(
    name: str, seed: int, device: str = "cpu", without: tuple[torch.dtype, ...] = (), step: int = 1
) -> list[str]:
    """Labels of the samples on which the kernel for CUDA and the reference differ.

    Of ``step`` samples one is tried; the seed decides which. At least twenty are tried, or as large a share of twenty.
    """
    op, differing, tried = getattr(sparse3d, name), [], 0
    (kernel,) = (k for k in op.kernels["cuda"] if k.name == "triton")
    for case in islice(cases(op, seed, device), seed % step, None, step):
        args, plain = case.fresh(), tree_map(torch.Tensor.contiguous, case.fresh())
        if any(isinstance(a, torch.Tensor) and a.dtype in without for a in args):
            continue
        got = op_effects(op, args, kernel.run_call(op.bind(args)))
        outs = op.reference(*plain)
        outs = outs if isinstance(outs, tuple) else (outs,) if outs is not None else ()
        same = (agree(g, w) for g, w in zip(got, op_effects(op, plain, outs), strict=True))
        differing += [] if all(same) else [case.label]
        tried += 1
    assert tried >= 20 // step
    return differing


def agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not got.is_floating_point():
        return torch.equal(got, want)
    tolerance = TOLERANCE[got.dtype]
    return torch.allclose(got.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
