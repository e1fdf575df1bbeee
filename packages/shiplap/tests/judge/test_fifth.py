"""The fifth attack: what nobody compared, and values, numbers, containers and gradients that no call had."""

import shutil

import pytest
import torch

import shiplap as sl
from shiplap.sampling.compare import Difference
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects, TargetProcess
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.supervisor import Bounds
from shiplap_testing.effort import sampled
from tests.judge.cheats import HEAD
from tests.judge.fifth import HIDDEN, REPLACED, STATE
from tests.judge.fifth_wrong import HEAD as START
from tests.judge.fifth_wrong import WRONG
from tests.judge.honest_styles import STYLES
from tests.judge.honest_ways import WAYS
from tests.judge.test_cheats import REFERENCE

BOUNDS = Bounds(memory=1 << 29, seconds=20)
THREADED = "the reference in a pool of threads"  # no fault of its own: the list of its operators says what it is
NOT_REFUSED = {  # nobody could compare, or nobody has other numbers to try
    "numbers that are drawn": "incomplete",
    "a result that hardly depends on its inputs": "incomplete",
    "an index that is always the same": "accepted",
}
COMPILED = ("C++ through load_inline", "gradients that are compiled", "compiled inside", "code in C for each shape")


@pytest.fixture
def witness(launcher, tmp_path):
    """A candidate in its process, by its source."""
    prisoners = []

    def load(text):
        (tmp_path / "it.py").write_text(HEAD + text)
        prisoners.append(launcher.start([str(tmp_path)], BOUNDS))
        made = TargetProcess(prisoners[-1])
        made.load(LoadTarget(str(tmp_path / "it.py"), ["candidate"], "function", [], 1, thorough=True), ArgumentArena())
        return made

    yield load
    for prisoner in prisoners:
        prisoner.kill()


def looked_at(witness):
    """What the referee sees of a candidate that it calls a few times, whatever the results are; and its operators."""
    args = torch.rand(24, 16), torch.rand(16, 8)
    expected = ExpectedEffects([torch.empty(24, 8)], lambda got: Difference())
    try:
        listed = [witness.list_operators(args, expected) for _ in range(2)]
        witness.check_interpreter()
    except CandidateError as e:
        return e.check, []
    return "", listed[-1]


@pytest.mark.parametrize("name", sampled([*REPLACED, *STATE], 4))
def test_who_changes_what_is_shared_is_seen(witness, name):
    check, _ = looked_at(witness({**REPLACED, **STATE}[name]))
    assert check == ("patched" if name in REPLACED else "state") or name == "events that nobody hears"
    assert check


@pytest.mark.parametrize("name", sampled(HIDDEN, 2))
def test_who_looks_at_callers_or_hides_operators_is_seen(witness, name):
    check, operators = looked_at(witness(HIDDEN[name]))
    assert check == ("" if name == THREADED else "source")
    assert name != THREADED or {"aten::mm", "aten::tanh"} <= {use.name for use in operators}


@pytest.mark.parametrize("name", sampled([n for n in {**WAYS, **STYLES} if n not in COMPILED], 2))
def test_an_honest_candidate_changes_nothing(witness, name):
    assert looked_at(witness({**WAYS, **STYLES}[name]))[0] == ""


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "candidate").mkdir()

    def run(reference, text, **options):
        (tmp_path / "problem.py").write_text(reference)
        (tmp_path / "candidate" / "it.py").write_text(text)
        rest = {"seconds": 60, "rounds": 5, "bounds": BOUNDS, "timed": False, **options}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", launcher=launcher, **rest)

    return run


@pytest.mark.parametrize("name", sampled(WRONG, 2))
def test_who_is_right_for_what_was_tried_only_is_not_accepted(judged, name):
    reference, text, options = WRONG[name]
    result = judged(START + reference, START + text, **options)
    assert result.verdict == NOT_REFUSED.get(name, "refused"), result
    assert name != "an index that is always the same" or any("argument 1" in text for text in result.unchecked)


@pytest.mark.long
@pytest.mark.parametrize("name", [*REPLACED, *STATE, *HIDDEN])
def test_an_attack_is_refused(judged, name):
    result = judged(REFERENCE, HEAD + {**REPLACED, **STATE, **HIDDEN}[name], timed=True)
    assert result.verdict == "refused", result


@pytest.mark.long
@pytest.mark.parametrize("name", STYLES)
def test_an_honest_style_is_accepted(judged, name):
    if name in COMPILED and shutil.which("g++") is None:
        pytest.skip("no compiler")
    result = judged(REFERENCE, HEAD + STYLES[name], timed=True, bounds=Bounds(), seconds=300)
    assert not result.reasons, result
    assert all(what == "time" or what.startswith("time of") for what, _ in result.missing), result
