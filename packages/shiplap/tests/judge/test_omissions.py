"""Candidates that are wrong beside what is drawn are not accepted, and their sound twins are."""

import pytest
import torch

import shiplap as sl
from shiplap.judge import checks
from shiplap.judge.variants import InputFacts, InputForm, make_input_forms, vary_arguments
from shiplap.sandbox.source_scan import find_suspicious_names, marks_in_source
from shiplap_testing.effort import sampled
from tests.judge.omissions import HEAD, REFERENCES, SOUND, WRONG

ALL_CALLS = checks.LATE_CALLS
QUICK = (
    "weights that are held and not used",
    "an argument taken as None",
    "targets that never come",
    "logits far below zero",
    "half of a gradient",
    "until a day, in a helper",
)
ALIKE = ("an argument taken as None", "logits far below zero")  # other values that are drawn, as for those of QUICK


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "candidate").mkdir()

    def run(case, **options):
        reference, text = case
        (tmp_path / "problem.py").write_text(HEAD + REFERENCES[reference])
        (tmp_path / "candidate" / "it.py").write_text(HEAD + text)
        rest = {"seconds": 60, "rounds": 5, "timed": False, **options}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", launcher=launcher, **rest)

    return run


@pytest.mark.parametrize("name", sampled(WRONG, long=[n for n in WRONG if n not in QUICK or n in ALIKE]))
def test_a_candidate_with_an_omission_is_not_accepted(judged, monkeypatch, name):
    if name not in QUICK:  # those are refused before the late calls
        monkeypatch.setattr(checks, "LATE_CALLS", ALL_CALLS)
    assert judged(WRONG[name]).verdict != "accepted"


@pytest.mark.long  # make test judges one below
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_twin_is_accepted(judged, name):
    result = judged(SOUND[name])
    assert result.verdict == "accepted", str(result)


def test_a_layout_that_a_candidate_refuses_does_not_apply_and_is_named(judged):
    result = judged(SOUND["an error for other layouts"])
    assert result.verdict == "accepted", str(result)
    (cell,) = [c for c in result.ledger if str(c) == "layout x value"]
    assert cell.state == "does not apply"
    assert "contiguous arguments are required" in cell.reason
    assert any(text.startswith("layout: the candidate raises") for text in result.unchecked)


def test_what_the_caller_waives_is_named(judged):
    result = judged(WRONG["rows without gaps"], vary_layouts=False)
    assert result.verdict == "accepted", str(result)
    cells = {str(c): c.reason for c in result.ledger if c.required and c.state == "does not apply"}
    assert cells["layout x value"] == cells["alignment x value"] == "the caller asks for contiguous memory alone"


def test_the_date_may_be_read_by_a_benchmark_alone(tmp_path):
    file = tmp_path / "it.py"
    file.write_text(SOUND["a benchmark of its own"][1])
    assert find_suspicious_names(str(file)) == []
    for name in (n for n in WRONG if n.startswith("until a day")):
        file.write_text(WRONG[name][1])
        assert any("reads the date" in why for why in find_suspicious_names(str(file))), name


def test_integers_that_a_reference_treats_in_a_way_of_its_own_are_known(tmp_path):
    file = tmp_path / "ref.py"
    for name, marks in (("loss", [-100]), ("padding", [7]), ("softmax", [])):
        file.write_text(REFERENCES[name])
        assert marks_in_source(str(file)) == marks


def test_most_kinds_of_values_of_large_shapes_are_tried_on_smaller_ones():
    first = torch.zeros(2048, 1024), torch.zeros(1024)
    forms = make_input_forms(first, lambda form: True, most=4, facts=InputFacts())
    large = [f for f in forms if not f.reduced]
    assert [f.shapes for f in large[:1]] == [((2048, 1024), (1024,))]
    assert sum(f.timed for f in forms) == 2 == sum(f.timed for f in large)
    assert len(large) <= 5 < len(forms)
    small = next(f for f in forms if f.reduced)
    made = vary_arguments(first, small, 1)
    assert tuple(tuple(t.shape) for t in made) == small.shapes
    assert small.shapes[0][1] == small.shapes[1][0], "dims of the same size stay alike"
    layouts = [vary_arguments(first, InputForm("", shapes=small.shapes, layout=at), 1) for at in ("offset", "mixed")]
    assert layouts[0][0].storage_offset() % 4 != 0
    assert not layouts[1][0].is_contiguous()
