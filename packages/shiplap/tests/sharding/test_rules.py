"""Sharding rules: what is derived from a declaration, what is declared, and what the audit says of them."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit.check import AuditSubject
from shiplap.audit.checks.sharding import CHECK, shard_sizes
from shiplap.errors import ShiplapError
from shiplap.sampling.samples import Samples
from shiplap.sharding.derive import derive_rules, known_rules, samples_like, why_underivable
from shiplap.sharding.simulate import chunk_sizes, merge_shards


@sl.op("rules::project")
def project(
    x: Float[Tensor, "m k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None = None
) -> Float[Tensor, "m n"]:
    out = x @ weight.T
    return out if bias is None else out + bias


@sl.op("rules::soft")
def soft(x: Float[Tensor, "*s"], dim: int = -1) -> Float[Tensor, "*s"]:
    return torch.softmax(x, dim)


@sl.op("rules::largest")
def largest(x: Float[Tensor, "m n"]) -> Float[Tensor, "m"]:
    return x.amax(1)


@sl.op("rules::pick")
def pick(x: Float[Tensor, "n c"], rows: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
    return x[rows]


@sl.op("rules::at")
def at(x: Float[Tensor, "m n"]) -> Int64[Tensor, "m"]:
    return x.argmax(1)


@sl.op("rules::mean")
def mean(x: Float[Tensor, "m n"]) -> Float[Tensor, "m"]:
    return x.mean(1)


@sl.op("rules::centred")
def centred(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x - x.mean(0)


def rules(op, *args) -> dict[str, str]:
    derived = derive_rules(op, samples_like(op, args))
    return {r.name: str(r).partition(": ")[2] + ("" if r.empty else ", never empty") for r in derived}


def test_dims_are_cut_summed_or_left_alone():
    x, w, b = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
    assert rules(project, x, w, None) == {
        "m": "x cut along 0, weight whole → cut along 0",
        "k": "x cut along 1, weight cut along 1 → sum",
        "n": "x whole, weight cut along 0 → cut along 1",
    }
    assert rules(project, x, w, b)["k"] == "x cut along 1, weight cut along 1, bias sum → sum"
    assert rules(largest, x) == {"m": "x cut along 0 → cut along 0", "n": "x cut along 1 → max, never empty"}
    assert rules(mean, x) == {"m": "x cut along 0 → cut along 0"}
    assert rules(centred, x) == {"c": "x cut along 1 → cut along 1"}


def test_rules_are_those_of_the_scalars_and_the_dims_of_a_call():
    x = torch.randn(4, 3, 2)
    assert set(rules(soft, x, 1)) == {"*s[0]", "*s[2]"}
    assert set(rules(soft, x, -1)) == {"*s[0]", "*s[1]"}
    assert set(rules(soft, x[0], 0)) == {"*s[1]"}
    assert {r.name for r in known_rules(soft, (x, 1))} == {"*s[0]", "*s[2]"}
    assert {r.name for r in known_rules(soft, (x, 0))} == {"*s[1]", "*s[2]"}


def test_what_is_numbered_from_its_beginning_is_not_cut():
    assert set(rules(pick, torch.randn(4, 3), torch.tensor([1, 2]))) == {"c", "m"}
    assert set(rules(at, torch.randn(4, 3))) == {"m"}


def test_declared_rules_take_the_place_of_derived_ones():
    @sl.op("rules::declared")
    def declared(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return x + y

    args = torch.randn(4, 3), torch.randn(4, 3)
    assert [r.name for r in known_rules(declared, args)] == ["n", "c"]
    declared.sharding({"x": 0, "y": 0}, 0)
    (rule,) = known_rules(declared, args)
    assert str(rule) == "declared: x cut along 0, y cut along 0 → cut along 0"
    assert CHECK.run(AuditSubject(declared, Samples(declared, 0))).verdict == "ok"
    declared.sharding({"x": 0}, 0)
    finding = CHECK.run(AuditSubject(declared, Samples(declared, 0)))
    assert finding.verdict == "fail"
    assert "raised" in finding.evidence or "shape" in finding.evidence


def test_an_op_may_forbid_cuts():
    @sl.op("rules::forbidden")
    def forbidden(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    forbidden.sharding()
    assert known_rules(forbidden, (torch.randn(3),)) == ()


@pytest.mark.parametrize(
    ("wrong", "part", "evidence"),
    [("sum", {"x": 1}, "result 0"), (0, {"x": 1}, "shape"), ("sum", {"x": 0}, "do not fit together")],
    ids=["mean as a sum", "wrong axis", "sum of rows"],
)
def test_a_wrong_rule_is_caught(wrong, part, evidence):
    @sl.op("rules::wrong")
    def planted(x: Float[Tensor, "m n"]) -> Float[Tensor, "m"]:
        return x.mean(1)

    planted.shardings = None
    planted.sharding(part, wrong)
    finding = CHECK.run(AuditSubject(planted, Samples(planted, 0)))
    assert finding.verdict == "fail"
    assert evidence in finding.evidence
    assert "shards of" in finding.evidence


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ({"y": 0}, 0, "'y'"),
        ({"x": 2}, 0, "2"),
        ({"x": 0}, 5, "5"),
        ({"x": "half"}, 0, "'half'"),
        ({"x": 0}, (0, 0), "parts of 2 outputs"),
    ],
)
def test_a_rule_that_does_not_fit_the_declaration_is_refused(inputs, outputs, reason):
    with pytest.raises(ShiplapError, match=rf"SL218(.|\n)*{reason}"):
        largest.sharding(inputs, outputs)
    assert largest.shardings is None


def test_nothing_is_known_of_ops_without_rules():
    @sl.op("rules::grow", bounds={"m": "n"})
    def grow(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        return x[x > 0]

    @sl.op("rules::listed")
    def listed(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return xs[0] + 1

    assert why_underivable(grow) == "its sizes depend on data"
    assert why_underivable(listed) == "it takes a list of tensors"
    assert CHECK.run(AuditSubject(grow, Samples(grow, 0))).verdict == "skip"


def test_chunks_are_those_of_torch():
    for size in range(9):
        for world in (1, 2, 3, 4):
            torchs = [len(c) for c in torch.arange(size).chunk(world)] if size else []
            assert chunk_sizes(size, world) == [*torchs, *[0] * (world - len(torchs))]
    assert all(sum(sizes) == 7 for sizes in shard_sizes(7))
    assert any(sizes[1] == 0 for sizes in shard_sizes(7))


def test_parts_are_put_together():
    parts = [[torch.tensor([1.0, 5.0])], [torch.tensor([3.0, 2.0])]]
    assert merge_shards(["sum"], parts)[0].tolist() == [4.0, 7.0]
    assert merge_shards(["max"], parts)[0].tolist() == [3.0, 5.0]
    assert merge_shards(["min"], parts)[0].tolist() == [1.0, 2.0]
    assert merge_shards([0], parts)[0].tolist() == [1.0, 5.0, 3.0, 2.0]
