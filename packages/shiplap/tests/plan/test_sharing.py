"""A tensor that is written to and shares memory with another one: refused in every way of a call, and no other is."""

import random

import numpy as np
import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap.kernels.native import binding
from shiplap.plan.sharing import any_shares_memory, fakes_share_memory, shares_memory, strided_ranges_meet
from shiplap_testing.build import compile_c
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

X = Float32[Tensor, "n"]
BODY = """int add_(const sl_context* ctx, DLTensor* x, const DLTensor* y) {
  for (int64_t i = 0; i < x->shape[0]; ++i)
    ((float*)x->data)[i * x->strides[0]] += ((const float*)y->data)[i * y->strides[0]];
  return SL_OK;
}"""
SHARED = {
    "the same": lambda t: (t[:4], t[:4]),
    "later": lambda t: (t[:4], t[2:6]),
    "earlier": lambda t: (t[2:6], t[:4]),
    "steps": lambda t: (t[0:8:2], t[2:6]),
}
APART = {
    "halves": lambda t: (t[:4], t[4:]),
    "steps": lambda t: (t[0:8:2], t[1:8:2]),
    "columns": lambda t: (t.view(4, 2)[:, 1], t.view(4, 2)[:, 0]),
    "empty": lambda t: (t[:0], t[0:0]),
}
WAYS = ("eager", "compiled", "dynamic", "exported", "native")


@pytest.fixture
def add_(ns, tmp_path):
    @sl.op(f"{ns}::add_", mutates="x", aliases="x")
    def add_(x: X, y: X) -> X:
        return x.add_(y)

    add_.kernel("cpu", sl.cabi(compile_c(tmp_path, "add", {"add_": add_}, BODY), "add_", strided=["x", "y"]))
    return add_


def call(op, way, views, t):
    def f(t):
        op(*views(t))
        return t * 1

    class Model(torch.nn.Module):
        def forward(self, t):
            return f(t)

    with torch.no_grad():
        if way == "native":
            binding.build(op)
        if way == "exported":
            return torch.export.export(Model(), (t.clone(),)).run_decompositions().module()(t)
        if way in ("compiled", "dynamic"):
            return torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=way == "dynamic")(t)
        return f(t)


@pytest.mark.parametrize("way", sampled(WAYS, long=["dynamic"]))
def test_shared_memory_is_refused_alike(add_, way, fresh_compiler):
    for views in SHARED.values():
        t = torch.arange(8.0)
        with pytest.raises(Exception, match="SL210: a mutated tensor is another argument too"):
            call(add_, way, views, t)
        assert torch.equal(t, torch.arange(8.0))


@pytest.mark.parametrize("way", sampled(WAYS, long=["compiled", "exported"]))
def test_views_that_share_no_element_are_served_alike(add_, way, fresh_compiler):
    for views in APART.values():
        t, expected = torch.arange(8.0), torch.arange(8.0)
        add_.reference(*views(expected))
        assert torch.equal(call(add_, way, views, t), expected)
        assert torch.equal(t, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_members_of_a_mutated_list_share_no_memory(ns, compiled, fresh_compiler):
    @sl.op(f"{ns}::grow_", mutates="xs")
    def grow_(xs: list[X], y: X) -> None:
        for x in xs:
            x.add_(y)

    run = torch.compile(lambda t: grow_([t[:4], t[2:6]], torch.ones(4)), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="SL210: two members of a mutated list share memory"):
        run(torch.ones(8)) if compiled else grow_([(t := torch.ones(8))[:4], t[2:6]], torch.ones(4))
    grow_([(t := torch.ones(8))[:4], t[4:]], torch.ones(4))
    assert t.eq(2).all()


def test_two_mutated_arguments_share_no_memory(ns):
    @sl.op(f"{ns}::two_", mutates=("x", "y"))
    def two_(x: X, y: X | None = None) -> None:
        x.add_(1)

    t = torch.ones(8)
    with fails("SL210", got="memory of argument 'y'"):
        two_(t[:4], t[3:7])
    two_(t[:4], t[4:])
    two_(t[:4])


def drawn(dice, base):
    """A view of ``base``."""
    view = base
    for _ in range(dice.randint(0, 4)):
        axis = dice.randrange(max(1, view.dim()))
        makers = (
            lambda v, d: v.narrow(d, begin := dice.randint(0, v.shape[d]), dice.randint(0, v.shape[d] - begin)),
            lambda v, d: v[(slice(None),) * d + (slice(dice.randint(0, 2), None, dice.randint(1, 3)),)],
            lambda v, d: v.transpose(0, d),
            lambda v, d: v.select(d, 0),
            lambda v, d: v.view(dice.choice([torch.uint8, torch.int16, torch.int32])),
            lambda v, d: v.unsqueeze(0).expand(2, *v.shape),
            lambda v, d: v.unfold(d, 2, 1),
        )
        try:
            view = dice.choice(makers)(view, axis)
        except (RuntimeError, IndexError):
            continue
    return view


def bytes_of(view):
    offsets = np.array([view.data_ptr()])
    for stride, size in zip(view.stride(), view.shape, strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride * view.itemsize).ravel()
    return set((offsets[:, None] + np.arange(view.itemsize)).ravel().tolist())


def test_shared_memory_is_found_exactly():
    answers = set()
    for seed in range(500):
        dice = random.Random(seed)
        base = torch.zeros(dice.choice([(24,), (4, 6), (3, 4, 5)]), dtype=dice.choice([torch.int32, torch.uint8]))
        a, b = drawn(dice, base), drawn(dice, base)
        answers.add(shared := bool(bytes_of(a) & bytes_of(b)))
        assert shares_memory(a, b) is shares_memory(b, a) is shared, seed
    assert answers == {False, True}


def test_any_two_of_several_tensors_share_memory():
    t = torch.zeros(8)
    assert not any_shares_memory([t[:2], None, t[2:4], t[4:]])
    assert any_shares_memory([t[:2], None, t[4:], t[1:3]])
    assert not any_shares_memory([])


def test_memory_that_begins_at_the_end_of_a_range_is_shared():
    t = torch.zeros(8, dtype=torch.uint8)
    assert shares_memory(t[:3], t[2:6:2])
    assert not shares_memory(t[:2], t[2:6:2])


def test_ranges_whose_parts_touch():
    """An address has two places on the grid of strides if the smaller strides reach the next one."""
    assert strided_ranges_meet(4, ((5,), (1,), 1), ((2,), (4,), 1))
    # Rows without a gap are one axis, so that millions of addresses need not be compared.
    blocks = ((2, 1000, 1000), (2_001_500, 1000, 1), 1)
    assert not strided_ranges_meet(2_000_500, blocks, ((1000,), (1,), 1))
    assert strided_ranges_meet(2_000_501, blocks, ((1000,), (1,), 1))


def test_fakes_without_elements_share_nothing():
    with torch_private.fake_mode(symbolic=False):
        t = torch.zeros(4, 6)
        assert not fakes_share_memory(t[:0], t)
        assert not fakes_share_memory(t, t[:, 3:3])
        assert not fakes_share_memory(t, torch.zeros(4, 6))


def test_fakes_of_other_dtypes_share_bytes():
    with torch_private.fake_mode(symbolic=False):
        words = torch.zeros(8, dtype=torch.int32)
        parts = words.view(torch.uint8)
        for begin, shared in ((4, False), (7, False), (8, True), (15, True), (16, False)):
            assert fakes_share_memory(words[2:4], parts[begin : begin + 1]) is shared
            assert fakes_share_memory(parts[begin : begin + 1], words[2:4]) is shared


def test_fakes_of_several_dims_share_memory():
    with torch_private.fake_mode(symbolic=False):
        t = torch.zeros(4, 6)
        assert fakes_share_memory(t[:, :4], t[:, 3:])
        assert fakes_share_memory(t[0], t[:, 0])
        assert fakes_share_memory(t[:, 0], t)
        assert not fakes_share_memory(t[:, :3], t[:, 3:])
        assert not fakes_share_memory(t[1], t[2:])
        assert not fakes_share_memory(t[:1], t[1])
