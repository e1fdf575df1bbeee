# ruff: noqa: E501 (a case a line)
"""Edits after which an argument only seems to be used, or a result is not what torch takes it for: each is refused."""

from pathlib import Path

import pytest

from shiplap_backend import BackendError
from shiplap_testing.effort import sampled
from tests.backend import described
from tests.backend.test_malformed import EXP, RELU, place

pytest.importorskip("openvino")

# ops, line, id, part of `got`
CASES = {
    "an operand and itself in order": (
        "  maximum.out: {template: binary, dtypes: ordered, graph: 'self if self >= self else other'}\n",
        1,
        "SL902",
        "'self' is compared or combined with itself",
    ),
    "a word that torch does not know": (
        "  gelu.out: {template: unary, dtypes: float, graph: \"Gelu(self, mode='TANH' if approximate == 'tahn' else 'ERF')\"}\n",
        1,
        "SL902",
        "'approximate' is one of none, tanh",
    ),
    "a word that torch does not know, in a guard": (
        "  div.out_mode: {template: binary, dtypes: float, guard: {\"rounding_mode == 'flor'\": m}, graph: Floor(self / other)}\n",
        1,
        "SL902",
        "'rounding_mode' is one of trunc, floor",
    ),
    "a comparison with NaN": (
        "  angle: {template: functional, dtypes: float, graph: 0.0 if self == nan else self, output: {result: {mode: bypass}}}\n",
        1,
        "SL902",
        "'self == nan' has one outcome",
    ),
    "a size divided by zero": (
        "  relu: {template: functional, dtypes: float, graph: Relu(self), output: {result: {mode: sizes, sizes: '[size(self, 0) / 0]'}}}\n",
        1,
        "SL902",
        "size(self, 0) / 0 divides by zero",
    ),
    "a matrix product of numbers": (
        "  add.out: {template: binary, graph: self + other * (alpha @ alpha)}\n",
        1,
        "SL902",
        "a product of 'alpha' and 'alpha', a number",
    ),
    "kept dims called redundant": (
        "  sum.IntList_out: {template: reduction, dtypes: float, graph: 'ReduceSum(self, axes(dim, self))', redundant: {keepdim: never asked for}, shape_only: [dtype]}\n",
        1,
        "SL901",
        "redundant: 'keepdim', which decides sizes or dtypes",
    ),
    "a binding named as a function that it calls": (
        "  exp.out: {template: unary, let: {Exp: Exp(self)}, graph: Exp}\n",
        1,
        "SL901",
        "let: 'Exp' is a function that it calls",
    ),
    "indices that are no integers": (
        "  index_select: {template: functional, dtypes: real, inputs: {index: f32}, graph: 'Gather(self, index, wrap(dim, self))', output: {result: {mode: sizes, sizes: 'resized(self, dim, numel(index))'}}}\n",
        1,
        "SL901",
        "inputs: index: 'f32'",
    ),
    "a mask of numbers": (
        "  masked_fill_.Scalar: {template: inplace, dtypes: real, inputs: {mask: i8}, graph: value if mask else self}\n",
        1,
        "SL901",
        "inputs: mask: 'i8'",
    ),
    "an empty text": (EXP + "    dtypes: ''\n", 4, "SL901", "dtypes: an empty text"),
    "a choice without a question": (
        "  add.out: {template: binary, graph: self + other if True else self + other * alpha}\n",
        1,
        "SL902",
        "'True' asks for no argument",
    ),
    "a choice between numbers": (
        "  add.out: {template: binary, graph: self + other if 1 < 2 else self + other * alpha}\n",
        1,
        "SL902",
        "'1 < 2' asks for no argument",
    ),
    "a condition that is always met": (
        "  add.out: {template: binary, graph: self + other if alpha == 1 or True else self + other * alpha}\n",
        1,
        "SL902",
        "'True' asks for no argument",
    ),
    "a condition that is never met": (
        "  add.out: {template: binary, graph: self + other * alpha if alpha == 1 and False else self + other}\n",
        1,
        "SL902",
        "'False' asks for no argument",
    ),
    "a choice of the same by values": (
        "  add.out: {template: binary, graph: self + other if other > alpha else self + other}\n",
        1,
        "SL902",
        "is the same either way",
    ),
    "zero by a value": (
        "  add.out: {template: binary, graph: self + other + 0 / alpha}\n",
        1,
        "SL902",
        "0 / alpha is the same for every value",
    ),
    "one to the power of a value": (
        "  add.out: {template: binary, graph: self + other * 1 ** alpha}\n",
        1,
        "SL902",
        "1 ** alpha is the same for every value",
    ),
    "a value and its negative": (
        "  add.out: {template: binary, graph: self + other + (alpha + -alpha)}\n",
        1,
        "SL902",
        "'alpha' and '-alpha' cancel",
    ),
    "a value times negative zero": (
        "  add.out: {template: binary, graph: self + other + alpha * -0}\n",
        1,
        "SL902",
        "is the same for every value",
    ),
    "a view": (
        "  transpose.int: {template: functional, graph: 'Transpose(self, [dim0, dim1])', output: {result: {mode: transpose}}}\n",
        1,
        "SL901",
        "transpose.int: the result is a view of an argument",
    ),
    "an element before the first": (
        "  topk.values: {template: structured, guard: {largest: l, sorted: s}, graph: {values: \"TopK(self, k, dim, 'MAX', 'NONE')[-1]\", indices: self}}\n",
        1,
        "SL902",
        "elements are counted from 0",
    ),
    "an output of an operation that has one": (
        "  cat.out: {template: structured, graph: 'Concat(tensors, dim)[7]'}\n",
        1,
        "SL902",
        "'Concat(tensors, dim)[7]': the last output is number 0",
    ),
    "an output behind the last": (
        "  glu.out: {template: structured, let: {halves: 'Split(self, dim, 2)'}, graph: 'halves[0] * halves[2]'}\n",
        1,
        "SL902",
        "'halves[2]': the last output is number 1",
    ),
    "an output of a helper that has one": (
        "  exp.out: {template: unary, graph: 'mean_of(self, [0])[0]'}\n",
        1,
        "SL902",
        "'mean_of(self, [0])' is a node and has no element",
    ),
    "a size that is negative": (
        RELU.replace("mode: bypass", "mode: sizes, sizes: '[-1]'"),
        1,
        "SL901",
        "sizes: -1 is negative",
    ),
    "a size that is negative for some": (
        RELU.replace("mode: bypass", "mode: sizes, sizes: '[rank(self)] if rank(self) > 1 else [2 - 3 * 1]'"),
        1,
        "SL901",
        "sizes: 2 - 3 * 1 is negative",
    ),
    "shapes by a kernel that only raises": (
        "  convolution_overrideable: {template: custom}\n  convolution_backward_overrideable:\n    template: functional\n    graph: {result0: '0.0', result1: '0.0', result2: '0.0'}\n    output: {result0: {mode: infer}, result1: {mode: infer}, result2: {mode: infer}}\n",
        2,
        "SL901",
        "output mode 'infer' of 'result0'",
    ),
    "an order without a dim": (
        RELU.replace("mode: bypass", "mode: bypass, order: [0, 2]"),
        4,
        "SL901",
        "output: result: order [0, 2]",
    ),
    "an order with a dim twice": (
        RELU.replace("mode: bypass", "mode: bypass, order: [1, 1, 0]"),
        4,
        "SL901",
        "output: result: order [1, 1, 0]",
    ),
    "an order that a mode does not read": (
        RELU.replace("mode: bypass", "mode: infer, order: [1, 0]"),
        4,
        "SL901",
        "'order', which mode 'infer' does not read",
    ),
    "a result that is made in every case": (
        RELU.replace("mode: bypass", "mode: bypass, when: rank(self) == 0 or rank(self) > 0"),
        1,
        "SL901",
        "when: 'rank(self) == 0 or rank(self) > 0' always holds",
    ),
    "a guard that always holds": (
        EXP + "    guard: {not is_float(self) or is_float(self): dtype}\n",
        1,
        "SL901",
        "guard: 'not is_float(self) or is_float(self)' always holds",
    ),
    "a question and its opposite": (
        EXP + "    guard: {is_float(self) and not is_float(self): dtype}\n",
        1,
        "SL901",
        "guard: 'is_float(self)' and 'not is_float(self)'",
    ),
    "a dim called redundant": (
        "  sum.IntList_out: {template: reduction, dtypes: float, graph: 'ReduceSum(self, [])', redundant: {dim: all}, shape_only: [keepdim, dtype]}\n",
        1,
        "SL901",
        "redundant: 'dim', which no other argument decides",
    ),
    "an operand that is not promoted": (
        EXP + "    inputs: {self: raw}\n",
        1,
        "SL901",
        "inputs: self: 'raw' of an elementwise overload",
    ),
    "a result that is always made": (
        RELU.replace("mode: bypass", "mode: bypass, when: 'True'"),
        1,
        "SL901",
        "when: 'True' asks for no argument",
    ),
}


@pytest.mark.parametrize("name", sampled(CASES, len(CASES) // 2))
def test_it_is_refused(tmp_path: Path, name: str) -> None:
    ops, number, id, got = CASES[name]
    with pytest.raises(BackendError) as caught:
        described.made(tmp_path, ops)
    assert (caught.value.id, *place(caught.value)) == (id, str(tmp_path / "ops.yaml"), described.line(number))
    assert got in caught.value.got


def test_what_depends_on_its_arguments_is_accepted(tmp_path: Path) -> None:
    text = "  add.out: {template: binary, graph: self + other * alpha if alpha > 0 and alpha != 1 else self + other + (alpha - 1) * other}\n"
    assert len(described.made(tmp_path, text).wrappers) == 1
