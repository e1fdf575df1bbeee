"""What is written down of a launch, for C++ to make it again. Whether it does so is tested on a GPU (sparse3d)."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from shiplap.bind import replay
from shiplap.bind.replay import ALIGNMENT, NUMBER, SCRATCH, TENSOR, Recording

Facts = namedtuple("Facts", "num_warps num_ctas shared global_scratch_size profile_scratch_size launch_pdl")


def compiled(types, function=4096, **facts):
    """As Triton's compiled kernels are, as far as a recording looks at them."""
    facts = {"num_warps": 4, "num_ctas": 1, "shared": 100, "global_scratch_size": 0, **facts}
    metadata = Facts(**{"profile_scratch_size": 0, "launch_pdl": False, **facts})
    return SimpleNamespace(function=function, metadata=metadata, src=SimpleNamespace(signature=dict(enumerate(types))))


def test_tensors_numbers_and_scratch_are_told_apart():
    x, out, sums = torch.ones(3), torch.empty(5), torch.empty(2, 5)
    made = Recording(0, [x, out])
    made.share(sums)
    made.add(compiled(["*fp32", "*fp32", "i32", "constexpr", "i64"]), [7], [x, sums, 3, 1, 1 << 40])
    made.add(compiled(["*fp32", "*fp32", "constexpr"], global_scratch_size=128), [2, 3], [sums, out, 2048])
    first = [TENSOR, 0, SCRATCH, 0, NUMBER, 3, NUMBER, 1 << 40, NUMBER, 0, NUMBER, 0]
    second = [SCRATCH, 0, TENSOR, 1, SCRATCH, ALIGNMENT, NUMBER, 0]
    assert made.words == [4096, 7, 1, 1, 128, 100, 6, *first, 4096, 2, 3, 1, 128, 100, 4, *second]
    assert (made.scratch, made.launches, made.unfit) == (ALIGNMENT + 768, 2, "")


@pytest.mark.parametrize(
    ("types", "given", "why"),
    [
        (["fp32"], [1.5], "1.5 as fp32"),
        (["*fp32"], [torch.ones(1)], "does not bring"),
        (["i32"], [1, 2], "zip"),
        (["tensordesc<fp16[64, 64]>"], [3], "as tensordesc"),
    ],
)
def test_what_c_cannot_make_stays_with_python(types, given, why):
    made = Recording(0, [torch.ones(1)])
    made.add(compiled(types), [1], given)
    assert why in made.unfit
    assert replay.served(None, plain := lambda args: args, made, [0], SimpleNamespace(is_cuda=True)) is plain


@pytest.mark.parametrize("facts", [{"num_ctas": 2}, {"profile_scratch_size": 8}, {"launch_pdl": True}])
def test_a_launch_of_another_kind_stays_with_python(facts):
    made = Recording(0, [])
    made.add(compiled([], **facts), [1], [])
    assert "it needs" in made.unfit


def test_a_closed_recording_holds_no_tensor():
    x, sums = torch.ones(3), torch.ones(9)
    made, gone = Recording(0, [x]), [weakref.ref(x), weakref.ref(sums)]
    made.share(sums)
    made.add(compiled(["*fp32", "*fp32"]), [1], [x, sums])
    made.close()
    del x, sums
    gc.collect()
    assert made.launches == 1
    assert [each() for each in gone] == [None, None]


def test_few_calls_start_no_compiler(monkeypatch):
    """And once there is a library, what was prepared is forgotten, so that the next calls are recorded."""
    asked, now = [], replay._State()
    monkeypatch.setattr(replay, "_now", now)
    monkeypatch.setattr(replay, "library", lambda op, start=False: asked.append(start))
    rerun = replay.served(None, lambda args: args, Recording(0, []), [], SimpleNamespace(is_cuda=True))
    for _ in range(replay.HOT):
        rerun(())
    assert asked == [False]
    for _ in range(2 * replay.ASK):
        rerun(())
    assert asked == [False, True, True]
