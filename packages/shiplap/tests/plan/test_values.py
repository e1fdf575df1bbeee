"""The functions that generated calls use: sizes in words, the device of a call, and whether elements share memory."""

import random

import pytest
import torch

from shiplap import torch_private
from shiplap.plan import sharing
from shiplap.plan.sharing import strided_ranges_meet
from shiplap.plan.values import has_own_memory, place_call, rule_scope, same_size_lists, sizes_text, why_no_value


def test_words_for_sizes_and_for_an_expression_without_a_value():
    assert [sizes_text(sizes) for sizes in ((), (3,), [3, 4])] == ["()", "(3)", "(3, 4)"]
    causes = (ZeroDivisionError("x"), IndexError("x"), KeyError("x"), ValueError("x"), TypeError("its words"))
    assert list(map(why_no_value, causes)) == [
        *("division by zero", "an index outside its list", "an index outside its list", "an empty list", "its words")
    ]


def test_the_device_of_a_call():
    given = torch.device("meta")
    assert place_call(given, "cpu") == given
    assert place_call(None, "meta") == given
    assert place_call(None, None) == torch.device("cpu")
    with torch.device("meta"):
        assert place_call(None, None) == given


def test_lists_of_sizes_are_equal_in_one_condition():
    assert same_size_lists([], []) is True
    assert same_size_lists([2, 3], [2, 3])
    assert not same_size_lists([2, 3], [2, 4])
    assert not same_size_lists([2, 3], [4, 3])
    with pytest.raises(ValueError, match="zip"):
        same_size_lists([2], [2, 3])


def test_symbolic_lists_of_sizes_are_compared_without_a_guard():
    with torch_private.fake_mode(symbolic=True) as mode:
        a, b = (mode.from_tensor(torch.empty(3, 4)).shape for _ in range(2))
        before = len(mode.shape_env.guards)
        assert isinstance(same_size_lists([*a], [*b]), torch.SymBool | bool)
        assert len(mode.shape_env.guards) == before


def test_elements_that_share_memory_are_found_exactly():
    answers = set()
    for seed in range(400):
        dice = random.Random(seed)
        shape = [dice.choice((0, 1, 2, 2, 3, 4)) for _ in range(dice.randint(0, 3))]
        strides = [dice.choice((0, 1, 1, 2, 3, 4, 6)) for _ in shape]
        view = torch.zeros(64).as_strided(shape, strides)
        places = torch.arange(64).as_strided(shape, strides).flatten().tolist()
        answers.add(own := len(set(places)) == len(places))
        assert has_own_memory(view) is own, (shape, strides)
    assert answers == {False, True}


def test_generated_functions_find_their_constants():
    scope = rule_scope({"kind": torch.float32})
    assert scope["kind"] is torch.float32
    assert scope["cdiv"](7, 2) == 4
    assert rule_scope().keys() == scope.keys() - {"kind"}


def test_an_overlap_that_takes_too_long_to_find_counts_as_one(monkeypatch):
    # Two rows of three bytes each, and columns of two: addresses have several places on the grid of strides.
    one, two = ((2, 3), (3, 2), 1), ((2, 2), (5, 3), 1)
    exact = {d for d in range(9) if strided_ranges_meet(d, one, two)}
    places = [{i * s[0] + j * s[1] for i in range(n[0]) for j in range(n[1])} for n, s, _ in (one, two)]
    assert exact == {d for d in range(9) if places[0] & {d + p for p in places[1]}}
    monkeypatch.setattr(sharing, "FEW_ADDRESSES", 9)
    assert all(strided_ranges_meet(d, one, two) for d in range(8))
    monkeypatch.setattr(sharing, "FEW_ADDRESSES", 10)
    assert {d for d in range(9) if strided_ranges_meet(d, one, two)} == exact


def test_more_than_65536_addresses_are_not_compared():
    one, fewer, more = ((2, 20_000), (3, 2), 1), ((2, 12_768), (5, 3), 1), ((2, 12_769), (5, 3), 1)
    # The last addresses of the first are 39,998 and 40,001, so that nothing begins at 40,000.
    assert not strided_ranges_meet(40_000, one, fewer)
    assert strided_ranges_meet(40_000, one, more)
