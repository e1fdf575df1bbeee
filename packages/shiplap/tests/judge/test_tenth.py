"""Candidates that are wrong in another mode, with other plain arguments or on equal values are not accepted."""

import pytest

import shiplap as sl
from shiplap_testing.effort import sampled
from tests.judge.tenth import HEAD, SOUND, WRONG

QUICK = ("a size in two parts",)


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "candidate").mkdir()

    def run(case, **options):
        reference, text = case
        (tmp_path / "problem.py").write_text(HEAD + reference)
        (tmp_path / "candidate" / "it.py").write_text(HEAD + text)
        rest = {"seconds": 60, "rounds": 5, "timed": False, **options}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", launcher=launcher, **rest)

    return run


@pytest.mark.parametrize("name", sampled(WRONG, long=[n for n in WRONG if n not in QUICK]))
def test_a_candidate_that_is_wrong_elsewhere_is_not_accepted(judged, name):
    assert judged(WRONG[name]).verdict != "accepted"


@pytest.mark.parametrize("name", sampled(SOUND, 1))
def test_a_sound_twin_is_not_refused(judged, name):
    result = judged(SOUND[name])
    assert not result.reasons, str(result)
