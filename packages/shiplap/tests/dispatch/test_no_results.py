"""An op that writes and returns nothing happens once, in compiled code too."""

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kernel", [False, True])
def test_it_happens_once_in_code_of_inductor(ns, kernel):
    @sl.op(f"{ns}::bump", mutates=("ps", "q"))
    def bump(ps: list[Float32[Tensor, "_ _"]], q: Float32[Tensor, "n"]) -> None:
        for p in ps:
            p.add_(1)
        q.add_(2)

    if kernel:
        bump.kernel("cpu", bump.reference)

    def twice(x, y, q):
        bump([x, y], q)
        return x * 2 + q.sum()

    compiled = torch.compile(twice, fullgraph=True)
    args = torch.zeros(2, 2), torch.ones(3, 1), torch.zeros(4)
    for call in (1, 2):
        result = compiled(*args)
        assert [float(t.flatten()[0]) for t in args] == [call, 1 + call, 2 * call]
        assert float(result[0, 0]) == 2 * call + 8 * call
