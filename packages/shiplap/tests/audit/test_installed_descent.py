"""Walks from refusal to refusal: which argument a message is about, and which value its check wants."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from shiplap.audit.installed.checks import call_op
from shiplap.audit.installed.conditions import calls_that_meet
from shiplap.audit.installed.descent import Descent
from shiplap.audit.installed.draws import CallDraws
from shiplap.audit.installed.places import Place, Property
from shiplap.audit.installed.recipes import CallRecipe, TensorRecipe
from shiplap.audit.installed.refusals import quotes
from shiplap.audit.installed.search import SearchState
from shiplap.scaffold.schema import SchemaField, SchemaForm

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
