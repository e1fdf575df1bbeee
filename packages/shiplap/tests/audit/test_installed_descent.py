"""Walks from refusal to refusal: which argument a message is about, and which value its check wants."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shiplap.audit.installed.checks import call_op, check_fake
from shiplap.audit.installed.conditions import calls_that_meet
from shiplap.audit.installed.descent import CRASHED, Descent
from shiplap.audit.installed.draws import CallDraws, siblings_of
from shiplap.audit.installed.places import Place, Property
from shiplap.audit.installed.recipes import CallRecipe, TakenCall, TensorRecipe, evaluate, recipe_from_text
from shiplap.audit.installed.refusals import EMPTY, has_no_kernel, quotes, ranks_in, refusal_form
from shiplap.audit.installed.search import SearchState, search_calls, why_refused
from shiplap.scaffold.schema import SchemaField, SchemaForm, parse_schema

LONG, WORDS = "expected scalar type Long but found", {"float32": "Float", "int64": "Long", "int32": "Int"}


def walk(refuse: Callable[[CallRecipe], str], call: CallRecipe) -> tuple[CallRecipe, str, int]:
    """Return the end of a walk from ``call``, its refusal, and the number of calls that it has made."""
    made: list[CallRecipe] = []

    def attempt(other: CallRecipe, source: CallRecipe) -> str:
        """Count one call."""
        made.append(other)
        return refuse(other)

    end, refusal = Descent(attempt, lambda: len(made) < 400, random.Random(0)).walk(call, refuse(call))
    return end, refusal, len(made)


def test_messages_without_a_name_lead_to_the_arguments_that_they_are_about():
    """Eight tensors, each of which has one dtype and one number of dims, are refused in turn without a name."""
    wanted = {f"t{i}": (("int64", "int32", "float32")[i % 3], 1 + i % 2) for i in range(8)}

    def refuse(call: CallRecipe) -> str:
        """Return the first message, as accessors of torch write it."""
        for name, (dtype, rank) in wanted.items():
            t = call.arguments[name]
            if len(t.shape) != rank:
                return f"TensorAccessor expected {rank} dims but tensor has {len(t.shape)}"
            if t.dtype != dtype:
                return f"expected scalar type {WORDS[dtype]} but found {WORDS.get(t.dtype, 'Short')}"
        return ""

    end, refusal, calls = walk(refuse, CallRecipe({n: TensorRecipe("float32", (6, 6), 1) for n in wanted}))
    assert (refusal, calls < 400) == ("", True)
    assert {n: (t.dtype, len(t.shape)) for n, t in end.tensors()} == wanted


def test_two_sizes_that_differ_become_equal():
    def refuse(call: CallRecipe) -> str:
        """Return a message that names neither tensor."""
        left, right = (t.shape[-1] for _, t in call.tensors())
        return f"inner size, {left} != {right}" if left != right else ""

    end, refusal, _ = walk(refuse, CallRecipe({n: TensorRecipe("float32", (2, s), 1) for n, s in (("x", 7), ("y", 8))}))
    assert refusal == ""
    assert len({t.shape for _, t in end.tensors()}) == 1


def test_the_number_of_members_and_their_dims_change_together():
    def refuse(call: CallRecipe) -> str:
        """Return the message of a check of a list."""
        value = call.arguments["parts"]
        if len(value) != 3:
            return f"got {len(value)} parts"
        return "" if all(len(t.shape) == 1 for t in value) else "Check failed: parts[i].ndimension() == 1 (2 vs. 1)"

    end, refusal, _ = walk(refuse, CallRecipe({"parts": (TensorRecipe("float32", (4, 4), 1),)}))
    assert refusal == ""
    assert [t.shape for t in end.arguments["parts"]] == [(4,)] * 3


@pytest.mark.parametrize(
    ("condition", "place", "value"),
    [
        ("a.numel() == (n + 1) * (b.numel() + 1)", Place("a", Property.NUMEL), 44),
        ("static_cast<uint64_t>(a.numel()) == parts.size()", Place("a", Property.NUMEL), 2),
        ("parts[i].dtype() == c10::kInt || parts[i].dtype() == c10::kLong", Place("parts", Property.DTYPE), "int32"),
        ("b_c.size(-1) % 4 == 0", Place("b", Property.SIZE, 1), 4),
        ("!n || 2 < a->dim()", Place("a", Property.RANK), 3),
        ("n >= b.size(0)", Place("n", Property.NUMBER), 5),
    ],
)
def test_a_condition_in_a_message_is_met(condition, place, value):
    parts = (TensorRecipe("float32", (3, 3), 0),) * 2
    tensors = {"a": TensorRecipe("float32", (4,), 0), "b": TensorRecipe("float32", (5, 2), 0)}
    call = CallRecipe({**tensors, "n": 3, "parts": parts})
    for text in (f"Expected {condition} to be true, but got false.", f"Check failed: {condition} (1 vs. 0)"):
        assert value in [place.value(made) for made in calls_that_meet(text, call)]


@pytest.mark.parametrize("text", ["", "Expected x y to be true, but got false", "Check failed: unknown > 0 (0 vs. 0)"])
def test_a_message_without_a_condition_on_arguments_suggests_nothing(text):
    assert list(calls_that_meet(text, CallRecipe({"a": TensorRecipe("float32", (4,), 0)}))) == []


def test_a_message_quotes_the_property_that_alone_has_changed():
    assert quotes(f"{LONG} Float", f"{LONG} Short", "float32", "int16")
    assert quotes("1 dims but tensor has 4", "1 dims but tensor has 6", 4, 6)
    assert not quotes(f"{LONG} Float", f"{LONG} Int", "float32", "int16")
    assert not quotes("1 dims but tensor has 4", "2 dims but tensor has 6", 4, 6)
    assert not quotes("no dims", "no dims", 4, 6)


def test_a_kernel_that_wants_a_tensor_of_another_device_is_absent():
    text = "RuntimeError: weights[0] must be a GPU or MTIA tensor; it is currently on device CPU"
    assert SearchState(refusals=[text]).reason.startswith("no kernel for the device inside of the op")


def test_a_default_has_the_type_of_its_argument():
    form = SchemaForm("a::b", "", (SchemaField("mode", "int", "0."), SchemaField("eps", "float", "0.")), ())
    drawn = CallDraws(form, 0).first().arguments
    assert [type(v) for v in drawn.values()] == [int, float]


def test_a_call_formats_no_stack(monkeypatch):
    monkeypatch.setattr("traceback.format_stack", lambda *a: pytest.fail("a stack takes longer than a small call"))
    first, second = (call_op(torch.ops.aten.rand.default, {"size": [3]}) for _ in range(2))
    assert torch.equal(first, second)


def test_members_of_other_types_in_a_list_stay():
    x = TensorRecipe("float32", (2,), 1)
    call = CallRecipe({"xs": (x, None, 1.5, x)})
    for kind, value in ((Property.DTYPE, "int64"), (Property.RANK, 2), (Property.SIZE, 3)):
        first, *others, last = Place("xs", kind).with_value(call, value).arguments["xs"]
        assert (first == last, first != x, others) == (True, True, [None, 1.5])


@pytest.mark.parametrize("condition", ["x.numel() == 100000000000", "x.size(0) > 65536", "n == 9999999999"])
def test_a_condition_demands_no_huge_tensor(condition):
    call = CallRecipe({"x": TensorRecipe("float32", (2,), 1), "n": 2})
    assert not list(calls_that_meet(f"Expected {condition} to be true, but got false", call))
    possible = condition.replace(condition.split()[-1], "7")
    assert list(calls_that_meet(f"Expected {possible} to be true, but got false", call))


def test_a_vector_takes_the_sum_of_the_sizes_that_a_message_lists():
    def refuse(call: CallRecipe) -> str:
        """Return torch's message of a split."""
        size, (rows, columns) = call.arguments["x"].shape[0], [call.arguments[n] for n in ("rows", "columns")]
        wanted = [a * b for a, b in zip(rows, columns, strict=False)]
        return f"split_sizes must add up to {size}, but got split_sizes={wanted}" if sum(wanted) != size else ""

    start = CallRecipe({"x": TensorRecipe("float32", (6,), 1), "rows": (40, 30), "columns": (50, 20)})
    end, refusal, _ = walk(refuse, start)
    assert (refusal, end.arguments["x"].shape) == ("", (2600,))


def test_a_size_that_fits_no_value_leads_to_what_it_is_compared_with():
    def refuse(call: CallRecipe) -> str:
        """Return a message that wants more elements than a search makes, until the list is another one."""
        wanted = [n * 1000 for n in call.arguments["parts"]]
        return f"{call.arguments['x'].shape[0]} elements for parts of {wanted}" if sum(wanted) > 4000 else ""

    end, refusal, _ = walk(refuse, CallRecipe({"x": TensorRecipe("float32", (6,), 1), "parts": (8, 9)}))
    assert (refusal, sum(end.arguments["parts"]) <= 4) == ("", True)


def test_a_check_that_was_passed_before_leads_a_walk_no_further():
    """The number of elements of ``rate`` is at fault; each other change of a dtype fails an earlier check."""

    def refuse(call: CallRecipe) -> str:
        """Return the message of the first check that fails."""
        for name in ("a", "b", "c"):
            if call.arguments[name].dtype != "float32":
                return f"expected scalar type Float but found {WORDS.get(call.arguments[name].dtype, 'Short')}"
        return "a Tensor with 36 elements cannot be converted to Scalar" if call.arguments["rate"].shape else ""

    start = CallRecipe({n: TensorRecipe("float32", (6, 6), 1) for n in ("a", "b", "c", "rate")})
    end, refusal, calls = walk(refuse, start)
    assert (refusal, end.arguments["rate"].shape, calls < 400) == ("", (), True)


def test_a_walk_goes_on_from_a_call_that_ends_the_process():
    """A kernel that has passed its checks follows indices, and reads beyond vectors of floats that are short."""

    def refuse(call: CallRecipe) -> str:
        """Return the message of the first check that fails, or of a crash behind them."""
        x, rows = call.arguments["x"], call.arguments["rows"]
        if rows.dtype != "int32":
            return f"expected scalar type Int but found {WORDS.get(rows.dtype, 'Short')}"
        return CRASHED if x.shape[0] < 100 or rows.low != rows.high else ""

    end, refusal, _ = walk(
        refuse, CallRecipe({"x": TensorRecipe("float32", (6,), 1), "rows": TensorRecipe("int64", (6,), 1, 0.0, 2.0)})
    )
    assert (refusal, end.arguments["rows"].low, end.arguments["x"].shape) == ("", 0, (1024,))


def test_a_search_goes_on_from_the_last_step_of_a_walk_that_a_crash_has_ended():
    torch.library.define("walked_ops::add", "(Tensor x, Tensor y) -> Tensor")
    torch.library.impl("walked_ops::add", "CompositeExplicitAutograd", lambda x, y: x[:, None, None] + y[None])
    op = torch.ops.walked_ops.add.default
    form = parse_schema(op._schema)
    step = CallRecipe({"x": TensorRecipe("float32", (5,), 1), "y": TensorRecipe("float32", (7, 7), 1)})
    state, events = SearchState(), list[dict[str, object]]()
    state.take({"kind": "walked", "call": repr(step), "refusal": "y must have 2 dims"})
    search_calls(op, form, 0, 0.2, state, events.append)
    tried = next(recipe_from_text(str(e["call"])) for e in events if e["kind"] == "try")
    assert [n for n, t in tried.arguments.items() if t != step.arguments[n]] in (["x"], ["y"])
    state.take({"kind": "walked", "call": repr(step), "refusal": ""})
    assert state.walked is None
    found = [str(e["call"]) for e in events if e["kind"] == "found"]
    assert len(found) == len(set(found))


def test_a_search_begins_with_the_arguments_that_a_similar_op_took():
    """The ops of a family take equal arguments, or differ in one, about which a refusal speaks."""

    def kernel(x, rows, n):
        if (x.shape, rows.shape, n) != ((3, 17), (29,), 41):
            raise ValueError("the arguments do not fit each other")
        if x.dtype != torch.float64:
            raise ValueError(f"expected Double, got {x.dtype}")
        return x * 2

    torch.library.define("family_ops::second", "(Tensor x, Tensor rows, int n) -> Tensor")
    torch.library.impl("family_ops::second", "CompositeExplicitAutograd", kernel)
    op = torch.ops.family_ops.second.default
    rows = TensorRecipe("int64", (29,), 1, 0.0, 2.0)
    for dtype, begun in (("float64", [1, 2]), ("float32", [1, 2, 3])):
        given = CallRecipe({"x": TensorRecipe(dtype, (3, 17), 1), "rows": rows, "n": 41})
        other = CallRecipe({"x": TensorRecipe("float32", (2,), 1)})
        siblings, events = [TakenCall("family_ops::y", other), TakenCall("family_ops::first", given)], []
        why_refused(op, given)  # the first call of an op takes longer
        search_calls(op, parse_schema(op._schema), 0, 0.1, SearchState(siblings=siblings), events.append)
        assert repr(given) == next(e["call"] for e in events if e["kind"] == "try")
        found = [recipe_from_text(e["call"]).arguments["x"] for e in events if e["kind"] == "found"]
        assert replace(given.arguments["x"], dtype="float64") in found
        assert [e["siblings"] for e in events if e["kind"] == "begun"] == begun


def test_a_drawn_call_that_ends_the_process_is_where_a_search_goes_on():
    state = SearchState()
    call = CallRecipe({"x": TensorRecipe("float32", (2,), 1)})
    for origin in (repr(None), repr(call)):
        state.avoid({"call": repr(call), "origin": origin})
    assert (state.frontier, state.refusals) == ([call], [CRASHED])


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("index_select(): Index is supposed to be a vector", [1]),
        ("Dimension out of range (expected to be in range of [-1, 0], but got 1)", [2]),
        ("Dimension specified as 0 but tensor has no dimensions", [1]),
        ("mat1 must be a matrix, got 3-D tensor", [3, 2]),
        ("the vector of sizes is empty", []),
    ],
)
def test_words_name_numbers_of_dims(text, ranks):
    assert ranks_in(text) == ranks


def test_lists_of_numbers_in_a_message_are_of_one_form():
    assert refusal_form("shape '[2, 3]' of 6") == refusal_form("shape '[4, 5, 6]' of 120")
    assert refusal_form("shape '[2, 3]' of 6") != refusal_form("size '[2, 3]' of 6")


def test_a_call_without_tensors_that_no_kernel_takes_ends_a_search():
    torch.library.define("no_tensors::slot", "(int h) -> int")
    with pytest.raises(NotImplementedError) as e:
        torch.ops.no_tensors.slot(1)
    assert has_no_kernel("no_tensors::slot.default", str(e.value))
    assert not has_no_kernel("no_tensors::other.default", str(e.value))


def test_lists_have_one_number_of_members_and_may_be_nested():
    fields = (SchemaField("indices_group", "Tensor[]"), SchemaField("xs", "Tensor[]"), SchemaField("keys", "str[][]"))
    draws = CallDraws(SchemaForm("a::b", "", fields, ()), 0)
    made = [draws.first().arguments for _ in range(20)]
    assert all(len(m["indices_group"]) == len(m["xs"]) for m in made)
    assert {len(m["xs"]) for m in made} == {1, 2, 3}
    assert all(isinstance(word, str) for m in made for words in m["keys"] for word in words)
    assert {t.dtype for m in made for t in m["indices_group"]} == {"int64"}


def test_calls_of_similar_ops_leave_time_for_others():
    def refuse(x, y):
        raise ValueError(f"not these: {x.shape} {y.shape} {x.dtype}")

    torch.library.define("misled_ops::second", "(Tensor x, Tensor y) -> Tensor")
    torch.library.impl("misled_ops::second", "CompositeExplicitAutograd", refuse)
    op, events = torch.ops.misled_ops.second.default, []
    calls = [CallRecipe(dict.fromkeys("xy", TensorRecipe("float32", (n, 7), 1))) for n in range(2, 26)]
    state = SearchState(siblings=[TakenCall("misled_ops::first", call) for call in calls])
    search_calls(op, parse_schema(op._schema), 0, 0.3, state, events.append)
    begun = max(number for number, e in enumerate(events) if e["kind"] == "begun")
    assert 24 < events[begun]["siblings"] < 48, "a walk from one of them takes all that there is"
    end = next(n for n, e in enumerate(events) if n > begun and (e["kind"], e.get("refusal")) == ("walked", ""))
    assert "try" in [e["kind"] for e in events[end:]]


def test_calls_of_ops_that_are_not_alike_are_left_out():
    """An argument or a word in common does not make an op alike."""
    x = TensorRecipe("float32", (2,), 1)
    names = ("indices", "offsets", "weights", "rows", "total")
    form = SchemaForm("a::split_table_lookup", "", tuple(SchemaField(n, "Tensor") for n in names), ())
    alike = TakenCall("a::table_update", CallRecipe({"indices": x, "offsets": x}))
    named = TakenCall("a::split_table", CallRecipe({"y": x}))
    other = TakenCall("a::cache_lookup", CallRecipe({"indices": x}))
    assert siblings_of(form, [other, alike, named]) == [alike, named]


def test_a_list_takes_the_tensors_that_a_similar_op_takes_one_by_one():
    tensors = {n: TensorRecipe("float32", (k,), k) for k, n in enumerate(("m_host", "m_offsets", "m_scale", "x"), 1)}
    draws = CallDraws(SchemaForm("a::b", "", (SchemaField("m", "Tensor[]"), SchemaField("m_scale", "Tensor")), ()), 0)
    made = draws.from_sibling(TakenCall("a::c", CallRecipe({**tensors, "m_count": 3}))).arguments
    assert made == {"m": (tensors["m_host"], tensors["m_offsets"]), "m_scale": tensors["m_scale"]}


def test_a_tensor_takes_the_whole_numbers_that_a_similar_op_takes_as_a_list():
    draws = CallDraws(SchemaForm("a::b", "", (SchemaField("rows", "Tensor"),), ()), 0)
    made = draws.from_sibling(TakenCall("a::c", CallRecipe({"rows": (3, 4)}))).arguments
    assert evaluate({"rows": str(made["rows"])})["rows"].tolist() == [3, 4]


def test_a_fake_that_takes_fewer_arguments_than_the_kernel_refuses_no_call():
    torch.library.define("fakeless_ops::scaled", "(Tensor x, bool twice=False) -> Tensor")
    torch.library.impl("fakeless_ops::scaled", "CPU", lambda x, twice=False: x * (2 if twice else 1))
    torch.library.register_fake("fakeless_ops::scaled", lambda x: torch.empty_like(x))
    op = torch.ops.fakeless_ops.scaled.default
    call = CallRecipe({"x": TensorRecipe("float32", (3,), 1), "twice": True})
    assert why_refused(op, call) == ""
    assert "takes 1 positional argument but 2" in check_fake(op, lambda: evaluate(call.texts()))


def test_a_search_makes_no_very_large_tensor():
    vector = CallRecipe({"x": TensorRecipe("float32", (56,), 1)})
    shape = Place("x", Property.RANK).with_value(vector, 5).arguments["x"].shape
    assert (len(shape), shape[0], math.prod(shape) < 2000) == (5, 56, True)
    torch.library.define("large_ops::twice", "(Tensor x) -> Tensor")
    torch.library.impl("large_ops::twice", "CompositeExplicitAutograd", lambda x: x * 2)
    op, events = torch.ops.large_ops.twice.default, []
    given = Place("x", Property.SIZE).with_value(vector, 1 << 30)
    state = SearchState(siblings=[TakenCall("large_ops::first", given)])
    search_calls(op, parse_schema(op._schema), 0, 0.05, state, events.append)
    assert repr(given) not in [e["call"] for e in events if e["kind"] == "try"]


def test_members_that_may_be_none_mostly_are():
    draws = CallDraws(SchemaForm("a::b", "", (SchemaField("xs", "Tensor?[]"),), ()), 0)
    made = [draws.first() for _ in range(20)]
    members = [x for call in made for x in call.arguments["xs"]]
    assert 0.5 < members.count(None) / len(members) < 0.9
    assert all(draws.changed(call).arguments["xs"] for call in made)


def test_a_kernel_may_follow_lists_beyond_their_end():
    def refuse(call: CallRecipe) -> str:
        """End the process for short lists, as a kernel does that reads members without a check."""
        return "" if len(call.arguments["flags"]) > 6 < len(call.arguments["sizes"]) else CRASHED

    x = TensorRecipe("float32", (6,), 1)
    end, refusal, _ = walk(refuse, CallRecipe({"xs": (x,), "flags": (True,), "sizes": (1, 2)}))
    assert (refusal, len(end.arguments["xs"])) == ("", 1)


def test_an_op_that_always_returns_no_elements_has_a_call():
    torch.library.define("empty_ops::made", "(Tensor x, int n) -> Tensor")
    torch.library.impl("empty_ops::made", "CompositeExplicitAutograd", lambda x, n: x.new_empty(0))
    op, events = torch.ops.empty_ops.made.default, list[dict[str, object]]()
    search_calls(op, parse_schema(op._schema), 0, 0.1, SearchState(), events.append)
    assert [shape for e in events if e["kind"] == "found" for _, shape in e["results"]] == [[0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "The tensor has a non-zero number of elements, but its data is not allocated yet."),
        ("double", "x must be a CPU or MTIA tensor; it is currently on device META"),
    ],
)
def test_a_kernel_that_fakes_run_in_place_of_a_missing_one_refuses_no_call(name, message):
    def fails(x):
        if x.is_meta:
            raise RuntimeError(message)
        return x * 2

    call = CallRecipe({"x": TensorRecipe("float32", (3,), 1)})
    torch.library.define(f"fakeless_ops::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"fakeless_ops::{name}", "CompositeExplicitAutograd", fails)
    assert why_refused(getattr(torch.ops.fakeless_ops, name).default, call) == ""


def test_a_message_with_a_number_below_zero_quotes_it():
    assert quotes("dilation: 2", "dilation: -1", 2, -1)


def test_from_an_empty_result_only_a_taken_call_leads_further():
    def refuse(call: CallRecipe) -> str:
        """Refuse another dtype, and a vector that is short by an empty result."""
        x = call.arguments["x"]
        if x.dtype != "float32":
            return "x must be Float"
        return EMPTY if x.shape[:1] < (4,) or call.arguments["n"] < 1 else ""

    start = CallRecipe({"x": TensorRecipe("float32", (6,), 1), "n": 0})
    end, refusal, calls = walk(refuse, start)
    assert (refusal, end.arguments["x"].dtype, calls < 20) == ("", "float32", True)
    stuck = CallRecipe({"x": TensorRecipe("float32", (2,), 1), "n": 0})
    assert walk(refuse, stuck)[:2] == (stuck, EMPTY)
