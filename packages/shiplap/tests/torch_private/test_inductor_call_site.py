"""The Python that Inductor writes looks an op up once, and calls what is behind it."""

import re

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import shiplap as sl
from shiplap.torch_private.dispatcher_calls import in_code
from shiplap_testing.forked import python

V = Float[Tensor, "n"]


@pytest.fixture
def double(ns):
    @sl.op(f"{ns}::double")
    def double(x: V) -> V:
        return x * 2

    return double


@pytest.fixture
def double_raw(ns):
    """Whose name is that of the other's part below autograd, once what is no letter is left out."""

    @sl.op(f"{ns}::double_raw")
    def double_raw(x: V) -> V:
        return x * 3

    return double_raw


@pytest.mark.usefixtures("fresh_compiler")
def test_an_op_is_looked_up_once_in_a_module(double, double_raw):
    def chain(x):
        return double(double(double_raw(x) + 1).sin())

    x = torch.randn(5)
    out, (code,) = run_and_get_code(torch.compile(chain, fullgraph=True), x)
    torch.testing.assert_close(out, chain(x))
    names = re.findall(r"^(\w+) = in_code\(torch\.ops\.", code, re.MULTILINE)
    assert len(set(names)) == len(names) == 2
    assert code.count("in_code(torch.ops.") == 2
    assert sorted(code.count(f"= {name}(") for name in names) == [1, 2]


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_the_branches_of_a_graph_share_its_names(double):
    def branch(x):
        return torch.cond(x.sum() > 0, lambda x: double(x) + 1, lambda x: double(x).sin(), (x,))

    for x in (torch.ones(3), -torch.ones(3)):
        out, (code,) = run_and_get_code(torch.compile(branch, fullgraph=True), x)
        torch.testing.assert_close(out, branch(x))
        assert code.count("in_code(torch.ops.") == 1
        torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_what_a_kernel_raises_passes_through(ns):
    @sl.op(f"{ns}::refuses")
    def refuses(x: V) -> V:
        return x + 1

    @refuses.kernel("cpu")
    def _(x, *, out):
        if x.numel() and bool(x[0] < 0):
            raise ValueError("negative")
        torch.add(x, 1, out=out)

    compiled = torch.compile(lambda x: refuses(x).sin(), fullgraph=True)
    compiled(torch.ones(3))
    with pytest.raises(ValueError, match="negative"):
        compiled(-torch.ones(3))


@pytest.mark.usefixtures("fresh_compiler")
def test_an_explanation_knows_the_op_by_its_name(double):
    from shiplap.torch_private.inductor_report import observe_graphs

    with observe_graphs() as graphs:
        torch.compile(lambda x: double(x + 1).sin(), fullgraph=True)(torch.randn(5))
    kernels = [group.kernel.removesuffix(".default") for group in graphs[0].groups_with_kernel_names() if group.kernel]
    assert [kernel for kernel in kernels if "cpp_fused" not in kernel] == [
        f"torch.ops.{double.spec.namespace}.double.raw"
    ]


def test_it_is_what_the_part_below_autograd_calls_without_a_question(double):
    called = in_code(double.below_autograd)
    assert called is not double.below_autograd._op
    assert torch.equal(called(torch.ones(2)), torch.full((2,), 2.0))
    assert in_code(torch.sin) is torch.sin


FIRST_TRACE = """
import torch
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

@sl.op("in_code::first")
def first(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1

torch.compile(lambda x: first(x) + 1, fullgraph=True, backend="eager")(torch.ones(3))
from shiplap.dispatch import compile_cache_key as digest
lowers = [part for part in digest._key_parts if part.__module__ == "shiplap.inductor.install"]
assert lowers, "keys do not know how an op is lowered"
"""


def test_the_first_trace_of_a_process_puts_what_code_is_written_into_keys():
    done = python("-c", FIRST_TRACE)
    assert done.returncode == 0, done.stderr
