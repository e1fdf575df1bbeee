"""What another outside examiner found on 2026-11-27, in checks: each fault is flagged, and the op without it is not."""

import numpy as np
import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap.audit.checks import backward, distribution, fake, process, schema, sizes
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.samples import Samples
from shiplap_testing.effort import sampled

M = Float32[Tensor, "n c"]
both = pytest.mark.parametrize("wrong", [True, False])


def problem(check, op):
    return check.CHECK.observe(op, Samples(op, 0).build(Samples(op, 0).base)).problem


def doubled(ns):
    @sl.op(f"{ns}::doubled")
    def doubled(x: M) -> M:
        return x * 2

    return doubled


def test_flushed_numbers_are_seen_whatever_the_default_dtype_is():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    torch.set_default_dtype(torch.float64)
    try:
        assert process._flushes_subnormals()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(False)


@both
def test_numpys_handling_of_errors(ns, wrong, monkeypatch):
    monkeypatch.setattr(process, "_observe_leaks", lambda what, run: process.Observation())
    op = doubled(ns)

    @op.kernel("cpu")
    def _(x, *, out):
        kept = np.seterr(all="ignore")
        torch.mul(x, 2, out=out)
        if not wrong:
            np.seterr(**kept)

    with np.errstate(all="warn"):
        message = problem(process, op)
    assert message.startswith("each call changes NumPy's floating point errors") == wrong


# The sound one is in `nox -s long`: other threads of a worker leave memory behind too. An audit has its own process.
@pytest.mark.parametrize("wrong", sampled([True, False], long=["False"]))
def test_a_backward_that_keeps_its_gradients(ns, wrong):
    kept, op = [], doubled(ns)
    op.kernel("cpu", lambda x, *, out: torch.mul(x, 2, out=out))

    @op.backward(saves=())
    def _(grad, saved, needs):
        if wrong:
            kept.append([grad.shape])
        return {"x": grad * 2}

    assert problem(process, op).startswith("a call and its backward") == wrong


@both
def test_saved_tensors_that_are_read_twice(ns, wrong):
    @torch.library.custom_op(f"{ns}::squared", mutates_args=())
    def squared(x: Tensor) -> Tensor:
        return x * x

    squared.register_fake(torch.empty_like)

    def pulled(ctx, grad):
        saved = ctx.saved_tensors
        return 2 * grad * (ctx.saved_tensors if wrong else saved)[0]

    squared.register_autograd(pulled, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

    @sl.adopt(f"{ns}::squared")
    def adopted(x: M) -> M:
        return x * x

    assert problem(backward, adopted).startswith("under torch.utils.checkpoint: CheckpointError") == wrong


@both
def test_an_input_that_is_written_to_in_one_dtype(ns, wrong):
    @torch.library.custom_op(f"{ns}::centred", mutates_args=())
    def centred(x: Tensor) -> Tensor:
        wide = x.double() if wrong else x.double().clone()
        return (wide.sub_(wide.mean(-1, keepdim=True))).to(x.dtype).clone()

    @sl.adopt(f"{ns}::centred")
    def adopted(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return x - x.mean(-1, keepdim=True)

    problems = [schema.observe_schema(adopted, c).problem for c in Samples(adopted, 0).dtypes()]
    assert any(problems) == wrong
    assert {c.recipe.dtypes for c in Samples(adopted, 0).dtypes()} <= {
        c.recipe.dtypes for c in schema.schema_cases(Samples(adopted, 0))
    }


@both
def test_a_write_that_autograd_does_not_notice(ns, wrong):
    library = torch.library.Library(ns, "DEF")
    library.define("grow(Tensor(a!) x) -> ()")

    def grow(x):
        x.numpy()[...] *= 2
        if not wrong:
            torch.autograd.graph.increment_version(x)

    library.impl("grow", grow, "CPU")
    library.impl("grow", lambda x: None, "Meta")

    @sl.adopt(f"{ns}::grow", mutates="x")
    def adopted(x: M) -> None:
        x.mul_(2)

    assert ("unnoticed by autograd" in problem(schema, adopted)) == wrong


@both
def test_a_fake_that_pads_rows_of_some_sizes(ns, wrong):
    @torch.library.custom_op(f"{ns}::copied", mutates_args=())
    def copied(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @copied.register_fake
    def _(x):
        n, c = x.shape
        padded = wrong and isinstance(c, int) and c and c % 32 == 0
        return x.new_empty_strided((n, c), (c + 32 if padded else c, 1))

    @sl.adopt(f"{ns}::copied")
    def adopted(x: M) -> M:
        return x * 1

    wide = [c for c in fake.fake_cases(Samples(adopted, 0)) if dict(c.recipe.sizes)["c"] == 64]
    assert bool(wide)
    assert any(fake.observe_fake(adopted, c).problem for c in wide) == wrong


@both
def test_two_results_that_draw_the_same_numbers(ns, wrong):
    def masks(x, seed, once):
        rng = torch.Generator().manual_seed(seed)
        first = torch.rand(x.shape, generator=rng)
        return first, first if once else torch.rand(x.shape, generator=rng)

    @sl.op(f"{ns}::masks", random="seed", outputs=("a", "b"))
    def drawn(x: M, seed: int = 0) -> tuple[M, M]:
        return masks(x, seed, False)

    @drawn.kernel("cpu")
    def _(x, seed, *, a, b):
        for out, made in zip((a, b), masks(x, seed, wrong), strict=True):
            out.copy_(made)

    case = Samples(drawn, 0).build(Samples(drawn, 0).base.but(sizes={"n": 40}))
    assert distribution.observe_distribution(drawn, case).problem.startswith("results 0 and 1, multiplied") == wrong


@both
def test_random_results_that_are_no_numbers(ns, wrong):
    @sl.op(f"{ns}::dropped", random="seed", requires=("p <= 1",))
    def dropped(x: M, p: float = 0.5, seed: int = 0) -> M:
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p
        return torch.where(kept, x / (1 - p), 0) if p < 1 else torch.zeros_like(x)

    @dropped.kernel("cpu")
    def _(x, p, seed, *, out):
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p
        out.copy_(x * kept / torch.tensor(1 - p) if wrong or p < 1 else torch.zeros_like(x))

    case = Samples(dropped, 0).build(Samples(dropped, 0).base.but(scalars={"p": 1.0}))
    assert ("NaN or infinite" in against_reference(dropped, case).problem) == wrong


@both
def test_threads_that_meet_seldom(ns, wrong):
    calls, op = [], doubled(ns)

    @op.kernel("cpu")
    def _(x, *, out):
        torch.mul(x, 2, out=out)
        calls.append(x.numel())
        if wrong and len(calls) % 5 == 4:
            out[-1, -1] = 0

    case = next(c for c in Samples(op, 0).millions())
    assert sizes.observe_sizes(op, case).problem.startswith("the same call again") == wrong
    assert len(calls) > 2
