"""A function whose result a graph takes as a constant is marked as torch marks it."""

import torch

from shiplap.torch_private.dynamo import constant_result


def test_the_mark_is_that_of_torch() -> None:
    calls = []

    def count(x: object) -> int:
        calls.append(x)
        return len(calls)

    @constant_result
    def marked() -> int:
        return count("marked")

    @torch.compiler.assume_constant_result
    def of_torch() -> int:
        return count("of torch")

    assert vars(marked) == vars(of_torch)
    compiled = torch.compile(lambda x: x + marked(), fullgraph=True, backend="eager")
    assert [compiled(torch.zeros(1)).item() for _ in range(3)] == [1.0, 1.0, 1.0]
