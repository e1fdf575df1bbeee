"""Which values an argument takes as a number: those of Python, NumPy and tensors that fit in 64 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from shiplap.declare.annotation import read_argument
from shiplap.declare.value_kinds import kind_mismatch

MOST, LEAST = 2**63 - 1, -(2**63)
INTS = [3, True, MOST, LEAST, np.int64(MOST), np.uint64(MOST), torch.tensor(3)]
FLOATS = [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])]
BEYOND = [MOST + 1, LEAST - 1]
NO_NUMBERS = ["3", b"3", None, [], torch.tensor(3j), np.zeros(2)]


@pytest.mark.parametrize(
    ("annotation", "takes", "refuses"),
    [
        (int, [*INTS, torch.tensor(3.0)], [0.5, np.float32(3), *BEYOND, *NO_NUMBERS, torch.tensor([3]), 1j]),
        (float, [*INTS, *FLOATS, *BEYOND], [10**400, *NO_NUMBERS, torch.ones(2), 1j]),
        (complex, [*INTS, *FLOATS, *BEYOND, 1j], [10**400, *NO_NUMBERS]),
        (
            int | float,
            [3, True, MOST, LEAST, 0.5, np.float64(0.5), *BEYOND, 1j],
            [10**400, *NO_NUMBERS, np.int64(3), np.float32(0.5), np.complex128(1j), torch.tensor(3), torch.tensor(0.5)],
        ),
        (bool, [True, False], [1, 0.0, np.bool_(True), *NO_NUMBERS]),
        (str, ["", "é"], ["\ud800", 1, b"a", None]),
        (Float[Tensor, "n"], [torch.ones(1)], [1.0, None, [torch.ones(1)], np.ones(1)]),
    ],
    ids=["int", "float", "complex", "Scalar", "bool", "str", "tensor"],
)
def test_the_values_that_an_argument_takes(
    annotation: object, takes: Sequence[object], refuses: Sequence[object]
) -> None:
    arg = read_argument("k", annotation, "demo::f")
    assert [value for value in takes if kind_mismatch(arg, value)] == []
    assert [value for value in refuses if not kind_mismatch(arg, value)] == []


def test_the_words_for_a_value_that_does_not_fit() -> None:
    arg, listed = read_argument("k", int, "demo::f"), read_argument("k", list[int], "demo::f")
    pair = read_argument("k", tuple[int, int], "demo::f")
    assert kind_mismatch(arg, MOST + 1) == "int beyond 64 bits"
    assert kind_mismatch(listed, [1, MOST + 1]) == "int beyond 64 bits in a list"
    assert kind_mismatch(listed, (1, 0.5)) == "float in a tuple"
    assert kind_mismatch(listed, 1) == "int"
    assert [kind_mismatch(pair, (1,) * n) for n in (1, 2, 3)] == ["tuple of 1", "", "tuple of 3"]
