"""Templates in graphs of symbolic sizes: proven over a range, and no graph leaves the range without another proof."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

import shiplap as sl
from shiplap.dispatch import tuned_choices
from shiplap.inductor import fusion_choices, template_candidate
from shiplap.inductor import size_range as size_range_module
from shiplap.inductor.size_range import SizeRange, size_range
from shiplap.sampling.code_constants import CodeConstants, find_template_constants
from shiplap.torch_private import inductor_lowering
from shiplap.torch_private.inductor_lowering import SizeSymbol, bounds_of, largest_value
from tests.inductor.targets import scale_blocks, sized, twice

pytestmark = pytest.mark.filterwarnings("ignore::shiplap.errors.ShiplapNotice")
M, N = (sympy.Symbol(name, integer=True, positive=True) for name in "mn")


@pytest.fixture(autouse=True)
def fresh(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    before = list(twice.templates["cpu"])
    with inductor_lowering.without_graph_caches():
        yield
    twice.templates["cpu"] = before
    tuned_choices.forget_derived_choices()


def only(*flaws: str) -> None:
    configs = tuple(map(sized, flaws))
    twice.templates["cpu"] = [dataclasses.replace(twice.templates["cpu"][0], configs=configs)]
    tuned_choices.forget_derived_choices()


def layer(x, y):
    return torch.relu(twice(x) + y)


def same(compiled: Any, *shapes: tuple[int, int]) -> None:
    for shape in shapes:
        x, y = torch.randn(shape), torch.randn(shape)
        torch.testing.assert_close(compiled(x, y), layer(x, y))


def verdicts() -> dict[str, str]:
    """By flaw, what was found in the last choice."""
    made = fusion_choices("fusetest::twice")[-1]
    return {v.candidate.split("FLAW=")[1].rstrip(")"): f"{v.status}: {v.detail}" for v in made.verdicts}


def test_a_dynamic_graph_has_a_template_that_is_right_in_its_range_and_is_guarded_there():
    only("tail", "branch", "count", "none")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    same(compiled, (100, 128), (100, 130), (1000, 5), (2, 1023))
    found, made = verdicts(), fusion_choices("fusetest::twice")
    assert len(made) == 1
    assert found["tail"].startswith("wrong: result 0: [0, 0] = nan")
    assert found["branch"].startswith("wrong: result 0: ")
    assert "it keeps values from call to call: " in found["count"]
    assert "calls (4 bytes, global)" in found["count"]
    assert found["none"] == "ok: for m 2..1024, n 2..1024"
    assert made[0].chosen == "sized(BM=4, BN=64, FLAW=none)"
    assert made[0].sizes == "m=100, n=128; any m 2..1024, n 2..1024"

    same(compiled, (100, 1500), (100, 4000))  # beyond: another proof, and one graph for both
    made = fusion_choices("fusetest::twice")
    assert [m.sizes.partition("any ")[2] for m in made[1:]] == ["m 2..1024, n 2..4096"]
    same(compiled, (100, 128))
    assert len(fusion_choices("fusetest::twice")) == 2


def test_a_size_that_a_sampler_computes_from_another_has_a_symbol_of_its_own():
    """As the blocks of sorted tables, which follow from the rows, where a layer is given its tables."""

    def blocks(x, scales):
        return torch.relu(scale_blocks(x, scales))

    compiled = torch.compile(blocks, fullgraph=True, dynamic=True)
    for rows in (200, 129, 1000):
        x, scales = torch.randn(rows, 9), torch.rand(-(-rows // 64))
        torch.testing.assert_close(compiled(x, scales), blocks(x, scales))
    (made,) = fusion_choices("fusetest::scale_blocks")
    assert (made.chosen, [v.status for v in made.verdicts]) == ("blocks(BM=4, BN=64)", ["ok"])


@pytest.mark.long  # a template is compiled
def test_samples_of_one_number_of_rows_are_no_proof_of_others(monkeypatch):
    """The other size, of which all values are drawn, does not make up for it."""

    def fixed(rng, sizes, dtype, device):
        return torch.randn(128, sizes["n"], generator=rng).to(device, dtype), torch.rand(2, generator=rng)

    monkeypatch.setattr(scale_blocks, "sampler", fixed)
    tuned_choices.forget_derived_choices()
    compiled = torch.compile(lambda x, scales: scale_blocks(x, scales).relu(), fullgraph=True, dynamic=True)
    compiled(torch.randn(128, 9), torch.rand(2))
    (verdict,) = fusion_choices("fusetest::scale_blocks")[-1].verdicts
    assert (verdict.status, verdict.detail.partition(" in ")[0]) == ("refused", "hardly any sizes")


@pytest.mark.long
def test_a_proof_lays_no_two_elements_at_one_address():
    """Both strides are symbols of their own here, and the sizes of the proof are larger than those of the call."""
    only("none")
    compiled = torch.compile(lambda x: twice(x), fullgraph=True, dynamic=True)
    x = torch.randn(10, 40)[:, ::3][:, :12]
    torch.testing.assert_close(compiled(x), x * 2)
    assert verdicts()["none"] == "ok: for m 2..1024, n 2..1024"


def test_a_size_that_no_guard_can_limit_leaves_the_fallback():
    only("none")
    x = torch.randn(100, 128)
    mark_unbacked(x, 0)
    twice_alone = torch.compile(lambda x: twice(x), fullgraph=True)
    with pytest.warns(sl.ShiplapNotice, match="no template is used: m depends on data and may be any size"):
        twice_alone(x)
    made = fusion_choices("fusetest::twice")[-1]
    assert (made.chosen, made.reason) == ("reference", "m depends on data and may be any size, too many to prove")


def range_of(*conditions: Any, upper: int = 1024) -> SizeRange:
    symbols = SizeSymbol(M, 2, upper, 100, True), SizeSymbol(N, 2, upper, 128, True)
    return SizeRange(symbols, (), "", "", (), conditions, lambda sizes: sizes[M] * sizes[N])


def test_sizes_are_at_the_ends_and_at_the_edges_of_tiles_and_guards():
    points = list(range_of(sympy.Le(M, 600)).points(CodeConstants(), tiles=(48,)))
    by_symbol = {s: {p[s] for p in points} for s in (M, N)}
    assert {2, 3, 47, 48, 49, 99, 100, 101, 599, 600} <= by_symbol[M]
    assert max(by_symbol[M]) == 600
    assert {2, 47, 48, 49, 127, 128, 129, 1023, 1024} <= by_symbol[N]
    assert len(points) == len({tuple(p.items()) for p in points})


def test_sizes_are_edges_too_where_the_smallest_sample_takes_long():
    """A product with a large weight, of any number of rows."""
    wide = dataclasses.replace(range_of(), work=lambda sizes: sizes[M] << 24)
    points = list(wide.points(CodeConstants(ints=(500,)), tiles=(96,)))
    assert {2, 3, 15, 16, 17, 95, 96, 97} <= {p[M] for p in points}
    assert len(points) < 60


def test_sizes_are_those_that_the_guards_admit():
    points = list(range_of(sympy.Eq(sympy.Mod(M, 8), 0), sympy.Ne(N, 7)).points(CodeConstants(ints=(32, 64))))
    assert all(p[M] % 8 == 0 and p[N] != 7 for p in points)
    assert {24, 32, 40, 64, 72} <= {p[M] for p in points}


def test_sizes_at_which_a_tensor_spans_too_much_memory_are_left_out(monkeypatch):
    """A stride may be the symbol of a size: offsets would overflow 32 bits at sizes that are small alone."""
    replaced = {"evaluate_size": lambda size, at: int(sympy.sympify(size).subs(at)), "size_expression": sympy.sympify}
    for name, function in replaced.items():
        monkeypatch.setattr(inductor_lowering, name, function)
    wide = dataclasses.replace(range_of(upper=1 << 17), memory=(((M, N), (N, M * N)),))
    points = list(wide.points(CodeConstants(), tiles=(48,)))
    assert max(p[M] * p[N] ** 2 for p in points) <= 1 << 28
    assert {47, 48, 49} <= {p[M] for p in points}
    assert {47, 48, 49} <= {p[N] for p in points}


def range_of_rows(monkeypatch: pytest.MonkeyPatch, call: Any, upper: int | None) -> SizeRange:
    """The range of a call whose only symbol is ``M``, outside of Inductor."""
    rows = SizeSymbol(M, 2, upper, 100, True)
    monkeypatch.setattr(inductor_lowering, "symbols_of", lambda sizes: (rows,) if sizes else ())
    monkeypatch.setattr(inductor_lowering, "graph_conditions", tuple)
    monkeypatch.setattr(inductor_lowering, "evaluate_size", lambda size, at: at.get(size, size))
    monkeypatch.setattr(inductor_lowering, "size_hint", lambda size: size)
    monkeypatch.setattr(torch, "SymInt", sympy.Symbol)
    monkeypatch.setattr(size_range_module, "_show_range", lambda call, free: "")
    call.numbers = lambda sizes: {name: sizes.get(size, size) for name, size in call.env.items()}
    return size_range(call)


@pytest.mark.parametrize(("device", "columns", "end"), [("cpu", 64, 1024), ("cuda", 64, 1 << 17), ("cuda", 4096, 4096)])
def test_a_range_ends_where_the_host_can_draw_its_samples(monkeypatch, device, columns, end):
    """On a GPU as well: the host draws the values, and a proof holds them several times to compare them."""
    tensor = SimpleNamespace(shape=(M, columns), stride=lambda: (columns, 1), storage_offset=lambda: 0)
    call = SimpleNamespace(op=twice, device=torch.device(device), env={"m": M, "n": columns}, tensors={"x": tensor})
    (found,) = range_of_rows(monkeypatch, call, None).symbols
    assert found.upper == end


@pytest.mark.parametrize("backward", [False, True])
def test_a_table_that_a_package_does_not_have_makes_no_size_too_large(monkeypatch, ns, backward):
    @sl.op(f"{ns}::gathered")
    def gathered(
        x: Float[Tensor, "n c"], index: Int64[Tensor, "m"], back: Int64[Tensor, "n"] | None = None
    ) -> Float[Tensor, "m c"]:
        return x[index]

    monkeypatch.setattr(size_range_module.dynamo, "is_packaging", lambda: True)
    row = SimpleNamespace(shape=(M,), stride=lambda: (1,), storage_offset=lambda: 0)
    table = SimpleNamespace(shape=(M, 64), stride=lambda: (64, 1), storage_offset=lambda: 0)
    tensors = {"x": table, "index": row} | ({"back": row} if backward else {})
    env = {"n": M, "m": M, "c": 64}
    call = SimpleNamespace(op=gathered, device=torch.device("cuda"), env=env, tensors=tensors)
    monkeypatch.setattr(size_range_module, "_describe_unlimited", lambda call, s, upper: f"up to {upper}")
    assert range_of_rows(monkeypatch, call, 1 << 18).problem == ("up to 262144" if backward else "")


def test_a_size_that_data_decides_about_ends_where_others_do():
    (bound,) = bounds_of([sympy.Le(M, 27 * N), sympy.Ge(M, 0)], M)
    assert largest_value(bound, {N: (2, 1024)}) == 27 * 1024
    assert largest_value(bound, {N: (2, None)}) is None
    assert largest_value(bound, {}) is None


@pytest.mark.parametrize(
    ("symbol", "own"),
    [
        ("_ZZ17cpp_bad_memo_memoE4seen", True),
        ("calls.0", True),
        ("_ZL5cache", True),
        ("_ZZ6helperfE4last", True),  # of a header, whose function the source calls
        ("_ZZ16_igam_helper_facIdET_S0_S0_E4EXP1", False),
        ("_ZZN3c106helperEvE5cache", False),
    ],
)
def test_variables_that_no_source_names_are_those_of_headers_of_torch(symbol, own):
    text = "static float seen; static int calls, cache[3]; x = helper(1.f) + c10::div_floor_integer(2, 1);"
    assert template_candidate._is_named(symbol, set(re.findall(r"\w+", text))) == own


def test_constants_of_a_template_are_those_of_its_text_and_its_config():
    mined = find_template_constants(twice.templates["cpu"][0], {"BM": 12, "FLAW": "value"})
    assert {12, 700} <= {*mined.ints}
    assert 3.25 in mined.floats
