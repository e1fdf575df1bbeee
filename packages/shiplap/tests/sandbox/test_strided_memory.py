"""Which elements lie in the same memory: compared with counting all places."""

import itertools
import random

import pytest
import torch

from shiplap.sampling.compare import Difference
from shiplap.sandbox import candidate, kept_results, protocol, strided_memory
from shiplap.sandbox.strided_memory import elements_overlap


def counted(shape, stride):
    """Return whether two elements lie in the same place, by listing the places of all."""
    places = [
        sum(i * step for i, step in zip(index, stride, strict=True)) for index in itertools.product(*map(range, shape))
    ]
    return len(set(places)) < len(places)


@pytest.mark.parametrize(
    ("shape", "stride", "same"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (0, 1), True),
        ((3, 4), (2, 1), True),
        ((1, 4), (0, 1), False),
        ((0, 4), (0, 0), False),
        ((), (), False),
        ((3, 2), (2, 3), False),
        ((3, 4), (2, 3), False),
        ((4, 4), (2, 3), True),
        ((2, 3), (3, 2), False),
        ((2, 2, 2), (5, 3, 2), True),
        ((2, 2, 2), (6, 3, 2), False),
        ((1 << 40, 1 << 40), (1 << 40, 1), False),
        ((1 << 40, 1 << 40), (3, 1 << 39), True),
    ],
)
def test_elements_in_the_same_place(shape, stride, same):
    assert elements_overlap(shape, stride) is same


def test_random_sizes_and_strides_as_counted():
    rng = random.Random(48)
    seen = set()
    for _ in range(4000):
        rank = rng.randint(0, 4)
        shape = [rng.randint(0, 4) if rng.random() < 0.05 else rng.randint(1, 4) for _ in range(rank)]
        stride = [rng.randint(0, rng.choice((2, 5, 12, 40))) for _ in range(rank)]
        assert elements_overlap(shape, stride) is counted(shape, stride), (shape, stride)
        seen.add((rank, counted(shape, stride)))
    assert {(2, False), (2, True), (3, False), (3, True), (4, False), (4, True)} <= seen


def test_what_stays_open_may_overlap(monkeypatch):
    """Many dims and large numbers end the search, and nothing is called free of a shared place by that."""
    free = ([2] * 6, [101, 103, 107, 109, 113, 127])
    assert elements_overlap(*free) is counted(*free)
    monkeypatch.setattr(strided_memory, "MAX_STEPS", 3)
    assert elements_overlap([2, 2, 2], [7, 5, 3]), "nothing overlaps here, but three steps do not show it"


def test_a_tensor_in_any_order_of_dims_is_free():
    t = torch.empty(3, 4, 5, 6).permute(2, 0, 3, 1)[1:, :, ::2]
    assert not elements_overlap(t.shape, t.stride())
    assert elements_overlap(t.unfold(1, 2, 1).shape, t.unfold(1, 2, 1).stride())


def test_an_offset_in_a_block_of_a_gpu_is_no_address_of_the_host():
    places = [protocol.TensorLocation("float32", [2], [1], 64, device) for device in ("cpu", "cuda", "cpu")]
    assert kept_results.find_shared_result(places[:2], [torch.ones(2)] * 2) == -1
    assert kept_results.find_shared_result(places, [torch.ones(2)] * 3) == 2


def test_of_a_reply_with_thousands_of_results_only_those_that_are_expected_are_looked_at(monkeypatch):
    """A search takes up to 40 ms. The number of results is compared later."""
    looked = []
    monkeypatch.setattr(candidate, "elements_overlap", lambda *at: looked.append(at) or False)
    reply = protocol.CallPlaces([protocol.TensorLocation("float32", [2], [1], 0, "cpu")] * 10_000)
    expected = candidate.ExpectedEffects([torch.ones(2)], lambda got: Difference(), overlapping=False)
    candidate.check_result_layout(reply, expected)
    assert len(looked) == 1
