"""Products on the CPU: integers bit for bit, floats against float64 of the same operands, edges, one graph."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap_slidesparse import MODES, Packed, formats, layers, matmul, ops, pack, prune
from shiplap_slidesparse.quantise import quantise_rows
from tests.slidesparse.patterns import integers, masks, text

EIGHT = {"int8": (ops.mm_int8, torch.int8), "fp8": (ops.mm_fp8, torch.float8_e4m3fn)}
LINEAR = {m: getattr(layers, f"linear_{m}") for m in MODES}
SPARSE = {m: getattr(ops, f"sparse_mm_{m}") for m in MODES}


def values(rng: torch.Generator, m: int, n: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (m, n), generator=rng).to(dtype)
    return torch.randn(m, n, generator=rng).to(dtype)


def whole_rows(weight: Tensor) -> Tensor:
    return formats.pad_matrix(weight, formats.dense_depth(len(weight)), weight.shape[1])


# --- integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", range(2, 7))
def test_all_patterns_give_the_dense_integers(pairs: int) -> None:
    """Every group of the pattern, through the ops: lifted activations times packed weights, bit for bit."""
    rng = torch.Generator().manual_seed(pairs)
    weight = whole_rows(integers(masks(pairs), rng))
    x = torch.randint(-127, 128, (16, 2 * pairs), generator=rng).to(torch.float32)
    x[:, 0] = 127  # the scale is 1
    q, scale = ops.quantise_int8(x, pairs)
    packed = formats.compress_two_of_four(formats.slide_weight(weight, text(pairs)))
    got = ops.sparse_mm_int8(q, packed, len(weight))
    assert torch.equal(scale, torch.ones(16))
    assert torch.equal(got.long(), x.long() @ weight.long().t())


@pytest.mark.parametrize("pairs", range(2, 9))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 70), (17, 33, 1030), (64, 64, 256), (3, 32, 4100)])
def test_random_integers(pairs: int, m: int, n: int, k: int) -> None:
    rng = torch.Generator().manual_seed(m * k)
    weight = whole_rows(prune(values(rng, n, k, torch.int8), text(pairs)))
    q, _ = ops.quantise_int8(torch.randn(m, k, generator=rng), pairs)
    plain, _ = ops.quantise_int8(torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)), 2)
    got = ops.sparse_mm_int8(q, formats.compress_two_of_four(formats.slide_weight(weight, text(pairs))), len(weight))
    slid = formats.slide_weight(weight, text(pairs))
    assert torch.equal(got.long(), q.long() @ slid.long().t())
    assert torch.equal(got, ops.mm_int8(q, slid))
    dense = ops.mm_int8(plain, formats.pad_matrix(weight, len(weight), plain.shape[1]))
    assert torch.equal(dense.long(), plain[:, :k].long() @ weight.long().t())


def test_the_largest_sums_stay_in_32_bits() -> None:
    k = 131040
    low, high = torch.full((16, k), -128, dtype=torch.int8), torch.full((32, k), 127, dtype=torch.int8)
    assert (ops.mm_int8(low, high) == -128 * 127 * k).all()
    assert (ops.mm_int8(low, torch.cat((low, low))) == 128 * 128 * k).all()
    with pytest.raises(ShiplapError, match="SL208"):
        ops.mm_int8(torch.zeros(16, k + 32, dtype=torch.int8), torch.zeros(32, k + 32, dtype=torch.int8))


def test_the_lifted_product_of_a_layer_is_the_dense_one() -> None:
    """Both kernels of a layer, all depths of a group and more: the same bits out, since sums are integers."""
    rng = torch.Generator().manual_seed(1)
    for pairs in (2, 3, 4, 7):
        for k in (*range(1, 2 * pairs + 2), 61, 160):
            weight, x = prune(torch.randn(9, k, generator=rng), text(pairs)), torch.randn(5, k, generator=rng)
            both = pack(weight, text(pairs), "int8")
            got = [matmul(x, both.keeping(keep)) for keep in ("dense", "packed")]
            assert torch.equal(got[0], got[1]), (pairs, k)


# --- floats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_sparse_products_against_float64_of_the_same_operands(mode: str) -> None:
    rng, dtype = torch.Generator().manual_seed(2), MODES[mode]
    weight = prune(values(rng, 64, 480, dtype), "6:8")
    slid = formats.slide_weight(weight, "6:8")
    x = values(rng, 16, 480, dtype)
    lifted = formats.lift_columns(x, 4)
    got = SPARSE[mode](lifted, formats.compress_two_of_four(slid), 64).double()
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    rounding = 0 if mode == "int8" else 2**-8 if mode in ("fp8", "bf16") else 2**-11
    assert ((got - exact).abs() <= rounding * exact.abs() + (2e-7 * size if rounding else 0)).all()


def test_scales_of_dense_float8() -> None:
    rng = torch.Generator().manual_seed(3)
    q, weight = values(rng, 32, 96, torch.float8_e4m3fn), values(rng, 64, 96, torch.float8_e4m3fn)
    rows, columns = torch.rand(32, generator=rng) + 0.5, torch.rand(64, generator=rng) + 0.5
    exact = q.double() @ weight.double().t() * rows[:, None].double() * columns.double()
    torch.testing.assert_close(ops.mm_fp8(q, weight, rows, columns).double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [0, 1, 15, 16, 17])
def test_a_layer_takes_any_size(mode: str, m: int) -> None:
    rng, dtype = torch.Generator().manual_seed(m), MODES[mode]
    eight = dtype.itemsize == 1
    for n, k, pattern in ((1, 1, "2:4"), (33, 37, "6:8"), (64, 160, "4:6"), (0, 8, "6:8")):
        weight = prune(torch.randn(n, k, generator=rng), pattern)
        x = torch.randn(2, m, k, generator=rng)[..., :].to(torch.float32 if eight else dtype)
        bias = torch.randn(n, generator=rng).to(x)
        for keep in ("dense", "packed", "both"):
            packed = pack(weight, pattern, mode, keep=keep)
            got = matmul(x, packed, bias)
            assert got.shape == (2, m, n)
            assert got.dtype == x.dtype
            wide = x.reshape(-1, k)
            if eight:
                q, scale = quantise_rows(wide, dtype)
                wide = q.double() * scale[:, None].double()
            exact = wide.double() @ packed.dequantised(torch.float64).t() + bias.double()
            close = {"rtol": 1e-4, "atol": 1e-5} if eight else {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(got.reshape(2 * m, n).double(), exact, **close)


def test_all_floating_dtypes_of_activations_are_taken_by_the_8_bit_modes() -> None:
    weight, x = prune(torch.randn(20, 48), "6:8"), torch.randn(4, 48).to(torch.bfloat16)
    for mode in EIGHT:
        packed = pack(weight, "6:8", mode)
        wide = matmul(x.float(), packed)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            got = matmul(x.to(dtype), packed)
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), wide, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("mode", EIGHT)
def test_a_token_that_is_not_finite_gives_nan_in_its_own_row(mode: str) -> None:
    x = torch.randn(5, 40)
    packed = pack(prune(torch.randn(12, 40), "6:8"), "6:8", mode)
    clean = matmul(x, packed)
    x[3, 2] = math.inf
    got = matmul(x, packed)
    assert got[3].isnan().all()
    assert torch.equal(got[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


@pytest.mark.parametrize("mode", EIGHT)
def test_rows_that_pad_never_leak(mode: str) -> None:
    """The kernel of a layer reads the user's rows only: what lies behind them in memory may be anything."""
    packed = pack(prune(torch.randn(40, 24), "4:6"), "4:6", mode)
    buffer = torch.full((48, 24), math.nan)
    buffer[:17] = torch.randn(17, 24)
    got = matmul(buffer[:17], packed)
    assert torch.equal(got, matmul(buffer[:17].clone(), packed))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("mode", EIGHT)
def test_sums_are_scaled_before_they_are_rounded(mode: str) -> None:
    """Known defect elsewhere: sums, up to 448^2 k, were rounded to 16 bits first: float16 overflows at 65,504."""
    weight, x = torch.ones(4, 4096), torch.ones(3, 4096)
    weight[:, ::4] = x[:, ::2] = 0
    packed = pack(weight, "6:8", mode)
    narrow = x.to(torch.float16)
    arguments = narrow, packed.scale, packed.dense, packed.packed, None, packed.pairs, packed.layout
    for out in (matmul(narrow, packed), LINEAR[mode].reference(*arguments)):
        assert (out == 2048).all()


def test_two_pairs_are_plain_2_of_4() -> None:
    """Nothing is moved or repeated: windows of 2:4 are its groups, and dense activations are those of 2:4."""
    weight = prune(torch.randn(6, 60), "2:4")
    slid = formats.slide_weight(weight, "2:4")
    assert torch.equal(slid, formats.pad_matrix(weight, 6, 64))
    x = torch.randn(16, 60)
    assert torch.equal(ops.lift(x, 2), formats.pad_matrix(x, 16, 64))
    assert torch.equal(formats.lane_sources(64, 2), torch.arange(64))


@pytest.fixture
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own, and no choice in force afterwards."""
    table = importlib.import_module("shiplap.tuning.frozen_table")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(table, "_made", {})
    yield
    table.thaw()


@pytest.mark.usefixtures("own_choices")
def test_dense_competes_wherever_sparse_does() -> None:
    """Candidates of one choice, on each device: the reference, slide and dense."""
    candidates = importlib.import_module("shiplap.tuning.candidate").kernel_candidates
    for op in LINEAR.values():
        for device in ("cpu", "cuda"):
            names = {c.kernel for c in candidates(op, device, {"m": 1, "n": 32, "k": 32, "pairs": 4, "layout": 0})}
            assert names >= {"reference", "slide", "dense"}
    x, packed = torch.randn(4, 64), pack(prune(torch.randn(32, 64), "6:8"), "6:8", "int8")
    args = (x, packed.scale, packed.dense, packed.packed, None, packed.pairs, packed.layout)
    (choice,) = sl.tune(layers.linear_int8, [args], budget=600, isolate=False, remeasure=True)
    assert choice.kernel in ("dense", "slide", "reference")
    assert not [f for f in choice.findings if f.verdict == "fail"]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_leaf_products_refuse_ragged_sizes_and_wrong_bytes() -> None:
    q = torch.zeros(16, 32, dtype=torch.int8)
    with pytest.raises(ShiplapError, match=r"SL208[\s\S]*m = 15"):
        ops.mm_int8(q[:15], torch.zeros(32, 32, dtype=torch.int8))
    with pytest.raises(ShiplapError, match="SL208"):
        ops.sparse_mm_int8(q, torch.zeros(640, dtype=torch.uint8), 31)
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*641 bytes, expected 640"):
        ops.sparse_mm_int8(q, torch.zeros(641, dtype=torch.uint8), 32)
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*layout 1"):
        ops.sparse_mm_int8(q, torch.zeros(640, dtype=torch.uint8), 32, 1)
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*neither a dense nor a packed weight"):
        layers.linear_int8(torch.zeros(1, 4), torch.ones(2))


def test_any_bytes_are_a_packed_weight() -> None:
    """Metadata that names one lane twice keeps the second value; nothing is read or written elsewhere."""
    packed = torch.randint(0, 256, (640,), dtype=torch.uint8)
    got = ops.sparse_mm_int8(torch.ones(16, 32, dtype=torch.int8), packed, 32)
    assert got.shape == (16, 32)


def test_a_packed_weight_is_equal_to_itself_and_not_moved_to_nowhere() -> None:
    one, other = (pack(prune(torch.randn(4, 8), "6:8")) for _ in range(2))
    assert one == one
    assert one != other  # comparing tensors would be an error
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*a weight on the meta device"):
        one.to("meta")


def test_pack_says_what_it_wants() -> None:
    weight = prune(torch.randn(4, 8), "6:8")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*int8, fp8, bf16, fp16"):
        pack(weight, "6:8", "int4")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*\(1, 4, 8\)"):
        pack(weight[None], "6:8")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*meta device"):
        pack(weight.to("meta"), "6:8")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*torch.int8 without a scale"):
        pack(weight.to(torch.int8), "6:8")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*keep 'all'[\s\S]*both, dense, packed"):
        pack(weight, "6:8", keep="all")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*keep 'none'"):
        pack(weight, "6:8").keeping("none")
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*one scale per output channel"):
        pack(weight.to(torch.int8), "6:8", "int8", scale=torch.ones(3))
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*only with a weight of 8 bits"):
        pack(weight, "6:8", "bf16", scale=torch.ones(4))
    with pytest.raises(ShiplapError, match="SL204"):
        matmul(torch.randn(2, 8), pack(weight, "6:8", "bf16"))


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_is_not_finite_in_its_mode_is_refused(mode: str) -> None:
    """Also one that float16 has no room for: its products would be NaN."""
    weight, scale = prune(torch.randn(4, 8), "6:8"), torch.ones(4)
    for bad in (torch.inf, 1e6) if mode == "fp16" else (torch.inf,):
        broken = weight.clone()
        broken[2, 7] = bad
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*row 2 holds NaN or an infinity"):
            pack(prune(broken, "6:8"), "6:8", mode)
    if mode in EIGHT:
        narrow, scale[2] = weight.to(MODES[mode]), torch.nan
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*row 2 holds NaN or an infinity"):
            pack(narrow, "6:8", mode, scale=scale)
    if mode == "fp8":
        weight[2, weight[2] != 0] = torch.nan
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*row 2 holds NaN or an infinity"):
            pack(weight.to(torch.float8_e4m3fn), "6:8", mode, scale=torch.ones(4))


def test_a_weight_of_8_bits_is_packed_with_its_scale() -> None:
    """A pruned W8A8 checkpoint holds these two; nothing is quantised again."""
    first = pack(prune(torch.randn(12, 40), "6:8"), "6:8", "int8")
    repeated = pack(first.dense, "6:8", "int8", scale=first.scale)
    assert torch.equal(repeated.packed, first.packed)
    assert torch.equal(repeated.weight(), first.keeping("packed").weight())
    assert first.nbytes == sum(t.numel() * t.itemsize for t in (first.dense, first.packed, first.scale))
    assert first.to("cpu") is first
    assert first.keeping("dense").packed is None


# --- one graph --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, packed: Packed, bias: Tensor) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias

    def forward(self, x: Tensor) -> Tensor:
        return matmul(x, self.packed, self.bias)


def test_compiled_for_any_number_of_rows() -> None:
    """fullgraph, rows unknown: one compilation, and what eager mode gives. Inductor and neighbours are the audit's."""
    layer = Layer(pack(prune(torch.randn(33, 70), "6:8"), "6:8", "int8"), torch.randn(33))
    torch.compiler.reset()
    graphs = []

    def counted(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=counted, fullgraph=True, dynamic=True)
    for m in (3, 16, 17, 40):
        x = torch.randn(m, 70)
        assert torch.equal(compiled(x), layer(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("keep", ["both", "dense", "packed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [{"n": 16}, {"n": 48}, {"k": 32}, {"k": 72}, {"pairs": 2}, {"pairs": 3}], ids=str)
def test_fields_that_do_not_fit_the_tensors_are_refused(mode: str, keep: str, change: dict[str, int]) -> None:
    """At this depth windows of 4:6 need as many bytes as those of 6:8."""
    packed = pack(prune(torch.randn(32, 64), "6:8"), "6:8", mode).keeping(keep)
    assert replace(packed, n=32).pattern == packed.pattern
    with pytest.raises(ShiplapError, match="SL211"):
        replace(packed, **change)


def test_tensors_of_other_kinds_are_refused() -> None:
    packed = pack(torch.randn(32, 64))
    assert (str(packed.pattern), packed.packed) == ("dense", None)
    for change in (
        {"scale": None},
        {"scale": packed.scale.double()},
        {"dense": packed.dense.float()},
        {"dense": None},
        {"packed": torch.zeros(8, dtype=torch.uint8)},
        {"mode": "bf16"},
    ):
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*slidesparse.Packed[\s\S]*expected"):
            replace(packed, **change)
