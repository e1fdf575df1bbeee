"""A choice: the wrong never win, there is always a floor, what is stored is not measured again."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap.dispatch import compile_cache_key, tuned_choices
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.tuning import ChoiceStore, measure, recipe_of, select, selector, thaw
from shiplap.tuning.candidate import Candidate, kernel_candidates
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.verify import Verifier, verification_cases
from tests.tuning import ops


def matrices(dtype=torch.float32, k=512):
    return torch.randn(16, k).to(dtype), torch.randn(k, 16).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_truncated_sum_looks_faster_and_never_wins(dtype):
    args = matrices(dtype, k=4096)
    choice = select(ops.mm, recipe_of(ops.mm, args))
    assert choice.label in ("right(WAIT=300)", "reference")  # the faster of those that are right, on this machine
    assert choice.origin == "measured"
    dropped = [f for f in choice.findings if f.verdict == "fail"]
    assert [f.evidence.partition(":")[0] for f in dropped] == ["cut(PARTS=10)", "cut(PARTS=2)"]
    assert all("tolerances on sizes(m=16, k=4096, n=16)" in f.evidence for f in dropped)
    assert "fastest of 3 unverified" in choice.reason  # in this process
    assert choice.runner_up in ("right(WAIT=300)", "reference", "right(WAIT=3000)")


def test_the_choice_is_served_to_its_bucket_and_to_no_other():
    select(ops.mm, recipe_of(ops.mm, matrices()))

    def picked(*args):
        kernel = ops.mm.pick_kernel(ops.mm.bind(args))
        return (kernel.name, str(kernel.config))

    assert picked(torch.ones(15, 500), torch.ones(500, 9)) == ("right", "WAIT=300")
    assert picked(torch.ones(17, 500), torch.ones(500, 9)) == ("cut", "PARTS=10")
    assert picked(torch.ones(15, 500).double(), torch.ones(500, 9).double())[0] == "cut"
    assert picked(torch.ones(500, 15).T, torch.ones(500, 9))[0] == "cut"


def test_what_is_stored_is_not_measured_again():
    recipe = recipe_of(ops.mm, matrices())
    first = select(ops.mm, recipe)
    thaw()
    before = measure.benchmarks
    second = select(ops.mm, recipe)
    assert measure.benchmarks == before
    assert second == first.but(origin="stored")
    assert ops.mm.pick_kernel(ops.mm.bind(matrices())).name == "right"


def test_another_kernel_makes_the_stored_choice_absent(ns):
    def declare(wait):
        @sl.op(f"{ns}::one")
        def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x + 1

        @one.kernel("cpu", name="add", configs=[{"BY": 1}, {"BY": wait}])
        def _(x, *, out, BY):
            torch.add(x, 1 if BY else 0, out=out)

        return one

    one = declare(2)
    recipe = recipe_of(one, (torch.ones(4),))
    assert select(one, recipe).origin == "measured"
    assert select(one, recipe).origin == "stored"
    assert select(declare(3), recipe).origin == "measured"
    one = declare(2)
    thaw()
    assert select(one, recipe).origin == "stored"


def test_a_choice_of_a_rebound_kernel_is_not_served(ns):
    @sl.op(f"{ns}::one")
    def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    def add(x, *, out, BY):
        torch.add(x, 1, out=out)

    one.kernel("cpu", add, configs=[{"BY": 1}, {"BY": 2}])
    call = one.bind((torch.ones(4),))
    entry = tuned_choices.ChoiceEntry(
        one.spec.name, one.identity, ("cpu", *one.rule.key(call)), "add", one.kernels["cpu"][0].space.fixed[1]
    )
    tuned_choices.install_choice_entries([entry])
    assert str(one.pick_kernel(call).config) == "BY=2"
    one.kernel("cpu", add, configs=[{"BY": 1}, {"BY": 2}, {"BY": 3}])
    with pytest.warns(ShiplapNotice, match="made for another version of the op or its kernels"):
        assert str(one.pick_kernel(call).config) == "BY=1"


@pytest.mark.parametrize("wrong", [33, 63])
def test_a_choice_is_right_at_the_edges_of_its_bucket(ns, wrong):
    """It serves calls of 33 to 64 rows, and is tuned with 48."""

    @sl.op(f"{ns}::edged{wrong}")
    def edged(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @edged.kernel("cpu", name="sometimes")
    def _(x, *, out):
        torch.add(x, 1 + (len(x) == wrong), out=out)

    choice = select(edged, recipe_of(edged, (torch.ones(48),)))
    assert choice.kernel == "reference"
    assert f"sizes(n={wrong})" in choice.findings[0].evidence


def test_choices_are_part_of_the_digest_of_compiled_graphs():
    before = compile_cache_key.op_cache_key(ops.mm)
    select(ops.mm, recipe_of(ops.mm, matrices()))
    assert compile_cache_key.op_cache_key(ops.mm) != before
    thaw()
    assert compile_cache_key.op_cache_key(ops.mm) == before


def test_there_is_always_a_fallback(ns):
    @sl.op(f"{ns}::one")
    def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @one.kernel("cpu")
    def broken(x, *, out):
        raise RuntimeError("no such thing")

    choice = select(one, recipe_of(one, (torch.ones(4),)))
    assert (choice.kernel, choice.reason) == ("reference", "the only candidate that is right; 1 dropped, see findings")
    assert "broken: RuntimeError: no such thing" in choice.findings[0].evidence
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the reference was chosen: that is no slow path to be told about
        assert torch.equal(one(torch.ones(4)), torch.full((4,), 2.0))


def test_what_nothing_can_run_now_is_no_answer_for_later(ns):
    full = True

    def add(x):
        if full:
            raise RuntimeError("out of memory")
        return x + 1

    @sl.op(f"{ns}::large")
    def large(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return add(x)

    large.kernel("cpu", lambda x, *, out: out.copy_(add(x)), name="kernel")
    recipe = recipe_of(large, (torch.randn(8),))
    failed = select(large, recipe)
    assert failed.reason.startswith("no candidate could be run, nor the reference; nothing is kept; 2 dropped")
    assert list(ChoiceStore().entries()) == []
    assert tuned_choices.choice_entries() == []
    full = False
    assert select(large, recipe).origin == "measured"


@pytest.mark.parametrize("alike", [True, False])
def test_a_candidate_is_not_verified_by_the_same_values_twice(ns, alike):
    """A result that is kept from the first call would be right in the second one."""

    @sl.op(f"{ns}::plus")
    def plus(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @plus.samples
    def _(rng, sizes, dtype, device):
        n = sizes["n"]
        return (torch.arange(n, dtype=dtype) if alike else torch.randn(n, generator=rng).to(dtype),)

    drawn = draw_inputs(plus, recipe_of(plus, (torch.ones(8),)), "cpu")
    why = selector._unverified(SimpleNamespace(kernel="kept"), drawn, ("ok", ""))
    assert why == (
        "the builder of samples makes the same values for each seed: draw them from its generator "
        "(value x value, order of calls x value is untouched)"
        if alike
        else ""
    )


def test_outputs_and_workspace_arrive_poisoned(ns):
    @sl.op(f"{ns}::pad")
    def pad(x: Float[Tensor, "n"]) -> Float[Tensor, "2*n"]:
        return torch.cat([x, torch.zeros_like(x)])

    @pad.kernel("cpu")
    def assumes_zeros(x, *, out):
        out[: len(x)] = x

    @pad.kernel("cpu", workspace="4 * n")
    def assumes_clean_scratch(x, *, out, workspace):
        out.copy_(torch.cat([x, workspace.view(torch.float32).to(x.dtype)]))

    choice = select(pad, recipe_of(pad, (torch.randn(64),)))
    assert choice.kernel == "reference"
    assert len(choice.findings) == 2


def test_a_small_odd_size_is_tried_as_well(ns):
    @sl.op(f"{ns}::one")
    def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @one.kernel("cpu")
    def whole_tiles(x, *, out):
        out.zero_()
        tiles = len(x) // 4 * 4
        torch.add(x[:tiles], 1, out=out[:tiles])

    choice = select(one, recipe_of(one, (torch.ones(64),)))
    assert choice.kernel == "reference"
    assert "on sizes(n=5)" in choice.findings[0].evidence


def test_a_kernel_that_refuses_is_skipped_not_wrong(ns):
    @sl.op(f"{ns}::one")
    def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @one.kernel("cpu", supports=lambda x: x.dtype == torch.float64 or "double only")
    def double(x, *, out):
        torch.add(x, 1, out=out)

    choice = select(one, recipe_of(one, (torch.ones(64),)))
    assert [(f.verdict, f.evidence) for f in choice.findings] == [("skip", "double: double only")]


def test_integers_without_a_builder_are_refused():
    args = torch.randn(8, 4), torch.zeros(6, dtype=torch.int64)
    assert ops.pick.sampler is None
    with pytest.raises(ShiplapError) as caught:
        select(ops.pick, recipe_of(ops.pick, args))
    assert str(caught.value) == (
        "SL606: the op has no valid inputs to tune on\n"
        "  where    tune_test::pick\n"
        "  got      integer tensors rows without a builder\n"
        "  expected values that mean something\n"
        "  fix      write a function build(rng, sizes, dtype, device) that returns all arguments, and decorate it with "
        "@op.samples"
    )


def test_with_a_builder_indices_are_valid_and_no_zeros(monkeypatch):
    def build(rng, sizes, dtype, device):
        x = torch.randn(sizes["n"], sizes["c"], generator=rng).to(dtype)
        return x, torch.randint(0, sizes["n"], (sizes["m"],), generator=rng)

    monkeypatch.setattr(ops.pick, "sampler", build)
    args = torch.randn(64, 4), torch.zeros(32, dtype=torch.int64)
    choice = select(ops.pick, recipe_of(ops.pick, args))
    assert choice.kernel in ("gather", "reference")
    assert [f.evidence.partition(":")[0] for f in choice.findings] == ["identity"]


def test_a_builder_that_returns_other_sizes_is_refused(monkeypatch):
    monkeypatch.setattr(
        ops.pick, "sampler", lambda rng, sizes, dtype, device: (torch.randn(8, 4), torch.zeros(6, dtype=torch.int64))
    )
    args = torch.randn(64, 4), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ShiplapError) as caught:
        select(ops.pick, recipe_of(ops.pick, args))
    assert caught.value.id == "SL610"
    assert "n<=8, c<=4, m<=8" in caught.value.got
    assert caught.value.expected.startswith("n<=64, c<=4, m<=8")


def test_nothing_tunes_inside_an_op_a_backward_or_a_trace(ns, monkeypatch):
    recipe = recipe_of(ops.mm, matrices())
    messages = []

    def attempt():
        with pytest.raises(ShiplapError) as caught:
            select(ops.mm, recipe)
        assert caught.value.id == "SL608"
        messages.append(caught.value.got)

    @sl.op(f"{ns}::inner")
    def inner(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        attempt()
        return x + 1

    inner(torch.ones(3))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            attempt()
            return grad

    Function.apply(torch.ones(3, requires_grad=True)).sum().backward()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    attempt()
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attempt()
    assert messages == [
        "tuning inside an op",
        "tuning inside a backward pass",
        "tuning inside a function that is being traced",
        "tuning inside a CUDA graph capture",
    ]
    assert not torch_private.in_backward()


def test_a_stored_choice_is_served_where_nothing_may_be_measured(ns):
    recipe = recipe_of(ops.mm, matrices())
    select(ops.mm, recipe)
    collected = []

    @sl.op(f"{ns}::inner")
    def inner(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        collected.append(select(ops.mm, recipe).origin)
        return x + 1

    inner(torch.ones(3))
    assert collected == ["stored"]


def test_extra_fields_separate_choices():
    recipe = recipe_of(ops.mm, matrices())
    plain = select(ops.mm, recipe)
    fused = select(ops.mm, recipe, extra={"epilogue": "gelu"})
    assert (plain.origin, fused.origin) == ("measured", "measured")
    assert select(ops.mm, recipe, extra={"epilogue": "gelu"}).origin == "stored"
    assert len(list(ChoiceStore().entries("tune_test::mm"))) == 2


class Template(Candidate):
    """What fuse/ supplies: not a kernel of the op, prepared once, allocated elsewhere."""

    kernel, fixed, opaque = "template", True, True

    def __init__(self, config, factor):
        self.config, self.factor, self.seen = config, factor, []

    def prepare(self, args):
        self.seen.append(args[0].shape)
        return lambda: (args[0] @ args[1] * self.factor,)


def test_candidates_may_come_from_elsewhere():
    right, wrong = (
        Template(c.config, f) for c, f in zip(kernel_candidates(ops.mm, "cpu", {})[1:3], (1.0, 1.01), strict=True)
    )
    choice = select(
        ops.mm, recipe_of(ops.mm, matrices()), candidates_of=lambda op, inputs: [right, wrong], extra={"from": "test"}
    )
    assert choice.kernel == "template"
    assert choice.config == right.config
    assert [f.evidence.partition(":")[0] for f in choice.findings] == [f"template({wrong.config})"]
    assert {tuple(s) for s in right.seen} == {(16, 512)}, "a fixed candidate is not asked about other sizes"


def test_a_choice_that_does_not_take_a_call_is_passed_over(ns):
    @sl.op(f"{ns}::one")
    def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    @one.kernel("cpu", name="even", supports=lambda x: len(x) % 2 == 0 or "odd")
    def _(x, *, out):
        torch.add(x, 1, out=out)

    call = one.bind((torch.ones(8),))
    tuned_choices.install_choice_entries(
        [tuned_choices.ChoiceEntry(one.spec.name, one.identity, ("cpu", *one.rule.key(call)), "even")]
    )
    assert one.pick_kernel(call).name == "even"
    with pytest.warns(ShiplapNotice, match=r"the chosen kernel does not take this call \(odd\)"):
        assert one.pick_kernel(one.bind((torch.ones(7),))) is None


def test_the_reference_is_computed_once_per_case(monkeypatch):
    calls = []
    reference = ops.mm.reference
    monkeypatch.setattr(ops.mm, "reference", lambda *a: calls.append(1) or reference(*a))
    from shiplap.tuning.inputs import draw_inputs

    drawn = draw_inputs(ops.mm, recipe_of(ops.mm, matrices()), "cpu")
    verifier = Verifier(drawn)
    listed = kernel_candidates(ops.mm, "cpu", {})[1:]
    for candidate in listed:
        verifier.check(candidate)
    assert len(calls) == 2 * len(verification_cases(drawn, listed[0])), "each in its own precision and in float64"
