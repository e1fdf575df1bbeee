"""Samples: what is generated, that it fits the declaration, and that it can be rebuilt from its label."""

from __future__ import annotations

import time

import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.audit import Samples, sample
from shiplap.errors import AuditError
from shiplap.sampling import boundary_sizes
from shiplap.sampling.code_constants import find_code_constants
from shiplap.sampling.layouts import LAYOUTS, apply_layout, clone_exactly
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.samples import MAX_SAMPLE_ELEMENTS
from shiplap.sampling.sizes import search_sizes
from shiplap.sampling.values import draw_values


@sl.op("audit_samples::window", requires=("c % 4 == 0", "len(kernel) == 2"), dims={"k": "prod(kernel)"})
def window(
    x: Float[Tensor, "n c"],
    weight: Float[Tensor, "k c"],
    rows: Int32[Tensor, "n k"],
    bias: Float[Tensor, "c"] | None = None,
    kernel: list[int] = [3, 2],  # noqa: B006
    scale: float = 1.0,
) -> Float[Tensor, "n c"]:
    return x * scale + weight.sum(0)


@sl.op("audit_samples::batched", mutates=("x",), contiguous=("y",))
def batched(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch n"], mask: Bool[Tensor, "n"]) -> None:
    x += y


def everything(samples: Samples):
    groups = ("plain", "values", "dtypes", "scalars", "optionals", "edges", "layouts")
    cases = [c for g in groups for c in getattr(samples, g)()]
    return cases + list(samples.grown(4))


@pytest.mark.parametrize("op", [window, batched])
def test_every_case_fits_the_declaration_and_is_rebuilt_from_its_label(op):
    for case in everything(Samples(op, 7)):
        op.bind(case.args)
        repeated = sample(op, case.label, 7)
        for a, b in zip(case.args, repeated.args, strict=True):
            assert type(a) is type(b)
            if isinstance(a, Tensor):
                assert torch.equal(a, b)
                assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
            else:
                assert a == b


def test_another_seed_has_other_values_of_the_same_sizes():
    a, b = (next(Samples(window, seed).plain()) for seed in (1, 2))
    assert a.label == b.label
    assert not torch.equal(a.args[0], b.args[0])


def test_sizes_are_distinct_and_respect_requirements():
    case = next(Samples(window, 0).plain())
    n, c = case.args[0].shape
    assert c % 4 == 0
    assert len({n, c, case.env["k"]}) == 3
    assert all(c.args[0].shape[1] % 4 == 0 for c in everything(Samples(window, 0)))


def test_edges_hold_no_row_one_row_and_the_sizes_around_a_tile():
    rows = {c.args[0].shape[0] for c in Samples(window, 0).edges()}
    assert {0, 1, 15, 16, 17, 31, 33} <= rows
    assert () in {c.args[0].shape[:-1] for c in Samples(batched, 0).edges()}
    assert any(c.args[0].shape[:-1] == (2, 3) for c in Samples(batched, 0).edges())


def test_layouts_hold_every_kind_with_equal_values():
    plain = next(Samples(window, 0).plain()).args[0]
    by_layout = {dict(c.recipe.layouts).get("x"): c.args[0] for c in Samples(window, 0).layouts()}
    assert not by_layout["transposed"].is_contiguous()
    assert by_layout["padded"].stride() == (plain.shape[1] + 3, 1)
    assert by_layout["strided"].stride(-1) == 2
    assert by_layout["offset"].storage_offset() == 3
    assert by_layout["expanded"].stride(0) == 0
    for name in ("offset", "padded", "strided", "transposed"):
        assert torch.equal(by_layout[name], plain)


def test_mutated_contiguous_and_integer_arguments_keep_to_what_they_may():
    for case in Samples(batched, 0).layouts():
        x, y, _ = case.args
        assert 0 not in x.stride()
        assert y.is_contiguous()
    assert all(0 not in c.args[2].stride() for c in Samples(window, 0).layouts())


def test_values_hold_ties_descending_and_zeros():
    by_values = {c.recipe.values: c.args[0].flatten() for c in Samples(window, 0).values()}
    assert by_values["ties"].unique().numel() <= 3
    assert (by_values["descending"].diff() <= 0).all()
    assert not by_values["zeros"].any()
    assert by_values["large"].abs().max() > 100


def test_generated_integers_are_row_numbers():
    for case in everything(Samples(window, 0)):
        x, _, rows, *_ = case.args
        assert ((rows >= 0) & (rows < max(1, len(x)))).all()


def test_optionals_scalars_and_dtypes_vary_one_at_a_time():
    assert [c.args[3] for c in Samples(window, 0).optionals()] == [None]
    assert {tuple(c.args[4]) for c in Samples(window, 0).scalars()} >= {(3, 2), (3, 3), (2, 2)}
    dtypes = {c.args[0].dtype for c in Samples(window, 0).dtypes()}
    assert dtypes == {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def test_members_of_lists_differ_in_size_where_a_dim_has_no_name(ns):
    @sl.op(f"{ns}::paired")
    def paired(x: list[Float[Tensor, "_ c"]], y: list[Float[Tensor, "..."]]) -> Float[Tensor, "c"]:
        return sum((a * b[0]).sum(0) for a, b in zip(x, y, strict=True))

    def sizes(case):
        return tuple([t.shape[0] for t in arg] for arg in case.args)

    samples = Samples(paired, 1)
    uneven = [c for c in samples.lists() if len(set(sizes(c)[0])) > 1]
    assert [sizes(c) for c in uneven] == [([2, 5, 3], [2, 5, 3])]  # of ([5, 0, 1]) the reference takes no first row
    assert sizes(sample(paired, uneven[0].label, 1)) == sizes(uneven[0])


def test_members_of_lists_are_alike_where_the_dims_have_names(ns):
    @sl.op(f"{ns}::alike")
    def alike(x: list[Float[Tensor, "n c"]]) -> Float[Tensor, "n c"]:
        return sum(x[1:], x[0])

    assert {len({t.shape for t in c.args[0]}) for c in Samples(alike, 1).lists()} == {1}


def test_grown_cases_have_only_dims_of_two_and_more():
    sizes = [c.args[0].shape[0] for c in Samples(window, 0).grown(4)]
    assert len(set(sizes)) == 4
    assert min(sizes) >= 2


def test_what_grows_is_a_size_and_not_the_rank():
    @sl.op("audit_samples::any_rank")
    def any_rank(x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return x * 2

    samples = Samples(any_rank, 0)
    assert [dict(case.recipe.sizes) for case in samples.grown(2)] == [{"batch": (7,)}, {"batch": (12,)}]
    assert max(case.args[0].dim() for case in samples._known.values() if case) <= 3


def test_a_builder_gives_the_arguments_and_is_told_what_is_wanted():
    asked = []

    @sl.op("audit_samples::gather")
    def gather(x: Float[Tensor, "n c"], rows: Int32[Tensor, "m"], scale: int = 2) -> Float[Tensor, "m c"]:
        return x[rows] * scale

    @gather.samples
    def _(rng, sizes, dtype, device):
        asked.append((sizes, dtype, device))
        n = max(1, sizes["n"])
        x = torch.randn(n, sizes["c"], generator=rng).to(dtype)
        return x, torch.randperm(n, generator=rng)[: sizes["m"]].int(), sizes["scale"]

    case = next(Samples(gather, 0).plain())
    wanted = {"n": 5, "c": 3, "m": 2, "scale": 2, "absent": ()}
    assert asked[0] == (wanted, torch.float32, torch.device("cpu"))
    assert case.env["m"] == 2


def test_fresh_copies_keep_strides_offset_and_the_bytes_around():
    for name in LAYOUTS:
        t = apply_layout(torch.randn(5, 4, 3), name)
        copy = clone_exactly(t)
        assert torch.equal(copy, t)
        assert (copy.stride(), copy.storage_offset()) == (t.stride(), t.storage_offset())
        assert copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


def test_labels_read_back():
    recipe = SampleRecipe().but(
        sizes={"n": 3, "batch": (2, 3)},
        scalars={"a": float("inf"), "mode": "x, y"},
        dtypes={"Float": "float64"},
        layouts={"x": "padded"},
        values="ties",
        absent=("bias",),
    )
    assert SampleRecipe.parse(str(recipe)) == recipe


@pytest.mark.parametrize("label", ["nonsense", "sizes(n=5", "sizes(n=__import__('os'))", "sizes(1)", "other(n=1)"])
def test_anything_else_is_no_label(label):
    with pytest.raises(AuditError, match="SL502"):
        sample(window, label, 0)


def test_sl502_when_nothing_is_admitted():
    @sl.op("audit_samples::impossible", requires=("n > n",))
    def impossible(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x

    assert search_sizes(impossible.spec) is None
    with pytest.raises(AuditError, match="SL502: no samples can be generated"):
        next(Samples(impossible, 0).plain())


def test_integers_of_every_width_that_the_reference_takes(ns):
    @sl.op(f"{ns}::picked")
    def picked(x: Float[Tensor, "n"], index: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x[index]

    def taken():
        return {str(c.args[1].dtype) for c in Samples(picked, 0).dtypes()}

    assert taken() == {"torch.int64", "torch.int32"}
    picked.samples(lambda rng, sizes, dtype, device: (torch.randn(sizes["n"]).to(dtype), torch.arange(sizes["n"])))
    assert taken() == {"torch.int64", "torch.int32"}, "the integers of a builder are converted"


def test_long_rows_in_which_many_numbers_are_nearly_equal(ns):
    @sl.op(f"{ns}::doubled")
    def doubled(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        return x * 2

    cases = {(dict(c.recipe.sizes)["c"], c.recipe.values): c for c in Samples(doubled, 0).crowded()}
    near = cases[boundary_sizes.CROWDED_SIZE, "cancelling"].args[0]
    upper_bits = near.view(torch.int32) >> 16
    assert max(torch.bincount(row - row.min()).max() for row in upper_bits) > boundary_sizes.LONG_SUM


def test_any_dtype_starts_at_float32():
    @sl.op("audit_samples::anything")
    def anything(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]:
        return x.clone()

    assert next(Samples(anything, 0).plain()).args[0].dtype == torch.float32


def test_peaks_stand_out_once_a_row_and_in_every_column():
    rng = torch.Generator().manual_seed(3)
    peaks = draw_values((40, 40), torch.float32, "peaks", 1, rng).abs() > 7
    assert (peaks.sum(1) == 1).all()
    assert peaks.any(0).all()


def test_a_masked_sample_has_rows_of_nothing_else():
    rng = torch.Generator().manual_seed(3)
    hidden = draw_values((40, 5), torch.float32, "masked", 1, rng) == -torch.inf
    assert hidden.all(1).any()
    assert not hidden.all()


def test_sizes_are_tried_together_and_no_sample_exceeds_the_limit():
    cases = list(Samples(window, 0).tiles())
    assert max(case.numel for case in cases) <= MAX_SAMPLE_ELEMENTS
    assert {case.recipe.values for case in cases} >= {"normal", "peaks", "ascending", "descending", "constant"}


def test_a_builder_is_never_asked_for_a_result_beyond_any_memory():
    """A number of rows is an integer like others, but 2^40 rows of a builder's table would take a machine for hours."""
    asked = []

    @sl.op("samples::rows_from_a_scalar", requires=("rows >= 0",))
    def op(table: Int32[Tensor, "m k"], rows: int) -> Int32[Tensor, "rows k"]:
        return table.new_zeros(rows, table.shape[1])

    @op.samples
    def _(rng, sizes, dtype, device):
        asked.append(sizes["rows"] * sizes["k"])
        return torch.zeros(sizes["m"], sizes["k"], dtype=torch.int32), sizes["rows"]

    drawn = Samples(op, 3)
    assert len(list(drawn.odd_scalars())) >= 4
    assert 100 <= max(asked) <= 1 << 28


def test_a_builder_is_asked_for_usual_scalars_and_the_call_has_the_huge_one():
    asked = []

    @sl.op("samples::remainder", requires=("by >= 1",))
    def op(x: Int64[Tensor, "n"], by: int) -> Int64[Tensor, "n"]:
        return x % by

    @op.samples
    def _(rng, sizes, dtype, device):
        asked.append(sizes["by"])
        return torch.randperm(sizes["by"], generator=rng)[: sizes["n"]], sizes["by"]

    passed = [c.args[1] for c in Samples(op, 3).odd_scalars()]
    assert {2**31 + 5, 2**40 + 1} <= set(passed)
    assert max(asked) < 1 << 20


def test_a_builder_that_is_slow_is_asked_for_less(monkeypatch):
    monkeypatch.setattr("shiplap.sampling.sample_times.AFFORDED_S", 0.08)
    asked = []

    @sl.op("samples::slow_builder")
    def op(x: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        return x * 2

    @op.samples
    def _(rng, sizes, dtype, device):
        asked.append(sizes["n"] * sizes["k"])
        if asked[-1] > 4096:
            burn = time.process_time() + 2e-7 * asked[-1]
            while time.process_time() < burn:
                pass
        return (torch.zeros(sizes["n"], sizes["k"]),)

    assert list(Samples(op, 3).tiles())
    assert 4096 < max(asked) < 900_000  # a million would take ten times what is slow here


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nans_have_several_bit_patterns(dtype):
    drawn = draw_values((40, 40), dtype, "nan", 1, torch.Generator().manual_seed(0))
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    patterns = drawn.view(whole)[torch.isnan(drawn)].unique().tolist()
    assert {torch.iinfo(whole).max, -1} <= set(patterns)
    assert drawn.isfinite().sum() > 1000


def test_lists_of_many_tensors(ns):
    @sl.op(f"{ns}::doubled", mutates="xs")
    def doubled(xs: list[Float[Tensor, "_"]]) -> None:
        for x in xs:
            x.mul_(2)

    assert max(len(c.args[0]) for c in Samples(doubled, 0).lists()) > 110  # of a launch of multi_tensor_apply


def test_sizes_of_heads_that_no_constant_tells_and_more_rows_than_sixteen_bits_count(ns):
    @sl.op(f"{ns}::doubled")
    def doubled(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return x * 2

    cases = list(Samples(doubled, 0).tiles())
    assert {96, 180, 768, 1 << 16} <= {dict(c.recipe.sizes)["d"] for c in cases}
    assert all(c.recipe.values == "normal" for c in cases if 180 in dict(c.recipe.sizes).values())


def test_lists_of_numbers_beyond_small_sizes():
    values = boundary_sizes.odd_scalar_values(window.spec.arg("kernel"), find_code_constants(window))
    assert (9, 10) in values
    assert (-9, -8) in values


def test_values_lie_at_the_last_positions_of_dims(ns):
    """A value may be a position in a row, and the gradient there takes another path."""

    @sl.op(f"{ns}::taken")
    def taken(row: Float32[Tensor, "w"], at: Float32[Tensor, "k"]) -> Float32[Tensor, "k"]:
        return row[at.long()]

    (case,) = Samples(taken, 3).thresholds()
    (kind,) = {case.recipe.values}
    assert kind.split()[:3] == ["around", "4", "2"]  # of five elements and of three
    assert any((case.args[1].abs() == last).any() for last in (4, 2))
