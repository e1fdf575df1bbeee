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
    """Add the broken op ``op`` to ``BAD`` under ``name``. ``checks`` are the names of the audit's checks that must fail
    on it, by default only ``cuda_graph``. They must fail with a finding that contains ``says``.
    """
    BAD.append(Specimen(name, op, frozenset(checks or ("cuda_graph",))))
    EVIDENCE[name] = says


def double(name, real, fake=torch.empty_like):
    """Register the operator ``zoo::<name>`` with the implementation ``real`` and the fake ``fake``, and return the op
    that ``sl.adopt`` makes of it. The op's reference returns ``2 * x``.
    """

    @sl.adopt(register(f"{name}(Tensor x) -> Tensor", real, fake), autocast=None)
    def op(x: M) -> M:
        """Return ``2 * x``, as the reference of the op. Results of the operator are compared with it."""
        return x * 2

    return op


def cudart():
    """Return the CUDA runtime library that torch uses, as a ``ctypes.CDLL``."""
    # The library that torch has loaded already: another version would have a state of its own.
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


def checked(status):
    """Raise ``RuntimeError`` if ``status``, the result of a function of the CUDA runtime, is not zero."""
    if status:
        raise RuntimeError(f"the CUDA runtime says {status}")


def stream_of(x):
    """Return the current CUDA stream of the device of ``x``, as a ``ctypes.c_void_p``."""
    return ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)


def good(name, op):
    """Add the sound op ``op`` to ``GOOD`` under ``name``, and return it. No check of the audit may fail on it."""
    GOOD.append(Specimen(name, op))
    return op
