"""A call keeps for its backward what the backward reads, however it is called, and nothing else."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.effort import sampled
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.support import fails

M = Float[Tensor, "n c"]
C = Float[Tensor, "c"]


def helper(saved, grad):
    return grad * saved.weight


def kept_of(call):
    """The sizes of all tensors that a call keeps."""
    sizes: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
        out = call()
    return sizes, out


def scaled(ns, **keywords):
    @sl.op(f"{ns}::scaled")
    def scaled(x: M, weight: C, bias: C | None = None, k: int = 2, *, mode: str = "") -> M:
        return x * weight * k if bias is None else x * weight * k + bias

    @scaled.backward(**keywords)
    def _(grad, saved, needs):
        return {
            "x": helper(saved, grad) * saved.k,
            "weight": (grad * saved.x).sum(0) * saved.k if needs.weight else None,
            "bias": grad.sum(0),
        }

    return scaled


def rows(*shape):
    return torch.randn(shape, requires_grad=True)


# Ops of examples: the file, keywords of the declaration, the tensors that a careful author saves, and a training step.
STEPS = {
    "rms_norm": ("first_op", {}, ("x", "weight"), lambda: (rows(64, 32), rows(32))),
    "gather": ("gather_rows", {}, ("feats", "index"), lambda: (rows(64, 32), torch.arange(40))),
    "smooth": ("c_kernel", {}, (), lambda: (rows(16, 8),)),
    "scaled_add": ("readme", {}, (), lambda: (rows(64, 32), rows(64, 32))),
    "dropout": ("language", {"outputs": ("out", "kept")}, ("kept",), lambda: (rows(64, 32), torch.tensor(3), 0.5)),
}


def peak_of(step):
    """The most bytes that a training step holds at once beyond what was there, as torch's allocator counts them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


@pytest.mark.parametrize("name", sampled(STEPS, 3))
def test_a_training_step_of_an_example_holds_no_more_than_by_hand(ns, monkeypatch, tmp_path, name):
    file, keywords, by_hand, arguments = STEPS[name]
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (tmp_path / "readme.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(REPOSITORY / "examples"), *sys.path])
    example = getattr(importlib.import_module(file), name)
    monkeypatch.setattr(example, "kernels", {})  # a backward that calls the op needs no library that make compiles
    everything = [*(a.name for a in example.spec.tensors), *example.spec.results]
    kept, peaks, gradients = [], [], []
    for number, saves in enumerate((by_hand, None, everything)):
        op = sl.op(f"{ns}_{number}::{name}", **keywords)(example.reference)
        op.backward(example.gradient.function, saves=saves)
        torch.manual_seed(0)
        args, storages = arguments(), {}

        def step(op=op, args=args):
            # Arguments and results of a layer inside of a model: nothing but the call holds them.
            out = op(*[a * 1 if isinstance(a, Tensor) and a.requires_grad else a for a in args])
            loss = (out[0] if isinstance(out, tuple) else out).sum()
            del out
            loss.backward()

        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, known=storages: (known.setdefault(t.untyped_storage().data_ptr(), t.nbytes), t)[1], lambda t: t
        ):
            step()
        kept.append(sum(storages.values()))
        gradients.append([a.grad for a in args if isinstance(a, Tensor) and a.requires_grad])
        for a in args:
            if isinstance(a, Tensor):
                a.grad = None
        peaks.append(peak_of(step))
    assert kept[1] <= kept[0] <= kept[2]
    assert 0 < peaks[1] <= peaks[0] <= peaks[2]
    assert peaks[1] < peaks[2] or name == "dropout"  # whose peak is in its backward, on random numbers
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_as_much_as_with_names_written_by_hand(ns, compiled):
    x, w, b = torch.ones(5, 3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    by_hand, by_code = scaled(f"{ns}_a", saves=("x", "weight")), scaled(f"{ns}_b")
    assert by_code.gradient.saves == by_hand.gradient.saves == ("x", "weight")
    sizes = []
    for op in (by_hand, by_code):
        f = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
        kept, out = kept_of(lambda f=f: f(x, w, b))
        out.sum().backward()
        sizes.append(sorted(kept))
    assert sizes[0] == sizes[1]
    if not compiled:
        assert sizes[0] == [(3,), (5, 3)]


def test_results_that_are_read_are_kept(ns):
    @sl.op(f"{ns}::split", outputs=("values", "index"))
    def split(x: M) -> tuple[M, M]:
        return x.exp(), x + 1

    split.backward(lambda grads, saved, needs: {"x": grads[0] * saved.values + grads[1]})
    assert split.gradient.saves == ("values",)


def test_nothing_that_is_not_read_is_kept(ns):
    @sl.op(f"{ns}::stack")
    def stack(xs: list[M], w: C) -> M:
        return sum(xs) * 2

    stack.backward(lambda grad, saved, needs: {"xs": [grad * 2] * 2, "w": None})
    kept, _ = kept_of(lambda: stack([torch.ones(2, 3, requires_grad=True)] * 2, torch.ones(3)))
    assert kept == []


def test_reads_that_cannot_be_found(ns):
    op = scaled(ns)

    def dynamic(grad, saved, needs):
        return {name: grad * getattr(saved, name) for name in vars(needs)}

    with fails("SL134", "saves=", "getattr of it takes a name that is not written out", where=f"{ns}::scaled"):
        op.backward(dynamic)


def test_a_value_that_the_op_does_not_have(ns):
    op = scaled(ns)
    with fails("SL110", got="the backward reads saved.wieght"):
        op.backward(lambda grad, saved, needs: {"x": saved.wieght})


def test_a_value_that_was_not_saved(ns):
    op = scaled(ns)
    op.backward(saves=("x",))(lambda grad, saved, needs: {"x": grad * saved.weight, "weight": None})
    with fails(
        "SL135", where=f"{ns}::scaled", got="saved.weight", expected="k, mode, x", fix="write saves=('x', 'weight')"
    ):
        op(torch.ones(5, 3, requires_grad=True), torch.ones(3)).sum().backward()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_autograd_follows_a_backward(ns):
    op = scaled(ns)
    x, w = torch.ones(5, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        op(x, w).sum().backward()
    assert (x.grad.tolist()[0], w.grad.tolist()) == ([2, 2, 2], [10, 10, 10])
