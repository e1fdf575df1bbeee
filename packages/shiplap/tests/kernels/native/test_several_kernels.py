"""Several C kernels of one op: native code picks among them, by their dtypes and by the choices in force."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.dispatch import tuned_choices
from shiplap.errors import ShiplapError
from shiplap.kernels.c.header import config_names_by_symbol
from shiplap.kernels.native import binding
from shiplap.kernels.native.choice_table import choice_rows, packed_rows
from shiplap.kernels.native.deploy import deploy
from shiplap.tuning import thaw
from shiplap_testing.build import compile_c
from shiplap_testing.forked import python

BODY = """
static int fill(const DLTensor* out, double value) {
  for (int64_t i = 0; i < out->shape[0]; i++) {
    if (out->dtype.bits == 32) ((float*)out->data)[i] = value; else ((double*)out->data)[i] = value;
  }
  return SL_OK;
}
int narrow(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  if (ctx->config_size != 1 || x->dtype.bits != 32) return SL_INTERNAL;
  return fill(out, 1000.0 * ctx->workspace_size + ctx->config[NARROW_TILE]);
}
int wide(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  return ctx->config_size != 0 ? SL_INTERNAL : fill(out, -2);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    op = declare(folder / "libseveral.so")
    return compile_c(folder, "several", {"narrow": op, "wide": op}, BODY, configs=config_names_by_symbol([op]))


def declare(library, name="several_test::pick", by_hand=False, **keywords):
    @sl.op(name)
    def pick(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 0

    if by_hand:

        @pick.kernel("cpu", name="by_hand")
        def _(x, *, out):
            out.fill_(7)

    pick.kernel("cpu", sl.cabi(library, "wide"), **keywords)  # the last one is tried first
    configs = [{"TILE": 10}, {"TILE": 20}]
    pick.kernel("cpu", sl.cabi(library, "narrow"), dtypes="float32", configs=configs, workspace="4 * n")
    return pick


@pytest.fixture(params=["python", "native"])
def pick(request, library, tmp_path_factory, monkeypatch):
    thaw()
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "several-cache"))
    op = declare(library, by_hand=True)
    if request.param == "native":
        binding.build(op)
        assert op.native is not None
        assert binding.state(op)[0] == "native"
    else:
        monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    yield op
    thaw()
    op.drop_native()


def choose(op, *chosen):
    entries = []
    for x, kernel, config in chosen:
        key = ("cpu", *op.rule.key(op.bind((x,))))
        entries.append(tuned_choices.ChoiceEntry(op.spec.name, op.identity, key, kernel, Config.of(config)))
    tuned_choices.install_choice_entries(entries)


def value(op, x):
    (found,) = set(op(x).tolist())
    return found


def test_the_first_kernel_that_takes_the_dtype_runs(pick):
    assert value(pick, torch.ones(3)) == 12010  # its own config and workspace
    assert value(pick, torch.ones(3, dtype=torch.float64)) == -2
    assert value(pick, torch.ones(8)[::2]) == 16010


def test_choices_name_a_kernel_and_its_config(pick):
    x, y, z, double = torch.ones(3), torch.ones(6), torch.ones(12), torch.ones(3, dtype=torch.float64)
    choose(pick, (x, "narrow", {"TILE": 20}), (y, "wide", {}), (z, "by_hand", {}), (double, "narrow", {"TILE": 20}))
    assert value(pick, x) == 12020
    assert value(pick, y) == -2
    assert value(pick, z) == 7
    assert value(pick, double) == -2, "the chosen kernel does not take it"
    assert value(pick, torch.ones(30)) == 120010
    if pick.native is not None:
        assert [row[-3:] for row in choice_rows(pick, "cpu")] == [[0, 0, 20], [0, 1, 0], [1, 0, 0], [1, 0, 0]]
        assert len(packed_rows(pick, "cpu")) == 2
    thaw()
    assert value(pick, y) == 24010


def test_a_new_kernel_is_picked_by_the_next_library(pick, library):
    if pick.native is None:
        return
    pick.kernel("cpu", sl.cabi(library, "wide"), name="again")
    assert pick.native is None
    assert value(pick, torch.ones(3)) == -2
    binding.build(pick)
    assert value(pick, torch.ones(3)) == -2


def test_python_picks_from_the_first_kernel_on_that_asks_python(library, ns, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    op = declare(library, f"{ns}::pick", supports=lambda x: True)
    assert [k.name for k in op.native_choices("cpu")] == ["narrow"]
    op.kernel("cpu", sl.cabi(library, "wide"), name="first", supports=lambda x: True)
    assert op.native_choices("cpu") == []
    with pytest.raises(ShiplapError, match="SL404"):
        binding.build(op)


def test_a_library_without_python_picks_and_has_the_choices(pick, tmp_path):
    if pick.native is None:
        return
    choose(pick, (torch.ones(6), "wide", {}), (torch.ones(12), "narrow", {"TILE": 20}), (torch.ones(20), "by_hand", {}))
    path = deploy([pick], tmp_path)
    code = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); pick = torch.ops.several_test.pick\n"
        "for n in (3, 6, 12, 20): print(int(pick(torch.ones(n))[0]))\n"
        "print(int(pick(torch.ones(12)[::2])[0]), int(pick(torch.ones(3).double())[0]), 'shiplap' in sys.modules)"
    )
    done = python("-c", code, path)
    assert done.stdout.split() == ["12010", "-2", "48020", "80010", "24010", "-2", "False"], done.stderr
