"""``Literal`` and ``Enum`` arguments and tuples of one, in every way of a call."""

from __future__ import annotations

import dataclasses
import enum
import shutil
from typing import Any, Literal

import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap.sampling.samples import Samples
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails


class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


class Times(enum.IntEnum):
    ONCE = 1
    TWICE = 2


def reduced(x: Tensor, mean: bool) -> Tensor:
    return x.mean(0) if mean else x.sum(0)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)


@pytest.fixture
def literal(ns):
    @sl.op(f"{ns}::literal")
    def literal(x: Float[Tensor, "n c"], mode: Literal["sum", "mean"], k: Literal[1, 2] = 1) -> Float[Tensor, "c"]:
        return reduced(x, mode == "mean") * k

    return literal


@pytest.fixture
def named(ns):
    @sl.op(f"{ns}::named")
    def named(
        x: Float[Tensor, "n c"], mode: Mode = Mode.SUM, *, times: Times | None = None
    ) -> tuple[Float[Tensor, "c"]]:
        assert isinstance(mode, Mode)
        assert times is None or isinstance(times, Times)
        return (reduced(x, mode is Mode.MEAN) * (2 if times is Times.TWICE else 1),)

    return named


def test_choices_are_part_of_the_declaration(literal, named):
    """An op whose argument has other choices is another op, whose compiled code and tuned choices do not serve."""
    mode, k = literal.spec.args[1:]
    other = dataclasses.replace(mode, choices=("sum", "max"))
    assert len({mode.form, other.form, dataclasses.replace(mode, choices=()).form}) == 3
    assert dataclasses.replace(k, choices=(1, 3)).form != k.form
    mode = named.spec.args[1]
    assert dataclasses.replace(mode, members=Times).form != mode.form


X = torch.arange(12, dtype=torch.float32).reshape(4, 3)


def test_the_schema_has_texts_and_ints(literal, named):
    assert str(literal.overload._schema).endswith("(Tensor x, str mode, int k=1) -> Tensor")
    assert str(named.overload._schema).endswith('(Tensor x, str mode="sum", *, int? times=None) -> Tensor')


def test_members_literals_and_a_tuple_of_one_in_eager_calls(literal, named):
    close(literal(X, "mean", 2), X.mean(0) * 2)
    for result in (named(X, Mode.MEAN, times=Times.TWICE), named(X, mode="mean", times=2)):
        assert isinstance(result, tuple)
        close(result, (X.mean(0) * 2,))
    out = torch.empty(3)
    assert named.out(X, Mode.MEAN, out=out) is out
    close(out, X.mean(0))


def test_wrong_choices_are_refused_before_the_call(literal, named):
    where = literal.spec.name
    with fails("SL221", where=f"{where}, argument 'mode'", got="'max'", expected="'sum' or 'mean'"):
        literal(X, "max")
    with fails("SL221", where=f"{where}, argument 'k'", got="3", expected="1 or 2"):
        literal(X, "sum", k=3)
    with fails("SL209", got="int", expected="'sum' or 'mean'"):
        literal(X, 1)
    with fails("SL221", got="'max'", expected="Mode.SUM or Mode.MEAN"):
        named(X, "max")
    with fails("SL209", got="Times", expected="Mode.SUM or Mode.MEAN"):
        named(X, Times.ONCE)
    with fails("SL221", got="3", expected="Times.ONCE or Times.TWICE or None"):
        named(X, times=3)


def test_compiled_and_exported_calls(literal, named):
    def model(x: Tensor, mode: Mode) -> tuple[Tensor, ...]:
        return (literal(x * 2, mode.value), *named(x * 2, mode, times=Times.TWICE))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for mode in Mode:
        close(compiled(X, mode), model(X, mode))
    with pytest.raises(Exception, match=r"SL221: an argument is not one of its allowed values(.|\n)*'sum' or 'mean'"):
        torch.compile(lambda x: literal(x, "max"), backend="aot_eager")(X)

    class Reduce(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return model(x, Mode.MEAN)

    exported = torch.export.export(Reduce(), (X,))
    close(exported.module()(X), model(X, Mode.MEAN))


def test_kernels_conditions_and_gradients_get_members(named):
    seen: list[Any] = []

    @named.kernel("cpu", supports=lambda mode: isinstance(mode, Mode))
    def kernel(x, mode, times, out):
        seen.append((mode, times))
        out.copy_(reduced(x, mode is Mode.MEAN))

    @named.backward
    def _(grad, saved, needs):
        assert isinstance(saved.mode, Mode)
        share = 1 if saved.mode is Mode.SUM else 1 / len(saved.x)
        return {"x": (grad * share).expand(saved.x.shape)}

    x = X.clone().requires_grad_()
    (result,) = named(x, Mode.MEAN)
    result.sum().backward()
    assert seen == [(Mode.MEAN, None)]
    close(x.grad, torch.full_like(X, 0.25))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_c_kernels_get_the_values(ns, tmp_path):
    @sl.op(f"{ns}::act")
    def act(x: Float32[Tensor, "n"], mode: Mode, times: Times, k: Literal[3, 5] = 3) -> Float32[Tensor, "n"]:
        return x * (10 if mode is Mode.MEAN else 1) * times * k

    body = """
    int act(const sl_context* ctx, const DLTensor* x, DLTensor* out, const char* mode, int64_t times, int64_t k) {
      const float factor = (strcmp(mode, "mean") == 0 ? 10 : 1) * times * k;
      for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)out->data)[i] = factor * ((const float*)x->data)[i];
      return SL_OK;
    }
    """
    act.kernel("cpu", sl.cabi(compile_c(tmp_path, "act", {"act": act}, body), "act"))
    for build in (False, True):
        if build:
            binding.build(act)
        close(act(X[0], Mode.MEAN, Times.TWICE, 5), X[0] * 100)
        with fails("SL221", where=f"{ns}::act, argument 'mode'", got="'max'", expected="Mode.SUM or Mode.MEAN"):
            act(X[0], "max", Times.ONCE)
        with fails("SL221", where=f"{ns}::act, argument 'k'", got="4", expected="3 or 5"):
            act(X[0], Mode.SUM, Times.ONCE, 4)


def test_samples_and_builders_draw_every_choice(named):
    assert {case.args[1:] for case in Samples(named, 0).scalars()} >= {("sum", None), ("mean", None), ("sum", 2)}
    asked: list[Any] = []

    @named.samples
    def _(rng, sizes, dtype, device):
        asked.append(sizes["mode"])
        drawn = torch.randn(sizes["n"], sizes["c"], generator=rng, dtype=dtype).to(device)
        return drawn, sizes["mode"], sizes["times"]

    assert {case.args[1] for case in Samples(named, 0).odd_scalars()} == {"sum", "mean"}
    assert {*asked} == {*Mode}
    report = sl.audit(named, checks=["numerics", "arguments"], isolate=False)
    assert report.proven, report.findings


def test_an_adopted_op_is_called_with_choices_only(ns):
    library = torch.library.Library(ns, "FRAGMENT")
    library.define("foreign(Tensor x, str mode) -> Tensor")
    library.impl("foreign", lambda x, mode: reduced(x, mode == "mean"), "CompositeExplicitAutograd")

    @sl.adopt(f"{ns}::foreign")
    def foreign(x: Float[Tensor, "n c"], mode: Literal["sum", "mean"]) -> Float[Tensor, "c"]:
        return reduced(x, {"sum": False, "mean": True}[mode])

    close(foreign(X, "mean"), X.mean(0))
    with fails("SL221", where=f"{ns}::foreign, argument 'mode'", got="'max'", expected="'sum' or 'mean'"):
        foreign(X, mode="max")
    (finding,) = sl.audit(foreign, checks=["arguments"], isolate=False).findings
    assert finding.verdict == "fail"
    assert "wrong choice: mode='sumx': was accepted" in str(finding.evidence)
    library._destroy()


def test_a_default_is_a_choice_and_results_have_none(ns):
    with fails("SL103", "use 'up' or 'down'", got="default 'left'", expected="'up' or 'down'"):

        @sl.op(f"{ns}::default")
        def default(x: Float[Tensor, "n"], way: Literal["up", "down"] = "left") -> Float[Tensor, "n"]: ...

    with fails("SL109", "annotate str"):

        @sl.op(f"{ns}::result")
        def result(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Mode]: ...


def test_a_reference_with_another_tuple_is_refused(ns):
    @sl.op(f"{ns}::pair")
    def pair(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"]]:
        return x * 2

    with fails("SL301", "return (result,)", got="a Tensor", expected="a tuple of one"):
        pair(X[0])


def test_the_place_of_a_declaration_is_that_of_the_function(named):
    from shiplap.cli.target import _declaration_position

    assert named.file == __file__
    assert _declaration_position(named)[1] < _declaration_position(sl.op("place::later")(later))[1]


def later(x: Float[Tensor, "n"], mode: Mode) -> Float[Tensor, "n"]:
    return x
