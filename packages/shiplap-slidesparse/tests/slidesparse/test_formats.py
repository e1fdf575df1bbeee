"""Pruning, windows, lifting, compression: exhaustive over the groups of N = 2..6, random beyond."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap_slidesparse import Pattern, formats, pack, prune
from tests.slidesparse.patterns import by_counts, greedy, integers, masks, text

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
EVERY = range(2, 9)


def two_of_four(slid: Tensor) -> bool:
    return bool(((slid.reshape(len(slid), slid.shape[1] // 4, 4) != 0).sum(-1) <= 2).all())


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, float8 too."""
    if a.shape != b.shape or a.dtype != b.dtype or a.numel() == 0:  # strides of an empty tensor may forbid a view
        return a.shape == b.shape and a.dtype == b.dtype
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- all groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", range(2, 7))
def test_every_group_of_the_pattern_is_packed_and_multiplied_exactly(pairs: int) -> None:
    """All masks of a group (4,017 for N = 6): 2:4, undone by unslide, and the product of integers is the dense one."""
    rng = torch.Generator().manual_seed(pairs)
    weight = integers(masks(pairs), rng)
    slid = formats.slide_weight(weight, text(pairs))
    assert two_of_four(slid)
    assert torch.equal(formats.unslide_weight(slid, 2 * pairs, text(pairs)), weight)
    x = torch.randint(-128, 128, (16, 2 * pairs), generator=rng)
    lifted = formats.lift_columns(x, pairs)
    assert torch.equal((lifted.double() @ slid.double().t()).long(), x @ weight.long().t())
    packed = formats.compress_two_of_four(slid)
    assert len(packed) == formats.compressed_bytes(*slid.shape, 1)
    assert torch.equal(formats.decompress_two_of_four(packed, *slid.shape, torch.int8), slid)


@pytest.mark.parametrize("pairs", range(2, 7))
def test_the_closed_form_is_the_greedy_rule_and_complete_exactly_for_the_pattern(pairs: int) -> None:
    """One mask for each way to spread non-zeros over pairs (729 for N = 6): only those decide."""
    rng = torch.Generator().manual_seed(pairs)
    weight = integers(by_counts(pairs), rng)
    for row in weight:
        wanted = greedy(row.tolist(), pairs)
        assert (wanted is None) == (int((row != 0).sum()) > 2 * pairs - 2)
        if wanted is None:
            with pytest.raises(ShiplapError, match="SL211"):
                formats.slide_weight(row[None], text(pairs))
        else:
            assert formats.slide_weight(row[None], text(pairs))[0].tolist() == wanted


def test_order_inside_a_pair_does_not_matter_to_the_greedy_rule() -> None:
    """What the test above leaves out, on a sample: all masks of N = 4 against the loop."""
    weight = integers(masks(4), torch.Generator().manual_seed(0))
    slid = formats.slide_weight(weight, "6:8").tolist()
    assert slid == [greedy(row, 4) for row in weight.tolist()]


@pytest.mark.parametrize("pairs", [2, 3, 4])
def test_no_two_places_hold_one_element(pairs: int) -> None:
    """The assignment is unique: each non-zero is in one lane, and that lane reads the element's activation."""
    size = 2 * pairs
    weight = masks(pairs) * torch.arange(1, size + 1)
    slid, source = formats.slide_weight(weight, text(pairs)), formats.lane_sources(size, pairs)
    for row, packed in zip(weight, slid, strict=True):
        lanes = packed.nonzero()[:, 0]
        assert sorted(source[lanes].tolist()) == row.nonzero()[:, 0].tolist()
        assert torch.equal(row[source[lanes]], packed[lanes])


# --- random, larger ---------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(0, 9), st.integers(0, 150), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_random_weights_of_any_depth(pairs: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    dense = torch.randn(n, k, generator=rng) * 40
    dense[dense.abs() < 20] = -0.0
    weight = prune(dense, text(pairs)).to(dtype)
    slid = formats.slide_weight(weight, text(pairs))
    assert slid.shape == (n, formats.lifted_depth(k, pairs))
    assert two_of_four(slid)
    plain = torch.where(weight != 0, weight, torch.zeros((), dtype=dtype))  # no -0.0
    assert same(formats.unslide_weight(slid, k, text(pairs)), plain)
    assert same(formats.slide_weight(plain, text(pairs)), slid)
    assert same(formats.decompress_two_of_four(formats.compress_two_of_four(slid), *slid.shape, dtype), slid)
    x = torch.randn(3, k, generator=rng, dtype=torch.float64)
    lifted, size = formats.lift_columns(x, pairs), weight.double().abs()
    error = (lifted[:3] @ slid.double().t() - x @ weight.double().t()).abs()
    assert (error <= 1e-13 * (x.abs() @ size.t())).all()
    assert lifted[3:].count_nonzero() == 0


@pytest.mark.parametrize("pairs", EVERY)
def test_the_lifted_depth_is_whole_groups_first_then_a_multiple_of_32(pairs: int) -> None:
    for k in (0, 1, 31, 32, 33, 112, 3584, 4096, 8192, 18944):
        groups = -(-k // (2 * pairs))
        assert formats.lifted_depth(k, pairs) == -(-groups * 4 * (pairs - 1) // 32) * 32
    table = {3: (4800, 5472, 10944, 25280), 4: (5376, 6144, 12288, 28416), 5: (5760, 6560, 13120, 30336)}
    for k, depth in zip((3584, 4096, 8192, 18944), table.get(pairs, ()), strict=False):
        assert formats.lifted_depth(k, pairs) == depth


@pytest.mark.parametrize("pairs", [6, 7])
def test_fake_and_real_sizes_agree_for_every_depth(pairs: int) -> None:
    """Known defect elsewhere: the fake computed ``k * 2(L - 2) // L``, wrong for K=112 with groups of 12."""
    from shiplap_slidesparse import ops

    declared = ops._LIFTED["kq"]
    for k in (*range(0, 260), 112, 4096, 18944, 28672):
        cdiv = lambda a, b: -(-a // b)  # noqa: E731
        assert eval(declared, {"cdiv": cdiv, "k": k, "pairs": pairs}) == len(formats.lane_sources(k, pairs))
    assert formats.lifted_depth(112, 6) == 224 != 112 * 20 // 12


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", EVERY)
def test_pruning_keeps_the_largest_and_is_idempotent(pairs: int) -> None:
    weight = torch.randn(6, 2 * pairs * 5 + 3)
    pruned = prune(weight, text(pairs))
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % (2 * pairs))).view(6, -1, 2 * pairs).abs()
    kept = torch.nn.functional.pad(pruned, (0, -weight.shape[1] % (2 * pairs))).view(6, -1, 2 * pairs).abs()
    top = groups.sort(-1, descending=True).values[..., : 2 * pairs - 2].sum(-1)
    torch.testing.assert_close(kept.sum(-1), top)
    assert torch.equal(prune(pruned, text(pairs)), pruned)
    assert torch.equal(pruned[pruned != 0], weight[pruned != 0])
    assert (pruned[:, -3:] == weight[:, -3:]).all() or pairs == 2  # 3 of a longer group: nothing has to go


def test_of_equal_magnitudes_the_first_goes() -> None:
    assert prune(torch.tensor([[1.0, -1.0, 1.0, 1.0]]), "2:4").tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert prune(torch.tensor([[2.0, 1.0, -1.0, 1.0, 2.0, 2.0]]), "4:6").tolist() == [[2.0, 0.0, 0.0, 1.0, 2.0, 2.0]]


def test_magnitudes_are_compared_in_float32_at_least() -> None:
    close = torch.tensor([[1.0, 1.0 + 2**-40, 1.0 + 2**-41, 3.0]], dtype=torch.float64)
    assert prune(close, "2:4").tolist() == [[0.0, 1.0 + 2**-40, 0.0, 3.0]]
    eight = torch.tensor([[448.0, -448.0, 1.0, 0.5]]).to(torch.float8_e4m3fn)
    assert prune(eight, "2:4").float().tolist() == [[448.0, -448.0, 0.0, 0.0]]


def test_a_group_that_k_cuts_short_counts_its_filling_as_zeros() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])  # groups of 4 and 3
    assert prune(weight, "2:4").tolist() == [[0.0, 0.0, 3.0, 4.0, 0.0, 6.0, 7.0]]
    assert prune(weight, "6:8").tolist() == [[0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["3:4", "6:9", "0:2", "16:18", "6/8", "", "-2:0", None, 68])
def test_what_is_no_pattern_is_refused(bad: str) -> None:
    with pytest.raises(ShiplapError, match=r"SL211[\s\S]*expected dense, or \(2N-2\):2N with N from 2 to 8"):
        Pattern.parse(bad)


def test_patterns_say_what_they_cost_and_can_give() -> None:
    six = Pattern.parse("6:8")
    assert (str(six), six.pairs, six.size, six.kept, six.expansion) == ("6:8", 4, 8, 6, 1.5)
    assert six.ceiling == pytest.approx(4 / 3)
    for pairs in (9, 4.0, 1, False):
        with pytest.raises(ShiplapError, match="SL211"):
            Pattern(pairs)


def test_a_weight_that_is_not_of_the_pattern_is_named() -> None:
    weight = torch.zeros(3, 20)
    weight[1, 8:15] = 1
    with pytest.raises(ShiplapError, match=r"7 non-zeros in row 1, columns 8 to 15[\s\S]*expected at most 6 of 8"):
        pack(weight, "6:8", "bf16")
    assert pack(prune(weight, "6:8"), "6:8", "bf16").n == 3


def test_what_is_no_matrix_is_refused() -> None:
    weight = torch.zeros(2, 4)
    for bad in (weight[0], weight[None], weight.bool(), weight.to(torch.complex64), weight.to("meta"), [[0.0]]):
        with pytest.raises(ShiplapError, match=r"SL211[\s\S]*slidesparse.prune[\s\S]*a weight \[n, k\]"):
            prune(bad, "2:4")


def test_nan_is_refused_where_it_has_no_meaning() -> None:
    weight = torch.zeros(2, 4)
    weight[1, 2] = torch.nan
    with pytest.raises(ShiplapError, match="row 1 holds NaN"):
        prune(weight, "2:4")
    for value in (torch.nan, torch.inf):
        weight[1, 2] = value
        with pytest.raises(ShiplapError, match="row 1 holds NaN or an infinity"):
            pack(weight, "2:4", "fp8")


def test_bytes_that_are_no_packed_weight_are_refused() -> None:
    with pytest.raises(ShiplapError, match=r"641 bytes[\s\S]*expected 640 for 32 rows of 32"):
        formats.decompress_two_of_four(torch.zeros(641, dtype=torch.uint8), 32, 32, torch.int8)
    with pytest.raises(ShiplapError, match="more than 2 non-zeros in row 0, lanes 4 to 7"):
        formats.compress_two_of_four(torch.tensor([[0.0, 0, 0, 0, 1, 2, 3, 0]]))


# --- tensor parallelism -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "ranks", "pattern"), [(96, 2, "6:8"), (96, 4, "4:6"), (120, 2, "4:6"), (96, 2, "2:4")])
def test_shards_of_the_pruned_weight_are_packed_by_themselves(k: int, ranks: int, pattern: str) -> None:
    """Depth k / ranks is whole groups: cutting commutes with packing, though k' of the parts is not k' of the whole."""
    rng = torch.Generator().manual_seed(k)
    weight = (prune(torch.randn(8, k, generator=rng), pattern) * 20).to(torch.int8)
    x = torch.randint(-127, 128, (4, k), generator=rng)
    pairs, total = Pattern.parse(pattern).pairs, torch.zeros(4, 8, dtype=torch.float64)
    for part, piece in zip(weight.chunk(ranks, 1), x.chunk(ranks, 1), strict=True):
        total += formats.lift_columns(piece.double(), pairs)[:4] @ formats.slide_weight(part, pattern).double().t()
    assert torch.equal(total.long(), x @ weight.long().t())


def test_a_shard_that_begins_inside_a_group_is_refused_and_pruned_as_a_shard_accepted() -> None:
    ramp = torch.arange(1, 9.0)
    whole = prune(torch.cat((ramp, ramp.flip(0)))[None].repeat(2, 1), "6:8")  # zeros at both ends
    shard = whole[:, 4:]  # groups of the shard begin at its own first column
    with pytest.raises(ShiplapError, match="SL211"):
        pack(shard.contiguous(), "6:8", "int8")
    assert pack(prune(shard, "6:8"), "6:8", "int8").k == 12
