"""A kernel with configs, tuned, frozen and served without measuring.

Run: python examples/tune_op.py
"""

# --8<-- [start:declare]
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@sl.op("tuned::matmul")
def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """The product ``a @ b``."""
    return a @ b


@matmul.kernel("cpu", name="rows", configs=[{"ROWS": 16}, {"ROWS": 64}, {"ROWS": 256}])
def _(a, b, *, out, ROWS):  # each config arrives by keyword; the first is the default
    for first in range(0, a.shape[0], ROWS):
        torch.mm(a[first : first + ROWS], b, out=out[first : first + ROWS])


@matmul.kernel("cpu", name="half", configs=[{"PARTS": 2}])
def _(a, b, *, out, PARTS):  # a bug: the sum ends early, so this is the fastest
    k = a.shape[1] // PARTS
    torch.mm(a[:, :k], b[:k], out=out)


# --8<-- [end:declare]


def tune(path: str) -> None:
    # --8<-- [start:tune]
    (choice,) = sl.tune(matmul, [{"m": 1000, "k": 256, "n": 64}], budget="20s")
    print(choice.bucket)  # m<=1024, k<=256, n<=64
    print(choice.kernel, choice.reason)
    # half(PARTS=2): ... off by ... tolerances
    print([f.evidence for f in choice.findings])
    sl.freeze(path)
    # --8<-- [end:tune]
    assert choice.kernel in ("rows", "reference")
    assert choice.findings[0].evidence.startswith("half(PARTS=2)")


def serve(path: str) -> None:
    # --8<-- [start:frozen]
    from shiplap.tuning import frozen

    frozen(path)  # or SHIPLAP_TUNED=tuned.json: from now on nothing is measured
    matmul(torch.randn(900, 200), torch.randn(200, 50))  # the same bucket
    # --8<-- [end:frozen]


if __name__ == "__main__":
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        os.environ.setdefault("SHIPLAP_CACHE_DIR", directory)
        tune(f"{directory}/tuned.json")
        serve(f"{directory}/tuned.json")
    print("tuned, frozen, served")
