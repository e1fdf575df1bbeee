"""Forms of calls: values, signs and numbers that the arguments of the reference never have."""

import pytest
import torch
import torch.nn.functional as F

from shiplap.judge import variants
from shiplap.judge.checks import _choose_wanted
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.shapes import (
    MANY_ROWS,
    MOST_ROWS,
    _single_dims,
    count_elements,
    neighbouring_shapes,
    shapes_with_many_rows,
    varied_shapes,
)
from shiplap.judge.variants import LARGE, InputFacts, InputForm, make_input_forms, vary_arguments
from shiplap.sampling.perturb import MANY, perturb_arguments


def forms(first, **options):
    return make_input_forms(first, lambda form: True, most=0, **options)


def test_numbers_that_are_never_negative_get_a_sign_where_the_reference_takes_it():
    first = torch.rand(6, 5), torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.rand(3)
    signed = [f.signed for f in forms(first) if f.signed]
    assert sorted(signed) == [(0,), (0, 2), (2,)]
    made = vary_arguments(first, InputForm("", shapes=((6, 5), (4,), (3,)), kind="signed", signed=(0,)), 1)
    assert float(made[0].min()) < 0 <= float(made[2].min())
    assert torch.equal(made[1], first[1])
    roots = FunctionProblem("sqrt", lambda x: x.sqrt(), lambda: [torch.rand(6, 5)], 0.0, vary_shapes=True)
    assert not any(f.signed for f in roots.forms())
    blank = FunctionProblem("unit", lambda x: x / x.norm(dim=1, keepdim=True), lambda: [torch.randn(6, 5)], 0.0)
    assert not any(f.kind == "blank" for f in blank.forms()), "it gives no number for a row of zeros"


def test_lists_of_tensors_have_other_shapes_and_values_too():
    first = ([torch.rand(6, 5), torch.rand(6, 5)], torch.rand(5))
    listed = make_input_forms(first, lambda form: True, most=4)
    other = next(f for f in listed if f.shapes != ((6, 5), (6, 5), (5,)))
    made = vary_arguments(first, other, 1)
    assert tuple(tuple(t.shape) for t in (*made[0], made[1])) == other.shapes


@pytest.mark.parametrize(("value", "differs"), [(0.5, float), (0.0, float), (3, int), (True, bool)])
def test_plain_arguments_get_other_values(value, differs):
    first = torch.randn(4), value
    form = next(f for f in make_input_forms(first, lambda form: True, most=3) if f.plain == (1,))
    assert not form.timed
    made = vary_arguments(first, form, 1)
    assert type(made[1]) is differs
    assert made[1] != value
    assert not any(f.plain for f in forms(first)), "shapes and numbers are fixed"


def test_tensors_of_flags_get_other_flags_and_only_they():
    flags = torch.ones(4, dtype=torch.bool)
    kinds = [{f.kind for f in make_input_forms(g, lambda form: True, most=3)} for g in ((flags,), (torch.randn(4),))]
    assert ["flags" in each for each in kinds] == [True, False]
    form = next(f for f in make_input_forms((flags,), lambda form: True, most=3) if f.kind == "flags")
    assert any(not bool(vary_arguments((flags,), form, seed)[0].all()) for seed in range(20))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_integers_that_are_data_are_large_too(dtype):
    first = (torch.randint(0, 5, (40,), dtype=dtype),)
    made = vary_arguments(first, next(f for f in forms(first) if f.kind == "whole"), 1)
    assert int(made[0].max()) > 5
    assert int(made[0].min()) >= 0


def test_a_reference_that_draws_numbers_or_is_constant_is_known():
    def problem(call):
        return FunctionProblem("it", call, lambda: [torch.randn(8, 9)], 0.0, vary_shapes=False)

    forms = [InputForm("", shapes=((8, 9),))]
    assert problem(lambda x: torch.nn.functional.dropout(x, 0.5)).why_unfit(forms)[0] == "values"
    assert problem(lambda x: x + 0.0 * torch.rand(())).why_unfit(forms) is None
    assert problem(lambda x: torch.softmax(x, 1).sum(1)).why_unfit(forms)[0] == "results"
    assert problem(lambda x: torch.softmax(x, 1)).why_unfit(forms) is None


def test_a_slow_reference_of_large_inputs_gets_fewer_forms_of_full_size():
    first = (torch.empty(1, dtype=torch.int8).expand(2048, LARGE // 1024),)
    sizes = {}
    for slow in (False, True):
        made = make_input_forms(first, lambda form: True, most=4, facts=InputFacts(slow=slow))
        sizes[slow] = [f for f in made if not f.reduced]
    assert len(sizes[True]) < len(sizes[False])
    assert [f.shapes for f in sizes[True] if f.timed] == [((2048, LARGE // 1024),)]
    assert sum(f.timed for f in sizes[False]) == 2


@pytest.mark.parametrize("multiple", [1, 32])
def test_sizes_that_a_reference_requires_stay_where_the_others_are_reduced(multiple):
    """Otherwise all kinds of values were tried at full size, and shapes four times as large, for which memory lacks."""
    own = ((64, 64, 512, 512),)
    first = (torch.empty(1, dtype=torch.int8).expand(own[0]),)

    def runs(form: InputForm) -> bool:
        return form.shapes[0][1] == 64 and form.shapes[0][3] % multiple == 0

    made = make_input_forms(first, runs, most=4)
    full = [f for f in made if not f.reduced]
    assert len(full) <= 5 < len(made)
    assert max(count_elements(f.shapes) for f in full) == count_elements(own)
    assert {f.shapes[0][1] for f in made} == {64}


def test_pairs_of_a_large_tensor_are_exchanged_without_a_permutation_of_all():
    (large,) = perturb_arguments((torch.arange(4.0 * MANY),))
    moved = int((large != torch.arange(4.0 * MANY)).sum())
    assert MANY // 16 < moved <= MANY // 4
    assert torch.equal(large.sort().values, torch.arange(4.0 * MANY))


@pytest.mark.parametrize(
    ("call", "products"),
    [
        (lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True)), False),
        (lambda x: x @ x.t(), True),
        (torch.nn.Linear(9, 4), True),
        (lambda x: torch.ops.aten.mm(x, x.t()), True),
    ],
    ids=["a norm", "a product", "a layer", "an operator"],
)
def test_only_a_reference_that_may_run_products_has_its_operations_counted(call, products):
    """Counting them loads Dynamo, which takes seconds on a busy machine."""
    problem = FunctionProblem("it", call, lambda: [torch.randn(8, 9)], 0.0)
    args = problem.first
    assert problem.runs_products is products
    assert bool(problem.flops(args)) is products


def test_a_dim_of_one_is_not_broadcast_over_others_of_its_size():
    """A layer's input of one channel beside a weight of three, which a reference of plain operators would accept."""
    own = ((4, 3), (3,))
    drawn = [shapes for _ in range(60) for shapes in varied_shapes(own)]
    apart = [(x, w) for x, w in drawn if x[1] != w[0]]
    assert apart
    assert all(1 not in (x[1], w[0]) for x, w in apart)
    assert any(x[0] == 1 for x, _ in drawn)


def test_no_draw_of_layouts_misses_a_stride_that_is_not_one():
    """One in sixteen judgements took a candidate that took the last stride of a matrix as one."""
    first = torch.randn(16, 24), torch.randn(24)
    for _ in range(5):
        made = [vary_arguments(first, form, 1) for form in forms(first) if form.layout]
        assert all(any(drawn[at].stride(-1) not in (0, 1) for drawn in made) for at in range(2))
        assert any(drawn[0].stride(0) < drawn[0].stride(1) for drawn in made)
        assert any(drawn[0].stride(0) > drawn[0].shape[1] and drawn[0].stride(1) == 1 for drawn in made)


def test_numbers_also_become_far_ones_and_change_together() -> None:
    first = torch.randn(4), 3, 0.5, True
    listed = [f for f in make_input_forms(first, lambda form: True, most=3) if f.plain]
    assert sorted((f.plain, f.far) for f in listed) == [
        *(((1,), False), ((1,), True), ((1, 2, 3), False), ((2,), False), ((2,), True), ((3,), False)),
    ]
    for form in listed:
        made = vary_arguments(first, form, 1)
        assert all((made[at] != first[at]) == (at in form.plain) for at in (1, 2, 3))
        if form.far:
            assert made[1] == 3 or made[1] >= 7
            assert made[2] in (0.5, -0.5)


def test_texts_and_lists_of_numbers_get_other_values() -> None:
    first = torch.randn(4), "mean", (4, 6), ["a"]
    listed = make_input_forms(first, lambda form: True, most=3, facts=InputFacts(texts=("mean", "sum")))
    given = {vary_arguments(first, f, 1)[f.text[0]] for f in listed if f.text is not None}
    assert given == {"sum", (6, 4), (5, 6), (4, 7)}
    assert all(f.whole and not f.usual for f in listed if f.text is not None)


def test_arguments_that_repeat_rows_or_columns_are_among_the_layouts() -> None:
    first = (torch.randn(6, 5),)
    made = {f.layout: vary_arguments(first, f, 1)[0] for f in forms(first) if f.layout}
    assert made["expanded"].stride(0) == 0
    assert made["expanded_last"].stride(1) == 0


@pytest.mark.parametrize(("influence", "least"), [([True, True], 1), ([True, False], 2), ([False, True, True], 2)])
def test_one_argument_with_influence_needs_no_gradient_in_a_part_of_the_comparisons(influence, least) -> None:
    assert _choose_wanted(influence, partly=False) == [True] * len(influence)
    for _ in range(8):
        wanted = _choose_wanted(influence, partly=True)
        assert sum(wanted) == least
        assert all(w or has for w, has in zip(wanted, influence, strict=True))
    for only, has in enumerate(influence):
        assert _choose_wanted(influence, partly=True, only=only) == [i == only and has for i in range(len(influence))]


@pytest.mark.parametrize(
    ("names", "given"),
    [(["x", "eps", "way"], {(0.5,), (1.0, True)}), (["x", "eps"], {(0.5,)}), (["x", "BLOCK"], set())],
)
def test_defaults_of_a_reference_get_other_values_where_the_candidate_has_them(names, given, monkeypatch) -> None:
    monkeypatch.setattr(variants.SECRET_RANDOM, "choice", lambda listed: listed[0])

    def scaled(x, eps=1.0, way=False):
        return -x * eps if way else x * eps

    problem = FunctionProblem("scaled", scaled, lambda: (torch.randn(4, 4),), 0.0)
    problem.accepted = names
    added = [f for f in problem.forms() if f.added]
    assert {f.added for f in added} == given
    assert all(problem.draw(f)[1:] == f.added and f.whole for f in added)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), ({"kind": "normal"}, False), ({"kind": "whole"}, True), ({"alike": 0}, True), ({"mark": -100}, True)],
)
def test_forms_that_change_integers_are_known(changes, expected) -> None:
    """On a GPU they are tried on the processor first, also in the shapes of the reference's own inputs."""
    assert InputForm("", shapes=((4,),), **changes).changes_integers == expected


def test_dims_that_have_one_size_by_chance_are_soon_changed_alone() -> None:
    own = ((2, 12, 16), (2, 12, 16), (2, 12, 16))  # of queries, keys and values
    first = list(varied_shapes(own))[: 2 * 3 + 9]
    queries = [s for s in first if s[0][1] != 12 and s[1:] == own[1:] and s[0][::2] == (2, 16)]
    assert len(queries) == 1


def test_one_shape_has_many_rows_and_is_small_elsewhere() -> None:
    ((rows, width), weights), *_ = shapes_with_many_rows(((16, 240), (240, 16)))
    assert MOST_ROWS <= rows < MOST_ROWS + MANY_ROWS
    assert weights[0] == width <= 4 >= weights[1]
    assert list(shapes_with_many_rows(((16,), ()))) == []


def test_many_rows_of_a_usual_width_have_more_elements_than_16_bits_count() -> None:
    ((rows, width), _), *_ = shapes_with_many_rows(((16, 24), (24, 16)))
    assert width == 24
    assert rows * width >= 1 << 16
    assert rows < MOST_ROWS + MANY_ROWS


def test_sizes_become_one_and_change_places() -> None:
    for _ in range(8):
        drawn = list(varied_shapes(((16, 24), (24, 20)), 3))[: 6 + 2 + 3 + 3 + 2]
        assert {(((1, 24), (24, 20))), ((16, 1), (1, 20)), ((16, 24), (24, 1))} <= set(drawn)
        swapped = {((24, 16), (16, 20)), ((20, 24), (24, 16)), ((16, 20), (20, 24))}
        assert len(swapped & set(drawn)) == 2


def test_sizes_near_a_changed_one_are_one_more_and_twice_as_many() -> None:
    one = (((5, 64), (9, 2)), ((5, 64), (9, 2)))
    assert list(neighbouring_shapes(((5, 64), (9, 1)), ((5, 64), (9, 64)))) == [one]
    assert list(neighbouring_shapes(((7, 7), (7, 3)), ((7, 4), (4, 3)))) == [(((7, 8), (8, 3)), ((7, 14), (14, 3)))]
    assert list(neighbouring_shapes(((5, 64),), ((5, 64),))) == []


def test_a_size_that_broadcasting_alone_allows_is_not_tried() -> None:
    def rotated(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., :8] * c, x[..., 8:] * c], -1)

    made = [torch.randn(3, 12, 16), torch.randn(12, 8)]
    problem = FunctionProblem("rotated", rotated, lambda: made, 0.0, vary_shapes=True)
    shapes = {f.shapes for f in problem.forms()}
    assert {(x[-1], c[-1]) for x, c in shapes} == {(16, 8)}
    assert len({x[0] for x, _ in shapes}) > 1
    groups = FunctionProblem("groups", lambda x: x.unflatten(1, (4, -1)).sum(2), lambda: [torch.randn(6, 16)], 0.0)
    # Few of the sizes that are drawn are multiples of four.
    assert any(len({f.shapes[0][1] for f in groups.forms()}) > 1 for _ in range(40)), "a size that four divides"


def test_half_of_the_values_are_exact_numbers_of_the_code_or_small_whole_ones() -> None:
    first = (torch.randn(16, 24),)
    made = [f for f in forms(first, facts=InputFacts(numbers=[3.25, 1e9])) if f.kind == "exact"]
    assert [f.exact for f in made] == [variants.WHOLE_NUMBERS, (3.25,)]
    assert all(f.whole and not f.usual for f in made)
    values = [vary_arguments(first, f, 1)[0] for f in made]
    assert 96 < int((values[0] == values[0].round()).sum()) < 288
    assert 96 < int((values[1] == 3.25).sum()) < 288
    zeros = values[0][values[0] == 0]
    assert set(torch.signbit(zeros).tolist()) == {False, True}, "a function may take the sign of a zero"


def test_lists_of_tensors_of_one_shape_become_longer() -> None:
    first = [torch.randn(3, 4), torch.randn(3, 4)], (torch.randn(3), torch.randn(4)), torch.randn(3, 4)
    (form,) = (f for f in make_input_forms(first, lambda form: True, most=3) if f.longer)
    made = vary_arguments(first, form, 1)
    assert (len(made[0]), len(made[1]), made[0][2].shape) == (3, 2, (3, 4))
    assert form.whole
    assert not form.usual


def test_numbers_become_zero() -> None:
    first = torch.randn(4), 3, 0.5, True, 0
    given = [f.text for f in make_input_forms(first, lambda form: True, most=3) if f.text is not None]
    assert sorted(given) == [(1, 0), (2, 0.0)]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_forms_of_arguments_and_results_of_eight_bits_are_made(kind: torch.dtype) -> None:
    narrow = FunctionProblem("narrow", lambda x: x.to(kind), lambda: [torch.randn(6, 5)], 0.0, vary_shapes=True)
    wide = FunctionProblem("wide", lambda x: x.float() * 2, lambda: [torch.randn(6, 5).to(kind)], 0.0)
    for problem in (narrow, wide):
        assert len(problem.forms()) > 8
    args = narrow.first
    assert not narrow.expect_effects(narrow.forms()[0], args).against([args[0].to(kind)]).problem


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (torch.add, (torch.randn(16, 24), torch.randn(16, 24))),
        (F.scaled_dot_product_attention, [torch.randn(2, 12, 16)] * 3),
        (F.cross_entropy, (torch.randn(16, 24), torch.arange(16))),
    ],
)
def test_arguments_that_share_their_rows_have_many_of_them_together(call, first) -> None:
    problem = FunctionProblem("it", call, lambda: list(first), 0.0, vary_shapes=True)
    many = [f for f in problem.forms() if f.shapes[0][0] >= MANY_ROWS]
    assert many
    assert all(shape[0] == many[0].shapes[0][0] for shape in many[0].shapes)


def test_a_single_dim_that_is_changed_has_another_size_then() -> None:
    for _ in range(100):
        assert all(shapes != ((1, 8), (8, 1)) for shapes, _ in _single_dims(((1, 8), (8, 1))))


def test_sizes_of_the_code_are_among_the_first_of_other_shapes():
    """A candidate that takes long for each shape is called on the first ones alone."""
    first = (torch.randn(40, 50),)
    listed = make_input_forms(first, lambda form: True, most=4, facts=InputFacts(numbers=(777,)))
    others = [form.shapes[0] for form in listed if form.shapes != ((40, 50),)]
    assert any(777 in shape for shape in others[:3])
    assert len(others) == len(set(others))
