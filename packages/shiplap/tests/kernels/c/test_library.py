"""Libraries are found, loaded and trusted: or SL401, SL402, SL403."""

import subprocess

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.c.library import locate_library
from shiplap.kernels.native import binding
from shiplap_testing.build import INCLUDE, compile_c
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
BODY = """
int {symbol}(const sl_context* ctx, const DLTensor* x, DLTensor* out{extra}) {{
  for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = {value};
  return SL_OK;
}}"""


@pytest.fixture
def fill(ns):
    @sl.op(f"{ns}::fill")
    def fill(x: V) -> V:
        return x * 0

    return fill


def build(folder, op, value, symbol="fill", extra=""):
    folder.mkdir(exist_ok=True)
    return compile_c(folder, "fill", {symbol: op}, BODY.format(symbol=symbol, value=value, extra=extra))


def test_binding_opens_nothing(fill):
    fill.kernel("cpu", sl.cabi("/no/such/libfill.so", "fill"))
    with fails(
        "SL401", "fix      correct the path", where="libfill.so", got="no such file", expected="/no/such/libfill.so"
    ):
        fill(torch.ones(2))


def test_the_search_path_comes_first(fill, tmp_path, monkeypatch):
    installed, other = build(tmp_path / "a", fill, 1), build(tmp_path / "b", fill, 2)
    fill.kernel("cpu", sl.cabi(installed, "fill"))
    assert fill(torch.ones(1)) == 1
    monkeypatch.setenv("SHIPLAP_LIBRARY_PATH", str(tmp_path / "b"))
    assert locate_library(installed) == other
    fill.kernel("cpu", sl.cabi(installed, "fill"))
    assert fill(torch.ones(1)) == 2
    monkeypatch.setenv("SHIPLAP_LIBRARY_PATH", str(tmp_path / "empty"))
    assert locate_library(installed) == installed
    with fails("SL401", expected=f"{tmp_path}/empty/libgone.so or {tmp_path}/libgone.so"):
        locate_library(tmp_path / "libgone.so")


def test_a_file_that_is_no_library(fill, tmp_path):
    (tmp_path / "libfill.so").write_text("not ELF")
    fill.kernel("cpu", sl.cabi(tmp_path / "libfill.so", "fill"))
    with fails("SL401", where=str(tmp_path / "libfill.so"), expected="a library that the loader accepts"):
        fill(torch.ones(1))


def test_a_symbol_that_is_not_there(fill, tmp_path):
    fill.kernel("cpu", sl.cabi(build(tmp_path, fill, 1), "other"))
    expected = "a function of the library, such as fill"
    with fails("SL402", where="libfill.so: other", got="no such symbol", expected=expected):
        fill(torch.ones(1))


def test_a_library_built_for_another_declaration(ns, tmp_path):
    @sl.op(f"{ns}::fill")
    def old(x: V, k: int) -> V: ...

    library = build(tmp_path, old, "k", extra=", int64_t k")

    @sl.op(f"{ns}::renamed")
    def new(x: V, k: float) -> V: ...

    new.kernel("cpu", sl.cabi(library, "fill"))
    with fails(
        "SL403", "write the header again with: shiplap header", "first move the declaration", where="libfill.so: fill"
    ):
        new(torch.ones(1), 1.0)
    old.kernel("cpu", sl.cabi(library, "fill"))
    # Both declarations are in this process, so the error can name them.
    fix = f"bind fill to {ns}::fill, or name the function of {ns}::renamed in sl.cabi(...)"
    with fails("SL403", f"the signature of {ns}::fill", f"the signature of {ns}::renamed", fix=fix):
        new(torch.ones(1), 1.0)
    assert old(torch.ones(1), 3) == 3


def test_a_library_that_does_not_say_for_what_it_was_built(fill, tmp_path):
    library = build(tmp_path, fill, 1)
    source = (tmp_path / "fill.c").read_text()
    (tmp_path / "fill.c").write_text(source.replace("SL_SIGNATURES", ""))
    bare = tmp_path / "libbare.so"
    include = [f"-I{INCLUDE}", f"-I{tmp_path}"]
    subprocess.run(["cc", "-shared", "-fPIC", *include, "-o", bare, tmp_path / "fill.c"], check=True)
    fill.kernel("cpu", sl.cabi(bare, "fill"))
    where, got = "libbare.so: fill", "no function fill_signature"
    with fails("SL403", "without_signature=True", "the line SL_SIGNATURES once below", where=where, got=got):
        fill(torch.ones(1))
    with fails("SL403"):
        binding.build(fill)
    fill.kernel("cpu", sl.cabi(bare, "fill", without_signature=True))
    assert fill(torch.ones(1)) == 1
    fill.kernel("cpu", sl.cabi(library, "fill", without_signature=True))
    assert fill(torch.ones(1)) == 1


def test_a_signature_that_differs_is_refused_whatever_the_author_says(ns, tmp_path):
    @sl.op(f"{ns}::fill")
    def old(x: V, k: int) -> V: ...

    @sl.op(f"{ns}::renamed")
    def new(x: V, k: float) -> V: ...

    new.kernel("cpu", sl.cabi(build(tmp_path, old, "k", extra=", int64_t k"), "fill", without_signature=True))
    with fails("SL403", where="libfill.so: fill"):
        new(torch.ones(1), 1.0)
