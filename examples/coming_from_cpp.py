"""Functions that C++ registers, by TORCH_LIBRARY and pybind11, and their declarations.

Run it with: python examples/coming_from_cpp.py. It needs a C++ compiler and ninja, as
torch.utils.cpp_extension does.
"""

from pathlib import Path

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.utils.cpp_extension import load

import shiplap as sl

extension = load("coming_from_ext", [str(Path(__file__).with_suffix(".cpp"))])


@sl.adopt("before_cpp::doubled", into="taken_cpp::doubled")
def doubled_taken(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x * 2


@sl.adopt(extension.doubled, into="taken_cpp::doubled_pybind", devices="cpu")
def doubled_pybind_taken(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x * 2


def refusal(op, x: Tensor) -> str:
    """Return the id of the error with which the op refuses x."""
    try:
        op(x)
    except sl.ShiplapError as e:
        return e.id
    return ""


def main() -> None:
    from coming_from import doubled  # the declaration that replaces both

    doubled.build()
    x = torch.randn(5)
    before = (torch.ops.before_cpp.doubled, extension.doubled)
    for call in (*before, doubled, doubled_taken, doubled_pybind_taken):
        torch.testing.assert_close(call(x), 2 * x)
    for op in (doubled, doubled_taken, doubled_pybind_taken):
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), 2 * x)
        # each checks its arguments before any kernel runs
        assert refusal(op, x.double()) == "SL204"
    print(doubled_pybind_taken.adoption)
    print("the forms in C++ and their declarations compute the same")


if __name__ == "__main__":
    main()
