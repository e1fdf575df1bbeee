"""Configs of C kernels: in the context, in the header, and looked up natively when one has been chosen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.codegen.chosen import lookup_key
from shiplap.declare.config import Config
from shiplap.dispatch import tuned_choices
from shiplap.errors import ShiplapError
from shiplap.kernels.c.header import config_names_by_symbol, header_text
from shiplap.kernels.native import binding
from shiplap.kernels.native.choice_table import choice_rows
from shiplap.tuning import recipe_of, select, thaw
from shiplap_testing.build import INCLUDE, compile_c

BODY = """
int tell(const sl_context* ctx, const DLTensor* x, const DLTensor* bias, DLTensor* out, int64_t by, int32_t wide) {
  if (ctx->config_size != 2) return SL_INTERNAL;
  double* o = out->data;
  for (int64_t i = 0; i < out->shape[0]; i++) o[i] = 1000.0 * ctx->config[TELL_TILE] + ctx->config[TELL_DEPTH];
  return SL_OK;
}
"""
CONFIGS = [
    {"TILE": 64, "DEPTH": 2},
    {"TILE": 128, "DEPTH": 3},
    {"TILE": -1, "DEPTH": 1 << 40},
    {"TILE": 7, "DEPTH": 9},
    {"TILE": 5, "DEPTH": 6},
]


def declare(library: Path, name="chosen_test::tell", configs=CONFIGS, **keywords):
    @sl.op(name)
    def tell(
        x: Float[Tensor, "n c"], bias: Float[Tensor, "c"] | None, by: int = 1, wide: bool = False
    ) -> Float[Tensor, "n"]:
        return x.new_zeros(x.shape[0])

    tell.kernel("cpu", sl.cabi(library, "tell"), dtypes=["float64"], configs=configs, **keywords)
    return tell


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chosen")
    tell = declare(folder / "libtell.so")
    return compile_c(folder, "tell", {"tell": tell}, BODY, configs=config_names_by_symbol([tell]))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    thaw()
    yield
    thaw()


@pytest.fixture(params=["python", "native"])
def tell(request, library, tmp_path_factory, monkeypatch):
    """The op with either binding; the native one is built once."""
    thaw()
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "chosen-cache"))
    tell = declare(library)
    if request.param == "native":
        binding.build(tell)
        assert tell.native is not None
    else:
        monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    yield tell
    thaw()
    tell.drop_native()


def x(n=5, c=3):
    return torch.zeros(n, c, dtype=torch.float64)


def describe(op, *args):
    """The config that a call ran with."""
    value = int(op(*args)[0])
    tile = round(value / 1000)
    return {"TILE": tile, "DEPTH": value - 1000 * tile}


def entry(op, args, config, kernel="tell"):
    call = op.bind(args)
    return tuned_choices.ChoiceEntry(op.spec.name, op.identity, ("cpu", *op.rule.key(call)), kernel, Config.of(config))


def test_the_default_reaches_the_kernel(tell):
    assert describe(tell, x(), None) == CONFIGS[0]


def test_a_choice_serves_its_bucket_dtype_and_presence_only(tell):
    bias = torch.zeros(3, dtype=torch.float64)
    tuned_choices.install_choice_entries(
        [
            entry(tell, (x(), None), CONFIGS[1]),
            entry(tell, (x(), None, 2, True), {"TILE": 7, "DEPTH": 9}),
            entry(tell, (x(), bias), {"TILE": 5, "DEPTH": 6}),
        ]
    )
    assert describe(tell, x(), None) == describe(tell, x(8, 4), None) == CONFIGS[1]
    assert describe(tell, x(9), None) == describe(tell, x(5, 5), None) == CONFIGS[0]
    assert describe(tell, x(), None, 2, True) == {"TILE": 7, "DEPTH": 9}
    assert describe(tell, x(), None, 2, False) == describe(tell, x(), None, 3, True) == CONFIGS[0]
    assert describe(tell, x(), bias) == {"TILE": 5, "DEPTH": 6}
    assert describe(tell, x(3, 5).T, None) == CONFIGS[0], "another layout"
    thaw()
    assert describe(tell, x(), None) == CONFIGS[0]


def test_many_choices_are_all_found(tell):
    calls = [(n, by) for by in range(300) for n in (1, 4, 64)]
    shown = [c for c in CONFIGS if c["TILE"] > 0]  # what a double can tell apart
    by_call = {call: shown[i % len(shown)] for i, call in enumerate(calls)}
    tuned_choices.install_choice_entries([entry(tell, (x(n), None, by), c) for (n, by), c in by_call.items()])
    for (n, by), config in by_call.items():
        assert describe(tell, x(n), None, by) == config
    assert describe(tell, x(), None, 301) == CONFIGS[0]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"TILE": 0, "DEPTH": 0},
        {"TILE": 128},
        {"TILE": -4, "DEPTH": 2},
        {"TILE": 2**70, "DEPTH": 2},
        {"A": 1, "B": 2},
    ],
    ids=str,
)
def test_a_config_that_no_kernel_declares_never_reaches_native_code(tell, config):
    tuned_choices.install_choice_entries([entry(tell, (x(), None), config)])
    assert describe(tell, x(), None) == CONFIGS[0]


def test_keys_of_another_width_do_not_move_the_rows_of_others(tell):
    good = entry(tell, (x(), None), CONFIGS[1])
    odd = [
        tuned_choices.ChoiceEntry(good.op, good.source, key, good.kernel, good.config)
        for key in [
            ("cpu", 2**70, *good.key[2:]),
            ("cpu", "a", *good.key[2:]),
            (*good.key[:2], *good.key[3:]),
            ("cpu",),
        ]
        if len(key) > 3
    ]
    tuned_choices.install_choice_entries([*odd, good])
    assert describe(tell, x(), None) == CONFIGS[1]


def test_a_chosen_reference_is_run(tell):
    tuned_choices.install_choice_entries([entry(tell, (x(), None), {}, kernel="reference")])
    assert tell(x(), None).tolist() == [0.0] * 5
    assert describe(tell, x(9), None) == CONFIGS[0]


@pytest.mark.long
def test_a_choice_by_measuring_is_served_by_either_binding(library, cache, monkeypatch):
    """The kernel is wrong on purpose (it tells its config): so the reference is chosen, natively too."""
    tell = declare(library)
    binding.build(tell)
    choice = select(tell, recipe_of(tell, (x(), None)))
    assert choice.kernel == "reference"
    assert len(choice.findings) == len(CONFIGS)
    assert tell(x(), None).tolist() == [0.0] * 5
    tell.drop_native()


def test_frozen_and_missing_says_so_from_native_code_too(tell, monkeypatch):
    tuned_choices.install_choice_entries([entry(tell, (x(), None), CONFIGS[1])], "tuned.json")
    assert describe(tell, x(), None) == CONFIGS[1]
    with pytest.warns(sl.ShiplapNotice, match="is not in tuned.json: its declared default runs"):
        assert describe(tell, x(9), None) == CONFIGS[0]
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    with pytest.raises(ShiplapError, match="SL607"):
        tell(x(9), None)


def test_errors_are_those_of_the_declaration_also_with_choices(tell):
    tuned_choices.install_choice_entries([entry(tell, (x(), None), CONFIGS[1])], "tuned.json")
    with pytest.raises(ShiplapError, match="SL201"):
        tell(torch.zeros(5, dtype=torch.float64), None)


def test_the_header_names_the_parameters_and_the_signature_counts_them(library, ns):
    tell = declare(library, f"{ns}::tell")
    text = header_text({"tell": tell.spec}, "t", config_names_by_symbol([tell]))
    assert "#define TELL_DEPTH 0 /* index into ctx->config */\n#define TELL_TILE 1 " in text
    other = declare(library, configs=[{"WIDTH": 1, "TILE": 2}])
    with pytest.raises(ShiplapError) as caught:
        other(x(), None)
    assert caught.value.id == "SL403"


@pytest.mark.parametrize(
    ("configs", "got"),
    [
        ([{"TILE": 1.5}], "TILE=1.5"),
        ([{"TILE": 1}, {"DEPTH": 1}], "DEPTH=1"),
        (lambda sizes: [{"TILE": 1}], "a function"),
    ],
)
def test_a_c_kernel_takes_integers_under_the_same_names(library, ns, configs, got):
    with pytest.raises(ShiplapError) as caught:
        declare(library, f"{ns}::tell", configs=configs)
    assert (caught.value.id, caught.value.got) == ("SL116", got)


def test_a_default_that_follows_from_sizes_stays_with_python(library, ns, cache):
    tell = declare(library, f"{ns}::tell", default=lambda sizes: CONFIGS[1])
    with pytest.raises(ShiplapError, match="a config that C\\+\\+ cannot look up"):
        binding.build(tell)


def test_what_c_cannot_look_up_has_no_key(ns):
    @sl.op(f"{ns}::text")
    def text(x: Float[Tensor, "n"], mode: str = "a", eps: float = 1.0) -> Float[Tensor, "n"]:
        return x

    assert lookup_key(text.spec, text.rule) == []
    text.buckets(mode="none")
    assert lookup_key(text.spec, text.rule) == ["rounded(peek_size(values[0], 0))", "peek_dtype(values[0])"]


def test_rows_hold_what_the_table_holds(tell):
    tuned_choices.install_choice_entries(
        [entry(tell, (x(), None), CONFIGS[1]), entry(tell, (x(3, 5).T, None), CONFIGS[1])]
    )
    if tell.native is not None:
        assert choice_rows(tell, "cpu") == [[8, 4, 1, 0, 7, 0, 0, 3, 128]], "the other layout stays with Python"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_lookup_is_right_and_allocates_nothing(tmp_path):
    """``benchmarks/choice_lookup.py`` measures how long it takes."""
    program = Path(__file__).with_name("choice_lookup.cpp")
    command = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", "-o", tmp_path / "look", program]
    subprocess.run(command, check=True)
    run = subprocess.run([tmp_path / "look", "10000"], capture_output=True, text=True, check=True)
    assert run.stdout.split()[1:3] == ["0", "0"]
