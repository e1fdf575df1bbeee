"""Honest kernels are accepted, on a busy machine too."""

import shutil

import pytest

import shiplap as sl
from tests.judge.honest import HONEST, candidate_of, reference_of

DOUBTED: dict[str, str] = {}  # at most one, with the reason
SAMPLE = ("attention with an online softmax",)


@pytest.fixture
def result_on(launcher, tmp_path):
    def judge(name, *, timed=True):
        if name.endswith(" in C") and shutil.which("gcc") is None:
            pytest.skip("no gcc")
        (tmp_path / "candidate").mkdir()
        (tmp_path / "ref.py").write_text(reference_of(name))
        (tmp_path / "candidate" / "it.py").write_text(candidate_of(name))
        options = {"seconds": 600, "rounds": 5, "timed": timed}
        return sl.judge(tmp_path / "ref.py", tmp_path / "candidate" / "it.py", launcher=launcher, **options)

    return judge


def test_there_are_forty():
    assert len(HONEST) >= 40
    assert len(DOUBTED) <= 1


@pytest.mark.long  # make test has those of test_cheats.py and test_fresh.py
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_accepted(result_on, name):
    """Without times, as its checks are the same."""
    assert result_on(name, timed=False).verdict == "accepted"


@pytest.mark.long
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_is_accepted(result_on, name):
    result = result_on(name)
    if name in DOUBTED:
        assert [r.check for r in result.reasons] == [DOUBTED[name]]
        return
    assert not result.reasons, result
    assert all(what.startswith("time of") for what, _ in result.missing), result.missing
