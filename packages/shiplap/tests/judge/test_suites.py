"""Suites in the formats of public benchmarks are found, judged, kept and resumed."""

import json
import os
import threading

import pytest
import torch

from shiplap.judge import JudgeOptions, suite_run
from shiplap.judge.suite_run import SuiteVerdict, TimingTurns, describe_suite, read_verdicts, run_suite
from shiplap.judge.suites import SuiteFolders, SuiteProblem, find_problems
from shiplap.judge.target import JudgeTarget, load_subject
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x): return torch.relu(x) + 1
def get_inputs(): return [torch.randn(8, 12)]
"""
FORWARD = """
import torch
from torch import nn
def forward_fn(x, w): return torch.tanh(x @ w)
class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__(); self.w = nn.Parameter(torch.randn(width, width))
    def forward(self, x, fn=forward_fn): return fn(x, self.w)
def get_inputs(n=3, width=4): return [torch.randn(n, width)]
"""
DEFINITION = {
    "name": "gate",
    "axes": {"n": {"type": "var"}, "c": {"type": "const", "value": 6}},
    "inputs": {"x": {"shape": ["n", "c"], "dtype": "float32"}, "scale": {"shape": None, "dtype": "float32"}},
    "outputs": {"y": {"shape": ["n", "c"], "dtype": "float32"}},
    "reference": "import torch\ndef run(x, scale): return torch.sigmoid(x) * scale\n",
}
WORKLOAD = {"axes": {"n": 5}, "inputs": {"x": {"type": "random"}, "scale": {"type": "scalar", "value": 0.5}}}
SOLUTION = {
    "spec": {"entry_point": "inner/kernel.py::run", "languages": ["pytorch"]},
    "sources": [
        {"path": "inner/kernel.py", "content": "import torch\ndef run(x, scale): return x.sigmoid().mul_(scale)\n"}
    ],
}
TASK = 'lang: "py"\ntests:\n  - {"size": 5, "seed": 42}\nbenchmarks:\n  - {"size": 9, "seed": 1}\n'
GPU_MODE = """
from utils import half
from task import input_t
import torch
def ref_kernel(data): return data * half()
def generate_input(size: int, seed: int):
    gen = torch.Generator(device="cuda"); gen.manual_seed(seed)
    return torch.randn(size, size, device='cuda', generator=gen)
"""
RELU = "def relu__default_kernel_impl(x): return x.clamp_min(0)\n"
FASTER = """
import torch
from torch import nn
class ModelNew(nn.Module):
    def forward(self, x): return x.clamp_min(0).add_(1)
"""
SUBMISSION = "from task import input_t\ndef custom_kernel(data): return data / 2\n"


@pytest.fixture
def suite(tmp_path):
    """One problem of each format, in folders of their own."""
    home = tmp_path / "suite"
    files = {
        "level1/2_Relu.py": MODEL,
        "level1/10_Alone.py": MODEL,
        "tasks/linear/func_forward.py": FORWARD,
        "tasks/linear/config_forward.json": json.dumps({"single_input_configs": [{"n": 7}]}),
        "ops/relu__default/relu__default_implementation_v1.py": RELU,
        "sol/gate/definition.json": json.dumps(DEFINITION),
        "sol/gate/workload.jsonl": json.dumps(WORKLOAD),
        "sol/gate/solution_python.json": json.dumps(SOLUTION),
        "mode/utils.py": "def half(): return 0.5\n",
        "mode/half/task.py": "input_t = object\n",
        "mode/half/task.yml": TASK,
        "mode/half/reference.py": GPU_MODE,
        "mode/half/submission.py": SUBMISSION,
        "notes/readme.txt": "nothing",
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (tmp_path / "mine" / "level1").mkdir(parents=True)
    return home


def folders(suite, tmp_path, candidates=""):
    return SuiteFolders(suite, str(candidates), tmp_path / "written")


def test_each_format_is_found_in_order_and_what_is_missing_is_said(suite, tmp_path):
    (tmp_path / "mine/level1/2_Relu.py").write_text("from torch import nn\nclass ModelNew(nn.Module): ...\n")
    (tmp_path / "mine/forward.py").write_text("def forward_fn(x, w): return (x @ w).tanh()\n")
    found = {p.name: p for p in find_problems(folders(suite, tmp_path, tmp_path / "mine"))}
    listed = ["level1/2_Relu", "level1/10_Alone", "mode/half", "ops/relu__default", "sol/gate", "tasks/linear"]
    assert list(found) == listed
    assert {p.format for p in found.values()} == {
        *("KernelBench", "gpu-mode", "BackendBench", "SOL-ExecBench", "robust-kbench")
    }
    assert {n for n, p in found.items() if p.unusable == "no candidate"} == {"level1/10_Alone", "mode/half", "sol/gate"}
    assert found["level1/2_Relu"].candidate == str(tmp_path / "mine/level1/2_Relu.py")


WRITTEN = ("mode/half", "ops/relu__default", "sol/gate/solution_python", "tasks/linear")


@pytest.mark.parametrize("name", sampled(WRITTEN, long=WRITTEN[:2]))
def test_written_files_make_inputs_and_call_both_alike(suite, tmp_path, name):
    (tmp_path / "mine/forward.py").write_text("def forward_fn(x, w): return (x @ w).tanh()\n")
    given = tmp_path / "mine" if name == "tasks/linear" else ""
    problem = next(p for p in find_problems(folders(suite, tmp_path, given)) if p.name == name)
    assert not problem.unusable
    asked = JudgeTarget.of(problem.reference, ("Model",))
    options = {"device": "cpu", "sizes": (), "tolerance": 0.0, "vary_shapes": True, "vary_layouts": True, "seed": 1}
    subject = load_subject(asked, None, **options)
    mine = load_subject(JudgeTarget.of(problem.candidate, ()), subject.problem.inputs, **options)
    args = subject.problem.first
    state = subject.state
    mine.problem.renew(state)
    with torch.no_grad():
        torch.testing.assert_close(mine.problem.call(*args), subject.problem.call(*args))
    shape = {"mode/half": (5, 5), "sol/gate/solution_python": (5, 6), "tasks/linear": (7, 4)}.get(name)
    assert shape is None or tuple(args[0].shape) == shape


def test_a_file_of_a_solution_cannot_leave_its_folder(suite, tmp_path):
    solution = {**SOLUTION, "sources": [*SOLUTION["sources"], {"path": "../../../out.py", "content": "x = 1"}]}
    (suite / "sol/gate/solution_python.json").write_text(json.dumps(solution))
    find_problems(folders(suite, tmp_path))
    assert not list(tmp_path.rglob("out.py"))


def test_files_of_a_suite_have_an_end_and_a_depth(suite, tmp_path):
    """A file of ``/proc`` states no size; what is nested deeply ends a parser with an error of its own."""
    deep = "[" * 50_000
    for name, content in {"definition.json": deep, "workload.jsonl": deep, "solution_python.json": deep}.items():
        (suite / "sol/gate" / name).write_text(content)
        assert all(p.name != "sol/gate" or p.unusable for p in find_problems(folders(suite, tmp_path)))
        (suite / "sol/gate" / name).unlink()
        (suite / "sol/gate" / name).symlink_to("/dev/zero")
    (suite / "tasks/linear/config_forward.json").write_text(deep)
    (suite / "mode/half/task.yml").write_text(f'tests:\n  - {{"size": {"-" * 5000}1}}\n')
    (suite / "level1/3_Long.py").symlink_to("/proc/self/pagemap")
    os.mkfifo(suite / "level1/4_Waits.py")
    found = {p.name: p for p in find_problems(folders(suite, tmp_path))}
    assert found["mode/half"].unusable == "no test with its sizes"
    assert found["tasks/linear"].unusable == "no candidate"
    assert found["level1/2_Relu"].format == "KernelBench"


def test_verdicts_of_an_earlier_run_have_types_and_an_end(tmp_path):
    good = SuiteVerdict("a", "KernelBench", "0", "accepted", 2.0)
    lines = ["[" * 50_000, json.dumps({**good.as_json(), "speedup": "fast"}), json.dumps(good.as_json()), '{"problem"']
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    assert read_verdicts(tmp_path / "out.jsonl") == [good]
    assert read_verdicts(tmp_path / "none.jsonl") == []
    (tmp_path / "link.jsonl").symlink_to("/dev/zero")
    with fails("SL602"):
        read_verdicts(tmp_path / "link.jsonl")


def test_verdicts_are_kept_and_a_later_run_goes_on(suite, tmp_path):
    (tmp_path / "mine/level1/2_Relu.py").write_text(FASTER)
    problems = [p for p in find_problems(folders(suite, tmp_path, tmp_path / "mine")) if p.format == "KernelBench"]
    out, options = tmp_path / "out.jsonl", JudgeOptions(seconds=60, timed=False)
    running = run_suite(problems, options, file=out, jobs=2)
    first = next(running)
    running.close()  # as Ctrl-C does
    assert [v.problem for v in read_verdicts(out)] == [first.problem]
    out.write_text(out.read_text() + '{"problem": "cut o')
    again = list(run_suite(problems, options, file=out, jobs=2))
    assert {v.problem: v.verdict for v in again} == {"level1/2_Relu": "accepted", "level1/10_Alone": "unusable"}
    assert describe_suite(again) == "2 problems: 1 accepted, 1 unusable"
    kept = len(out.read_text().splitlines())
    assert len(list(run_suite(problems, options, file=out))) == len(problems)
    assert len(out.read_text().splitlines()) == kept
    changed = JudgeOptions(seconds=59, timed=False)
    assert next(run_suite(problems[1:], changed, file=out)).digest != again[1].digest


def test_judgements_check_side_by_side_and_measure_times_alone():
    turns, running, most, order = TimingTurns(), [], [], []

    def judge(number):
        with turns.judgement() as turn:
            order.append(("checks", number))
            barrier.wait(120)  # all check at the same time
            turn(False)
            turn(True)
            running.append(number)
            most.append(len(running))
            order.append(("times", number))
            turn(False)  # a step behind the times does not give the turn back
            most.append(len(running))
            running.remove(number)

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=judge, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert most == [1] * 6
    assert [what for what, _ in order] == ["checks"] * 3 + ["times"] * 3


def test_a_judgement_waits_between_its_steps_while_another_measures_times():
    turns, order = TimingTurns(), []
    checks, measures = threading.Event(), threading.Event()

    def check():
        with turns.judgement() as turn:
            checks.set()
            assert measures.wait(120)
            turn(False)
            order.append("checks go on")

    def measure():
        with turns.judgement() as turn:
            assert checks.wait(120)
            measures.set()
            turn(True)
            order.append("times begin")
            later.start()
            # What has begun to wait does not go on before the times end.
            assert not later_done.wait(0.05)
            order.append("times end")

    def begin():
        with turns.judgement():
            later_done.set()

    later_done = threading.Event()
    threads = [threading.Thread(target=target) for target in (check, measure)]
    later = threading.Thread(target=begin)
    for thread in threads:
        thread.start()
    for thread in (*threads, later):
        thread.join(120)
    assert later_done.is_set()
    assert order.index("times end") == order.index("times begin") + 1


def test_a_judgement_that_ends_early_gives_its_turn_back():
    turns = TimingTurns()
    with pytest.raises(ValueError, match="early"), turns.judgement():
        raise ValueError("early")
    for times in (True, True, False):
        with turns.judgement() as turn:
            turn(times)


@pytest.mark.parametrize("lack", ["device", "far sizes"])
def test_a_problem_for_which_memory_was_missing_beside_others_is_judged_again_alone(monkeypatch, lack):
    problems = [SuiteProblem(name, "KernelBench") for name in "abc"]
    running, judged, lock = [], [], threading.Lock()

    def judge_problem(problem, digest, options, launcher, turn):
        with lock:
            running.append(problem.name)
            judged.append((problem.name, len(running)))
            again = [name for name, _ in judged].count(problem.name) > 1
        lacks = problem.name == "b" and not again
        missing = {lack: "CUDA out of memory"} if lacks else {}
        with lock:
            running.remove(problem.name)
        verdict = "incomplete" if lacks else "accepted"
        return SuiteVerdict(problem.name, problem.format, digest, verdict, result={"missing": missing})

    monkeypatch.setattr(suite_run, "_judge_problem", judge_problem)
    verdicts = list(run_suite(problems, JudgeOptions(), jobs=2))
    assert sorted(v.problem for v in verdicts) == ["a", "b", "c"]
    assert {v.verdict for v in verdicts} == {"accepted"}
    assert judged[-1] == ("b", 1)
    judged.clear()
    assert [v.verdict for v in run_suite(problems, JudgeOptions(), jobs=1)] == ["accepted", "incomplete", "accepted"]


def test_the_compiled_reference_may_run_its_operators(monkeypatch, tmp_path):
    asked = {}

    def judge(reference, candidate, **keywords):
        asked[candidate] = keywords["same_operators"]
        raise ValueError("enough")

    monkeypatch.setattr(suite_run, "judge", judge)
    (tmp_path / "1_Relu.py").write_text(MODEL)
    (tmp_path / "1_Relu_new.py").write_text(MODEL.replace("class Model(", "class ModelNew("))
    for candidates, compiled in (("torch.compile", True), ("", False)):
        asked.clear()
        problems = find_problems(SuiteFolders(tmp_path, candidates, tmp_path / "written"))
        assert len(list(run_suite(problems, JudgeOptions()))) == 1
        assert list(asked.values()) == [compiled]


def test_a_verdict_is_plain_values():
    verdict = SuiteVerdict("a", "KernelBench", "0", "refused", reason="values: off")
    assert SuiteVerdict(**json.loads(json.dumps(verdict.as_json()))) == verdict
