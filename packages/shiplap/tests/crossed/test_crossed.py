"""Crossed declarations: a seeded part of them, the faults that they must find, the plan, the table and the restart."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from shiplap_testing.crossed import child
from shiplap_testing.crossed.declared import (
    COMPILED,
    OUTSIDE,
    STATES,
    Declared,
    draw,
    fitting,
    pairs,
    plan,
    plan_missing,
    with_feature,
    with_pair,
)
from shiplap_testing.crossed.faults import FAULTS, WRONG_VALUES, faulty
from shiplap_testing.crossed.impossible import is_one_kind, why_impossible
from shiplap_testing.crossed.native_source import template_unable, triton_unable
from shiplap_testing.crossed.observe import Observed, difference
from shiplap_testing.crossed.run import FAILURES, Limits, read, run, run_batch
from shiplap_testing.crossed.shrink import script, shrink
from shiplap_testing.crossed.table import markdown, missing_pairs, reason_of, tabulate
from shiplap_testing.effort import sampled

COUNT = 40
PARTS = 4  # for the processes of a run
SLOW = (*COMPILED, "packaged")


def records_of(cases, folder, first=("eager",)):
    """What the cases do, in this process."""
    found = []
    child.run(cases, folder, "cpu", set(), lambda **fields: found.append(fields), first)
    return [r for r in found if "outcome" in r and r["way"] != "whole"]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Caches and ops of this test alone; no binding but what a case asks for."""
    from shiplap.dispatch import registry

    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    yield tmp_path
    for op in [op.spec.name for op in registry.declared_op_list() if op.spec.namespace == "crossed"]:
        registry.forget_op(op)


@pytest.mark.usefixtures("fresh_compiler")
def test_each_planted_fault_is_found_and_only_the_fault(alone):
    """The same declarations without their faults agree: the fault is what is found."""
    cases = [faulty(name, seed) for seed, name in enumerate(WRONG_VALUES, 900_000)]
    sound = [replace(case, seed=case.seed + 100, fault="") for case in cases]
    records = records_of([*cases, *sound], alone)
    for case in cases:
        fault = FAULTS[case.fault]
        (found,) = [r for r in records if r["seed"] == case.seed and r["way"] == fault.way]
        assert found["outcome"] == "differs", (case.fault, found)
    assert not [r for r in records if r["seed"] >= 900_100 and r["outcome"] != "met"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("part", sampled(range(PARTS), 1))  # nox -s crossed: thousands
def test_a_seeded_part_agrees_with_its_references(alone, part):
    """Without what compiles for seconds: bindings, loops of Inductor, Triton."""
    cases = plan(COUNT, interpreter=False)[part::PARTS]
    cases = [replace(c, binding="python", ways=tuple(w for w in c.ways if w not in SLOW)) for c in cases]
    records = records_of(cases, alone, ("eager", "aot_eager"))
    assert not [r for r in records if r["outcome"] in (*FAILURES, "unwritten")]
    met = Counter(r["way"] for r in records if r["outcome"] == "met")
    assert min(met["eager"], met["aot_eager"]) >= len(cases) / 2
    assert len(met) > 4


@pytest.mark.usefixtures("fresh_compiler")
def test_a_plain_declaration_is_met_in_a_region(alone):
    """What torch cannot do in a region does not apply, so that a fault of this way would hide behind that."""
    writing = Declared(920_001, state="mutated", outs=(), ways=("nested",))
    records = records_of([Declared(920_000, ways=("nested",)), writing], alone)
    assert [r["outcome"] for r in records] == ["met"] * 4


def test_an_infinite_gradient_hides_no_other():
    exact = [torch.tensor([torch.inf, 1.0]), torch.tensor([1.0])]
    own, wide = Observed(grads=list(exact)), Observed(grads=[g.double() for g in exact])
    assert difference(Observed(grads=list(exact)), own, wide, 1) == ""
    assert "gradient 1" in difference(Observed(grads=[exact[0], exact[1] * 2]), own, wide, 1)


def test_only_what_can_be_written_is_drawn():
    cases = [c for device in ("cpu", "cuda") for c in plan(100, 1, device)]
    assert {"template", "triton"} <= {c.kernel for c in cases}
    assert not any(template_unable(c) for c in cases if c.kernel == "template")
    assert not any(triton_unable(c) for c in cases if c.kernel == "triton")


@pytest.mark.long
def test_a_longer_plan_begins_with_the_shorter_one_and_each_case_survives_json():
    long, short = plan(60), plan(20)
    assert long[:20] == short
    assert [Declared.from_json(json.loads(json.dumps(c.to_json()))) for c in long] == long
    assert {c.state for c in plan(200)} == set(STATES)
    assert all(fitting(c) == c for c in long)


def test_a_plan_covers_pairs_that_chance_leaves_out():
    """Of several cases the plan takes that with rare pairs: the rare half of the pairs comes more often."""

    def counts(among):
        found = Counter(p for c in plan(300, among=among) for way in c.ways for p in pairs(c.features, way))
        return sum(1 for n in found.values() if n >= 3)

    assert counts(6) > counts(1)


def test_each_feature_can_be_given_to_a_declaration():
    """So that the plan can give the pair that came least, of each kind of feature."""
    cases = plan(120)
    features = {f for c in cases for f in (*c.features, *(f"way:{w}" for w in c.ways))}
    assert len(features) > 90
    for feature in sorted(features):
        given = [fitting(with_feature(c, feature)) for c in cases[:40]]
        assert any(feature in (*c.features, *(f"way:{w}" for w in c.ways)) for c in given), feature


@pytest.mark.parametrize(
    "pair",
    [
        ("kernel:c_aligned", "out:list"),  # chance draws it for one declaration in thousands
        ("kernel:template", "way:jvp"),
        ("out:perhaps", "state:mutated_list"),
        ("state:view", "way:inductor_dynamic"),
        ("binding:packaged", "out:size"),
    ],
)
def test_a_rare_pair_is_given_to_a_declaration(pair):
    never = ("kernel:template", "out:kept")
    drawn = [draw(number, random.Random(number)) for number in range(0, 160, OUTSIDE)]
    given = [found for case in drawn if (found := with_pair(case, [never, pair], "cpu"))]
    assert given
    assert all({*pair} <= {*case.features, *(f"way:{w}" for w in case.ways)} for case in given)
    assert not any(with_pair(case, [never], "cpu") for case in drawn)


@pytest.mark.parametrize("device", sampled(["cpu", "cuda"], long=["cuda"]))
def test_each_pair_of_features_is_given_to_a_declaration_or_impossible(device):
    """``impossible.py`` says of exactly those pairs why, which no declaration of the generator gets."""
    drawn = [draw(number, random.Random(number), device) for number in range(0, 20 * OUTSIDE, OUTSIDE)]
    cases = [*drawn, *plan(200, 5, device, among=1)]
    features = sorted({f for c in cases for f in (*c.features, *(f"way:{w}" for w in c.ways))})
    assert len(features) > 105
    wrong = [
        pair
        for pair in combinations(features, 2)
        if not is_one_kind(*pair)
        if bool(why_impossible(*pair)) == any(with_pair(case, [pair], device) for case in drawn)
    ]
    assert not wrong, wrong


@pytest.mark.long  # three processes that import torch
def test_a_crash_and_a_hang_are_findings_and_what_is_left_runs():
    cases = [faulty("crash", 910_000), faulty("hang", 910_001), replace(faulty("tail", 910_002), fault="")]
    found = []
    run_batch(cases, "cpu", found.append, limits=Limits(20.0))
    outcomes = {(r["seed"], r["way"]): r["outcome"] for r in found}
    assert outcomes[910_000, "eager"] == "crashed"
    assert outcomes[910_001, "eager"] == "hung"
    assert outcomes[910_002, "eager"] == "met"


def test_a_case_that_waits_for_its_package_stays_when_another_one_crashes(monkeypatch):
    cases, children = plan(3), []

    def child(left, skip, *_):
        children.append(([case.seed for case in left], [*skip]))
        if len(children) > 1:
            return [], (-1, ""), "done"
        first, second, third = (case.seed for case in left)
        met = {"seed": first, "way": "eager", "outcome": "met"}
        return [met, {"seed": second, "way": "whole", "outcome": "done"}], (third, "eager"), "status -11"

    monkeypatch.setattr("shiplap_testing.crossed.run._child", child)
    found = []
    run_batch(cases, "cpu", found.append)
    assert [r["outcome"] for r in found] == ["crashed"]
    left, skip = children[1]
    assert left == [cases[0].seed, cases[2].seed]
    assert {(cases[0].seed, "eager"), (cases[2].seed, "eager")} <= {*skip}


def test_a_run_goes_on_where_it_stopped(monkeypatch, tmp_path):
    ran = []

    def batch(cases, device, tell, limits):
        for case in cases:
            ran.append(case.seed)
            tell({"seed": case.seed, "way": "eager", "outcome": "met", "detail": "", "served": ["kernel", "binding"]})
            tell({"seed": case.seed, "way": "whole", "outcome": "done"})

    monkeypatch.setattr("shiplap_testing.crossed.run.run_batch", batch)
    cases, path = plan(7), tmp_path / "results.jsonl"
    assert len(list(run(cases[:3], path, batch=2))) == 6  # a result and an end of each
    path.write_text(path.read_text() + '{"seed": 3, "wa')  # a line that was cut off
    list(run(cases, path, batch=2))
    assert ran == [c.seed for c in cases]
    table = tabulate(cases, read(path))
    assert table.outcomes == {"met": 7}
    assert min(table.met.values()) >= 1
    assert "7 declarations" in markdown(table, cases)


def test_a_refusal_counts_for_its_pairs_and_meets_none():
    case = plan(1)[0]
    detail = "SL404: SL404: the declaration has no equivalent in C | where    crossed::d0, argument 'ts' | got 7"
    table = tabulate([case], [{"seed": case.seed, "way": "eager", "outcome": "refused", "detail": detail}])
    assert not table.met
    (reason,) = {r for counts in table.refused.values() for r in counts}
    assert reason == reason_of(detail)
    assert "SL404" in reason
    assert "d0" not in reason
    assert table.scarce


def test_what_fails_is_shrunk_to_what_makes_it_fail(monkeypatch):
    big = replace(plan(1)[0], terms=("second", "float", "text"), outs=("rows", "same"), rank=3, seed=5)

    def fake_batch(cases, device, tell, limits):
        bad = "float" in cases[0].terms and "rows" in cases[0].outs
        tell({"seed": 5, "way": "eager", "outcome": "differs" if bad else "met", "detail": "result: wrong"})

    monkeypatch.setattr("shiplap_testing.crossed.shrink.run_batch", fake_batch)
    failure = {"seed": 5, "way": "eager", "outcome": "differs", "detail": "result: wrong"}
    least = shrink(big, failure)
    assert (least.terms, least.outs, least.rank, least.kernel) == (("float",), ("rows",), 2, "none")
    compile(script(least, failure), "script", "exec")


def test_a_float64_sum_that_cancels_may_be_rounded_and_not_wrong():
    exact = torch.tensor(-0.0236, dtype=torch.float64)
    rounded, wrong = exact + 3e-16, exact + 1e-12
    own, wide = Observed(outs=[exact], aliases=[-1], requires=[False]), Observed(outs=[exact])
    own.summed = 100.0
    assert not difference(Observed(outs=[rounded], aliases=[-1], requires=[False]), own, wide, 60)
    assert difference(Observed(outs=[wrong], aliases=[-1], requires=[False]), own, wide, 60)


def test_pairs_that_were_met_too_rarely_are_declared_again():
    met = {"kernel:c x way:checkpoint": 17, "state:mutated_list x way:out": 19, "rank:1 x rank:2": 0, "a x b": 20}
    missing = missing_pairs(met)
    assert missing == {("kernel:c", "way:checkpoint"): 8, ("state:mutated_list", "way:out"): 4}
    cases = plan_missing(missing, 7)
    assert [c.seed // 1_000_000 for c in cases] == [7] * len(cases)
    found = Counter(p for c in cases for p in {p for way in c.ways for p in pairs(c.features, way)})
    assert all(found[pair] >= count for pair, count in missing.items())
    assert len(cases) < 20
