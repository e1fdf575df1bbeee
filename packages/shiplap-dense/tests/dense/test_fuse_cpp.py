"""The shipped C++ templates among their neighbours: what is fused, that it is right, and that the floor takes the rest.

Compilations are what costs: sources that were compiled are found again by their content, graphs are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import shiplap_dense as dense
from shiplap.inductor import fusion_choices, switches
from shiplap_dense import ops
from shiplap_testing.forked import python
from shiplap_testing.fused import check, counted, same

pytestmark = pytest.mark.usefixtures("fresh_graphs")

gelu, relu = torch.nn.functional.gelu, torch.relu
M, K, N = 70, 40, 67  # ragged in every direction


def weights(n: int = N, k: int = K, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    w = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return w, (torch.rand(n) / 127).to(dtype), torch.randn(n).to(dtype)


MATRIX: dict[str, tuple[Callable[..., Any], int]] = {  # what follows y, and how many of its kernels are fused
    "bias and gelu": (lambda y, b: gelu(y + b), 1),
    "raw kept": (lambda y, b: (y, gelu(y + b)), 1),
    "siblings": (lambda y, b: (gelu(y + b), relu(y) - 1), 2),
    "raw and siblings": (lambda y, b: (y, gelu(y + b), relu(y) - 1), 2),
    "reshaped": (lambda y, b: gelu(y.view(2, -1, y.shape[1]) + b), 1),
    "raw and reshaped": (lambda y, b: (y, gelu(y.view(2, -1, y.shape[1]) + b)), 1),
    "cast": (lambda y, b: (y * 2).to(torch.float64), 1),
    "transposed": (lambda y, b: (y + b).t().contiguous(), 0),
    "reduction after": (lambda y, b: (y + b).sum(1), 0),
    "mixed with its sum": (lambda y, b: y + y.sum(), 0),
    "nothing": (lambda y, b: y, 0),
}


DYNAMIC = ("raw and siblings", "raw and reshaped", "cast")


@pytest.mark.long
@pytest.mark.parametrize(
    ("dynamic", "name"),
    [
        *(pytest.param(False, name, marks=pytest.mark.long) for name in MATRIX),
        *(
            pytest.param(True, name, marks=pytest.mark.long)
            for name in ("raw and siblings", "raw and reshaped", "cast")
        ),
        (True, "bias and gelu"),
    ],
)
def test_epilogues_of_the_int8_product(dynamic, name):
    after, fused = MATRIX[name]
    fused *= not (dynamic and "reshaped" in name)  # symbolic sizes: Inductor cannot tell that places are the same

    def graph(x, w, s, b, c):
        return after(dense.matmul_int8(x, w, s, b), c)

    compiled = check(graph, torch.randn(M, K), *weights(), torch.randn(N), dynamic=dynamic)
    assert counted() == (1, fused)
    assert fusion_choices("dense::int8_mm")[-1].chosen.startswith("int8_panels(")
    if dynamic:  # the same code for other sizes, whole tiles among them
        for m, n, k in [(4, 130, 300), (192, 64, 256), (194, 128, 7)]:
            same(compiled, graph, (torch.randn(m, k), *weights(n, k), torch.randn(n)), 2e-6)
        assert counted() == (1, fused)


@pytest.mark.long
def test_few_rows_views_and_offsets():
    def graph(x, wide, w, s, b):
        few = dense.matmul_int8(x[:3], w, s, b)
        shifted = dense.matmul_int8(wide[5:8, 1 : K + 1], w, s)  # a view that starts inside its buffer
        return gelu(few), relu(shifted)

    check(graph, torch.randn(K, K), torch.randn(9, 2 * K), *weights())
    assert counted() == (2, 2)
    assert {d.chosen.split("(")[0] for d in fusion_choices("dense::int8_mm")[-2:]} == {"int8_rows"}


@pytest.mark.long
def test_bfloat16():
    def graph(x, w, s, b):
        return gelu(dense.matmul_int8(x, w, s, b)), relu(dense.matmul(x, w.t().to(x.dtype), b))

    check(graph, torch.randn(M, K).bfloat16(), *weights(dtype=torch.bfloat16), tolerance=8e-3)
    assert counted() == (2, 2)


@pytest.mark.long
def test_products_with_any_strides():
    def graph(a, b, bias, batch_a, batch_b):
        return (
            relu(dense.matmul(a[3:, 1:], b[1:, ::2], bias[::2])),
            dense.matmul(b.t(), a.t()) + 1,
            gelu(dense.matmul(batch_a, batch_b.mT)),
        )

    batched = torch.randn(3, 20, K), torch.randn(3, N, K)
    check(graph, torch.randn(M, K), torch.randn(K, N), torch.randn(N), *batched)
    assert counted() == (3, 3)


def channels_last(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


def convolution(x, w, b):
    return relu(dense.conv2d(x, w, b, 2, 1))


def test_a_convolution():
    check(convolution, channels_last(2, 20, 9, 8), channels_last(70, 20, 3, 3), torch.randn(70))
    assert counted() == (1, 1)


@pytest.mark.long
def test_convolutions():
    def graph(x, w, b, y, c):
        cut = dense.conv2d(y[:, :16], w[:, :16], c, 1, (2, 0), (2, 1))  # channels cut out: taps are not side by side
        return convolution(x, w, b), (cut, relu(cut))

    x, y = channels_last(2, 20, 9, 8), channels_last(2, 20, 9, 8)
    check(graph, x, channels_last(70, 20, 3, 3), torch.randn(70), y, torch.randn(70))
    assert counted() == (2, 2)


@pytest.mark.long
def test_convolutions_of_any_size():
    """With symbolic sizes Inductor cannot tell that an epilogue writes where it reads: a kernel of its own follows."""
    w, b = channels_last(70, 20, 3, 3), torch.randn(70)
    compiled = check(convolution, channels_last(2, 20, 9, 8), w, b, dynamic=True)
    same(compiled, convolution, (channels_last(3, 20, 17, 5), w, b), 2e-6)
    assert counted() == (1, 0)


def test_what_a_template_does_not_take_is_the_reference():
    def graph(x, w, s, empty):
        return gelu(dense.matmul_int8(x, w, s)), gelu(dense.matmul(empty, x))

    w, s, _ = weights(dtype=torch.float64)
    check(graph, torch.randn(M, K, dtype=torch.float64), w, s, torch.empty(0, M, dtype=torch.float64))
    made = fusion_choices("dense::int8_mm")[-1]
    assert (made.chosen, made.reason) == ("reference", "no template takes this call")
    assert {v.detail for v in made.verdicts} == {"more than 8 rows", "torch.float64 is neither float32 nor bfloat16"}
    check(lambda a, b: dense.matmul(a, b) + 1, torch.empty(0, K), torch.randn(K, N))
    assert {v.detail for v in fusion_choices("dense::mm")[-1].verdicts} == {"an empty size"}
    assert counted() == (0, 0)


@pytest.mark.long  # of another template: tests/inductor/test_lower.py
def test_switches_are_controls():
    args = torch.randn(M, K), *weights()
    for fusion, expected in [(True, (1, 1)), (False, (1, 0))]:
        counters.clear()
        torch.compiler.reset()
        with switches(ops.int8_mm, fusion=fusion):
            check(lambda x, w, s, b: gelu(dense.matmul_int8(x, w, s, b)), *args)
        assert counted() == expected


@pytest.mark.long
def test_training_graphs():
    def loss(x, w, s, b):
        return gelu(dense.matmul_int8(x, w, s, b)).square().sum()

    (w, s, bias), gradients = weights(), []
    leaves = torch.randn(M, K), bias
    for fn in (loss, torch.compile(loss, fullgraph=True)):
        x, b = (t.clone().requires_grad_() for t in leaves)
        with torch.enable_grad():
            gradients.append(torch.autograd.grad(fn(x, w, s, b), (x, b)))
    for got, want in zip(gradients[1], gradients[0], strict=True):
        assert float((got - want).norm()) <= 1e-5 * float(want.norm())
    assert counted()[0] == 2  # forward, and the product of its backward
    assert [d.chosen.split("(")[0] for d in fusion_choices()[-2:]] == ["int8_panels", "mm"]


WITHOUT_SHIPLAP = """
import sys, torch
package, inputs, want = sys.argv[1], *torch.load(sys.argv[2])
got = torch._inductor.aoti_load_package(package)(*inputs)
assert "shiplap" not in sys.modules
assert float((got - want).norm()) <= 2e-6 * float(want.norm()), (got - want).abs().max()
"""


@pytest.mark.long
def test_a_package_holds_the_template_and_needs_no_shiplap(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, x, w, s, b):
            return gelu(dense.matmul_int8(x, w, s, b))

    args = torch.randn(M, K), *weights()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Layer(), args, dynamic_shapes=({0: rows}, None, None, None))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    assert counted() == (1, 1)
    other = torch.randn(301, K), *args[1:]
    torch.save((other, Layer()(*other)), tmp_path / "inputs.pt")
    done = python("-c", WITHOUT_SHIPLAP, package, tmp_path / "inputs.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
