"""The zoo of CUDA graphs: ops that are right when called, and wrong, or impossible, when captured and replayed.

Written as kernel libraries write them, with torch's own kernels in the place of theirs. Importing needs no GPU.
Numbers are those of the table in docs/audit.md.
"""

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.zoo.specimen import Specimen, register

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
BAD: list[Specimen] = []
GOOD: list[Specimen] = []
EVIDENCE: dict[str, str] = {}  # name → what the finding says
TWO_DEVICES = {"output on the current device"}


def bad(name, op, says, *checks):
    BAD.append(Specimen(name, op, frozenset(checks or ("cuda_graph",))))
    EVIDENCE[name] = says


def double(name, real, fake=torch.empty_like):
    """The op ``zoo::<name>`` that should be ``x * 2``, adopted."""

    @sl.adopt(register(f"{name}(Tensor x) -> Tensor", real, fake), autocast=None)
    def op(x: M) -> M:
        return x * 2

    return op


def cudart():
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


def checked(status):
    if status:
        raise RuntimeError(f"the CUDA runtime says {status}")


def stream_of(x):
    return ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)


def good(name, op):
    GOOD.append(Specimen(name, op))
    return op
