"""The fourth attack: functions in disguise, state that nobody compared, leaks, and what stands in other files."""

import os
import shutil
import signal
import time

import pytest

import shiplap as sl
from shiplap.judge.checks import ENDURANCE_CALLS, describe_leak
from shiplap.sandbox.proc_filesystem import ProcessResources, read_scheduler_usage
from shiplap.sandbox.protocol import Inspect, pack_message, send_message
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.source_scan import constants_in_sources, find_suspicious_names
from shiplap.sandbox.supervisor import Bounds
from shiplap_testing.effort import sampled
from tests.judge.cheats import HEAD
from tests.judge.fresh import FRESH, HELPED, LAYERS
from tests.judge.honest_system import SYSTEM
from tests.judge.honest_ways import WAYS
from tests.judge.test_cheats import REFERENCE

BOUNDS = Bounds(memory=1 << 29, seconds=20)
SLOW = {  # they are seen only after many calls
    "callers looked at under the name of a file of Python",
    "another folder",
    "another rounding",
    "files that stay open",
    "memory that is never given back",
    "threads that never end",
    "a function that torch compiles",
}
LAYER = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Linear(n, 64, bias=False), nn.Linear(64, 32)
    def forward(self, x):
        return torch.relu(self.b(self.a(x)))
def get_inputs():
    return [torch.rand(96, 128)]
def get_init_inputs():
    return [128]
"""


@pytest.fixture
def judged(launcher, tmp_path):
    folder = tmp_path / "candidate"
    folder.mkdir()

    def run(text, reference=REFERENCE, bounds=BOUNDS, seconds=60, timed=True, **files):
        (tmp_path / "problem.py").write_text(reference)
        (folder / "it.py").write_text(HEAD + text)
        for name, content in files.items():
            (folder / name).write_text(content)
        options = {"seconds": seconds, "rounds": 5, "bounds": bounds, "timed": timed}
        return sl.judge(tmp_path / "problem.py", folder / "it.py", launcher=launcher, **options)

    return run


@pytest.mark.parametrize("name", sampled([n for n in FRESH if n not in SLOW], 3))
def test_an_attack_is_refused_at_once(judged, name):
    result = judged(FRESH[name])
    assert result.verdict == "refused", result
    assert result.speedup == result.min_speedup == 0.0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SLOW))
def test_an_attack_is_refused(judged, name):
    result = judged(FRESH[name])
    assert result.verdict == "refused", result
    assert result.speedup == result.min_speedup == 0.0


@pytest.mark.parametrize(("held", "what"), [("torch.ones(1 << 21)", "MiB"), ("open('/dev/null')", "files")])
def test_a_leak_is_refused(judged, held, what):
    """A larger one than that of ``FRESH``: it shows after the few calls of ``make test``."""
    text = f"KEPT = []\ndef candidate(x, w):\n    KEPT.append({held})\n    return honest(x, w)\n"
    result = judged(text, bounds=Bounds(), seconds=600, timed=False)
    assert [(reason.check, what in str(reason)) for reason in result.reasons] == [("leaks", True)], result


@pytest.mark.parametrize("name", sampled(HELPED, long=[n for n in HELPED if n != "a size in a module beside it"]))
def test_what_stands_in_another_file_is_looked_at(judged, name):
    text, other, content = HELPED[name]
    if other.endswith(".c") and shutil.which("gcc") is None:
        pytest.skip("no gcc")
    result = judged(text, **{other: content})
    assert result.verdict == "refused", result


@pytest.mark.long
@pytest.mark.parametrize("timed", sampled([False, True], long=["True"]))
@pytest.mark.parametrize("name", sampled({**WAYS, **SYSTEM}, 1))
def test_an_honest_candidate_is_not_taken_for_a_cheat(judged, name, timed):
    if "in C" in name and shutil.which("gcc") is None:
        pytest.skip("no gcc")
    result = judged({**WAYS, **SYSTEM}[name], bounds=Bounds(), seconds=300, timed=timed)  # a compiler needs both
    assert not result.reasons, result
    assert all(what == "time" or what.startswith("time of") for what, _ in result.missing), result


@pytest.mark.parametrize("name", sampled(LAYERS, 1))
def test_parameters_get_other_values(judged, name):
    """Who computed something from the first ones, and does not look whether they are the same, is wrong."""
    result = judged(LAYERS[name], LAYER, timed=False)
    assert bool(result.reasons) == (name == "folded at first call"), result
    renamed = "parameters" in dict(result.missing)
    assert renamed == (name == "other names")
    assert all(what == "parameters" for what, _ in result.missing), result


def test_sources_beside_a_candidate_are_those_that_it_names(tmp_path):
    (tmp_path / "package").mkdir()
    for file, text in {
        "it.py": "import first\nfrom package import inner\n",
        "first.py": "SOURCE = 'kernel.cu'\n",
        "kernel.cu": "if (n == 77) return;\n",
        "package/__init__.py": "SIZE = 41\n",
        "package/inner.py": "import sys\nF = sys._getframe\n",
        "apart.py": "SIZE = 1234\nimport gc\ngc.get_objects()\n",
    }.items():
        (tmp_path / file).write_text(text)
    assert set(constants_in_sources(str(tmp_path / "it.py"))) >= {77, 41}
    assert 1234 not in constants_in_sources(str(tmp_path / "it.py"))
    assert find_suspicious_names(str(tmp_path / "it.py")) == ["inner.py, line 2: _getframe looks at the callers"]


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (ProcessResources(9, 3, 1 << 20), ""),
        (ProcessResources(9 + ENDURANCE_CALLS // 2, 3, 1 << 20), "more files"),
        (ProcessResources(9, 3 + ENDURANCE_CALLS, 1 << 20), "more threads"),
        (ProcessResources(9, 3, 1 << 26), "63 MiB more"),
    ],
)
def test_what_is_taken_for_each_call_is_a_leak(after, told):
    leak = describe_leak(ProcessResources(8, 2, 1 << 20), after, ENDURANCE_CALLS)
    assert (told in leak) if told else not leak


def test_a_process_that_ran_while_it_was_stopped_is_ended(launcher):
    """As by the signal of a timer: it could read values before their clock starts."""
    prisoner = launcher.start()
    try:
        prisoner.request_reply(Inspect())
        prisoner.request_reply(Inspect())
        os.kill(prisoner.pid, signal.SIGCONT)
        before, ends = read_scheduler_usage(prisoner.pid, prisoner.pid).ran, time.monotonic() + 60
        while read_scheduler_usage(prisoner.pid, prisoner.pid).ran < before + 0.01 and time.monotonic() < ends:
            send_message(prisoner.connection, pack_message(Inspect()))  # it works on this
            time.sleep(0.01)
        os.kill(prisoner.pid, signal.SIGSTOP)
        time.sleep(0.1)
        with pytest.raises(ProcessEnded, match="ran while it was stopped"):
            prisoner.request_reply(Inspect())
    finally:
        prisoner.kill()
