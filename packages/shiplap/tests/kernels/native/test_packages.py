"""What an AOTInductor package cannot hold is refused when the package is made, by name, on the CPU as on CUDA."""

import pytest
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

import shiplap as sl
from shiplap_testing.build import compile_c

BODY = """
int step(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = ((float*)x->data)[i] + 1;
  return SL_OK;
}
"""


def declared(ns):
    @sl.op(f"{ns}::step")
    def step(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    return step


@pytest.fixture
def step(ns):
    return declared(ns)


@pytest.fixture
def native(step, tmp_path):
    return sl.cabi(compile_c(tmp_path, "step", {"step": step}, BODY), "step")


def package(op, x, tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            return op(x).sin()

    program = torch.export.export(Model(), (x,))
    return torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))


def refused(op, x, tmp_path):
    """The refusal, which Inductor may wrap."""
    with pytest.raises(Exception, match="SL307") as caught:
        package(op, x, tmp_path)
    assert f"where    {op.spec.name}\n" in str(caught.value)
    assert not (tmp_path / "model.pt2").exists()
    return next(line[11:] for line in str(caught.value).splitlines() if line.strip().startswith("got "))


def test_a_python_kernel(step, tmp_path):
    step.kernel("cpu", lambda x: x + 1, name="by_hand")
    assert refused(step, torch.randn(4), tmp_path) == "by_hand, launched by Python on cpu"


def test_a_reference(step, tmp_path):
    assert refused(step, torch.randn(4), tmp_path) == "the reference, run by Python on cpu"


def test_a_c_kernel_beside_a_python_kernel(step, native, tmp_path):
    step.kernel("cpu", native)
    step.kernel("cpu", lambda x: x + 1, name="by_hand")
    assert refused(step, torch.randn(4), tmp_path) == "by_hand, launched by Python on cpu"


def test_a_c_kernel_that_asks_python(step, native, tmp_path):
    step.kernel("cpu", native, supports=lambda x: True)
    assert refused(step, torch.randn(4), tmp_path) == "step, whose supports= is asked by Python on cpu"


@pytest.mark.long
def test_a_c_kernel_that_does_not_take_the_dtype(step, native, tmp_path):
    step.kernel("cpu", native, dtypes="float32")
    got = refused(step, torch.randn(4).double(), tmp_path)
    assert got == "step does not take this call, which Python would run on cpu: it takes float32, not torch.float64"
    assert package(step, torch.randn(4), tmp_path)


def test_a_declaration_without_an_equivalent_in_c(ns, tmp_path):
    @sl.op(f"{ns}::any_rank")
    def any_rank(x: Shaped[Tensor, "*b"]) -> Shaped[Tensor, "*b"]:
        return x + 1

    body = "int any_rank(const sl_context* ctx, const DLTensor* x, DLTensor* out) { return SL_OK; }"
    library = compile_c(tmp_path, "any", {"any_rank": any_rank}, body)
    any_rank.kernel("cpu", sl.cabi(library, "any_rank"))
    got = refused(any_rank, torch.randn(4), tmp_path)
    assert got.startswith("any_rank, called by Python on cpu because of Shaped[Tensor, ")
