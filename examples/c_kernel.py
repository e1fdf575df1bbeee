"""An op whose kernel is a C function: python examples/c_kernel.py

A recurrence is a slow Python loop in PyTorch, and two lines of C. The header that the C
file includes is generated from the declaration, so the two cannot disagree: a library
built for another declaration is refused.
"""

# --8<-- [start:declare]
from pathlib import Path

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "build" / "libc_kernel.so"


@sl.op("c_kernel::smooth")
def smooth(x: Float32[Tensor, "n t"], decay: float = 0.5) -> Float32[Tensor, "n t"]:
    """Leaky sum along each row: ``out[:, i] = decay * out[:, i - 1] + x[:, i]``, kept
    in float64."""
    level, out = x.new_zeros(x.shape[0], dtype=torch.float64), torch.empty_like(x)
    for i in range(x.shape[1]):
        level = decay * level + x[:, i]
        out[:, i] = level
    return out


smooth.kernel("cpu", sl.cabi(LIBRARY, "smooth"))  # opened at the first call
# --8<-- [end:declare]


# --8<-- [start:backward]
@smooth.backward
def _(grad, saved, needs):
    # the same recurrence, from the other end
    return {"x": smooth(grad.flip(1), saved.decay).flip(1)}


# --8<-- [end:backward]


def build() -> None:
    """What a Makefile would do: generate the header, compile the library."""
    import subprocess
    import sys

    def run(*command: str) -> str:
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        ).stdout

    LIBRARY.parent.mkdir(exist_ok=True)
    shiplap = (sys.executable, "-m", "shiplap.cli")
    run(*shiplap, "header", "examples/c_kernel.py", "-o", "examples/build/c_kernel.h")
    include = run(*shiplap, "header", "--include").strip()
    run(
        "cc",
        "-O2",
        "-shared",
        "-fPIC",
        f"-I{include}",
        "-Iexamples/build",
        "examples/c_kernel.c",
        "-o",
        str(LIBRARY),
    )


def main() -> None:
    x = torch.randn(32, 500, requires_grad=True)
    compiled = torch.compile(lambda x: smooth(x, 0.9).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(x), smooth.reference(x, 0.9).relu())
    compiled(x).sum().backward()
    print("the C kernel agrees with the reference, eager and compiled")


if __name__ == "__main__":
    build()
    main()
