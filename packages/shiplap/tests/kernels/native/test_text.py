"""A text with a NUL character ends there for C, and not for the reference: no binding takes it."""

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails

BODY = """
int act(const sl_context* ctx, const DLTensor* x, DLTensor* out, const char* mode) {
  const float factor = strcmp(mode, "neg") == 0 ? -1 : 1;
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = factor * ((const float*)x->data)[i];
  return SL_OK;
}
"""
TEXT = "neg\0ative"


@pytest.fixture
def act(ns, tmp_path):
    @sl.op(f"{ns}::act")
    def act(x: Float32[Tensor, "n"], mode: str = "neg") -> Float32[Tensor, "n"]:
        return -x if mode == "neg" else x

    act.kernel("cpu", sl.cabi(compile_c(tmp_path, "act", {"act": act}, BODY), "act"))
    return act


def refused(act):
    return fails("SL209", "a text has a NUL character", where=f"{act.spec.name}, argument 'mode'")


@pytest.mark.parametrize("bound", [False, True])
def test_a_text_with_a_nul_is_refused(act, bound):
    if bound:
        binding.build(act)
    x = torch.ones(2)
    for call in (act, act.overload, torch.no_grad()(act)):
        with refused(act):
            call(x, TEXT)
        assert torch.equal(call(x, "neg"), -x)
    with refused(act):
        act.out(x, TEXT, out=torch.empty(2))
    with refused(act):
        act(x.requires_grad_(), mode=TEXT)


def test_a_text_with_a_nul_is_refused_where_it_is_traced(act):
    with pytest.raises(Exception, match="SL209: a text has a NUL character"):
        torch.compile(lambda x: act(x, TEXT), backend="aot_eager", fullgraph=True)(torch.ones(2))


@pytest.mark.long
def test_a_text_with_a_nul_is_refused_by_a_tvm_ffi_function(act):
    pytest.importorskip("tvm_ffi")
    from shiplap.kernels.native import tvm_ffi

    with pytest.raises(RuntimeError, match="SL209: a text has a NUL character"):
        tvm_ffi.export(act)(torch.ones(2), TEXT, torch.empty(2))


def test_a_default_with_a_nul_is_refused(ns):
    with fails("SL103", got=f"default {TEXT!r}", expected="a text without a NUL character"):

        @sl.op(f"{ns}::act")
        def act(x: Float32[Tensor, "n"], mode: str = TEXT) -> Float32[Tensor, "n"]: ...
