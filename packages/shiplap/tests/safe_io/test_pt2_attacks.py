"""Attacks through a ``.pt2`` file: the graph in it is changed by hand, and what it calls is ours.

What such a file may do to torch is torch's: a package of AOTInductor holds compiled code, and is loaded as code. What a
graph hands to an op of ours is checked as every call is, with a native binding as without.
"""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.dispatch import registry
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c

BODY = """int take(const sl_context* ctx, const DLTensor* x, DLTensor* out, int64_t k) {
  int64_t have = x->shape[0] * x->shape[1];
  for (int64_t i = 0; i < out->shape[0] * out->shape[1]; ++i)
    ((float*)out->data)[i] = i < have ? ((const float*)x->data)[i] : 0;
  return SL_OK;
}"""
NAME = "pt2_attack::take"


def declare(*, other=False):
    """The op, or one of its name with another schema."""
    if other:

        @sl.op(NAME)
        def take(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
            return x + y

        return take

    @sl.op(NAME)
    def take(x: Float[Tensor, "n c"], k: int = 1) -> Float[Tensor, "n+k c"]:
        return torch.cat([x, x.new_zeros(k, x.shape[1])])

    return take


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ops.pt2_attack.take(x, 3)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a file with a program that calls the op. The op has a kernel."""
    home = tmp_path_factory.mktemp("pt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(home / "cache"))
        op = declare()
        op.kernel("cpu", sl.cabi(compile_c(home, "take", {"take": op}, BODY), "take"), dtypes="float32")
        torch.export.save(torch.export.export(Model(), (torch.randn(4, 3),)), home / "model.pt2")
        yield home
        registry.forget_op(NAME)


def changed(home, target, **arguments):
    """The file with other arguments of the call, or another target of it."""
    with zipfile.ZipFile(home / "model.pt2") as whole, zipfile.ZipFile(home / "changed.pt2", "w") as archive:
        for name in whole.namelist():
            content = whole.read(name)
            if name.endswith("models/model.json"):
                program = json.loads(content)
                (node,) = program["graph_module"]["graph"]["nodes"]
                node["target"] = target or node["target"]
                for argument in node["inputs"]:
                    argument["arg"] = arguments.get(argument["name"], argument["arg"])
                content = json.dumps(program).encode()
            archive.writestr(name, content)
    return home / "changed.pt2"


def run(path):
    return torch.export.load(path).module()(torch.ones(4, 3))


HOSTILE = {
    "a size beyond the memory": {"k": {"as_int": 2**61}},
    "a size beyond 64 bits": {"k": {"as_int": 2**63 - 1}},
    "a size below zero": {"k": {"as_int": -5}},
    "the least number": {"k": {"as_int": -(2**63)}},
    "a fraction": {"k": {"as_float": 1.5}},
    "a text": {"k": {"as_string": "x"}},
    "nothing for a number": {"k": {"as_none": True}},
    "a list for a number": {"k": {"as_ints": [1, 2]}},
    "nothing for a tensor": {"x": {"as_none": True}},
    "a number for a tensor": {"x": {"as_int": 5}},
    "a list for a tensor": {"x": {"as_tensors": [{"name": "x"}]}},
}


@pytest.mark.parametrize("served", [pytest.param("native", marks=pytest.mark.long), "python"])
@pytest.mark.parametrize("name", HOSTILE)
def test_arguments_of_a_graph_are_checked_as_those_of_a_call(home, monkeypatch, name, served):
    monkeypatch.setenv("SHIPLAP_NATIVE", "1" if served == "native" else "0")
    if served == "native":
        binding.build(registry.find_declared_op(NAME))
    assert run(changed(home, "")).shape == (7, 3)
    with pytest.raises((RuntimeError, TypeError, MemoryError, sl.ShiplapError)) as raised:
        run(changed(home, "", **HOSTILE[name]))
    assert "INTERNAL ASSERT" not in str(raised.value)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "torch.ops.pt2_attack.nothing.default",
        "torch.ops.pt2_attack.take.default.__class__",
    ],
)
def test_a_graph_calls_nothing_but_ops(home, target):
    with pytest.raises(Exception, match=r"deserializ|not an allowed operator"):
        run(changed(home, target))


def test_a_graph_of_another_declaration_is_an_error(home):
    """The op has another schema by the time at which the file is loaded."""
    whole = changed(home, "")
    declare(other=True)
    try:
        with pytest.raises((RuntimeError, TypeError, sl.ShiplapError)):
            run(whole)
    finally:
        declare()
    assert run(whole).shape == (7, 3)
