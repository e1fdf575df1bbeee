"""What a judgement has read of a candidate is what runs, and is the same at its end."""

import importlib.util
import py_compile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shiplap.judge import engine
from shiplap.judge.processes import _hidden_places
from shiplap.judge.target import JudgeTarget
from shiplap.sampling.compare import Difference
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import ExpectedEffects, TargetProcess
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.supervisor import SandboxLauncher

REFERENCE = """
import torch
def reference(x):
    return x + 1
def get_inputs():
    return [torch.zeros(4)]
"""
HELPER = "def step(x):\n    return x + 1\n"
CANDIDATE = "from helper import step\ndef candidate(x):\n    return step(x)\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A reference, and a candidate with a module beside it, in folders of their own."""
    made = tmp_path / "given" / "ref.py", tmp_path / "sent" / "fast.py"
    for path, text in zip(made, (REFERENCE, CANDIDATE), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    (tmp_path / "sent" / "helper.py").write_text(HELPER)
    return made


@pytest.mark.parametrize("name", ["fast.py", "helper.py"])
def test_compiled_code_beside_a_source_does_not_run(
    files: tuple[Path, Path], launcher: SandboxLauncher, name: str
) -> None:
    """Python takes it in place of the source, and this kind without comparing the two."""
    source, other = files[1].with_name(name), files[1].with_name("other.py")
    other.write_text("def step(x):\n    return x - 1\ncandidate = step\n")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), importlib.util.cache_from_source(str(source)), invalidation_mode=mode)
    reference, candidate = (JudgeTarget.of(str(file), ("candidate",)) for file in files)
    case = SimpleNamespace(reference=reference, candidate=candidate)
    prisoner = launcher.start([str(files[1].parent)], hidden=_hidden_places(case, candidate))  # type: ignore[arg-type]
    try:
        witness, got = TargetProcess(prisoner), list[torch.Tensor]()
        witness.load(LoadTarget(candidate.home, ["candidate"], "function", [], 1), ArgumentArena())

        def keep(results: list[torch.Tensor]) -> Difference:
            got.extend(results)
            return Difference()

        witness.call([torch.zeros(4)], ExpectedEffects([torch.empty(4)], keep))  # type: ignore[arg-type]
        assert torch.equal(got[0], torch.ones(4))
    finally:
        prisoner.kill()


def test_a_reference_beside_a_candidate_is_hidden(tmp_path: Path) -> None:
    """A candidate in one file with its reference could not be loaded, and a package may import both."""
    (tmp_path / "ref.py").write_text(REFERENCE)
    (tmp_path / "fast.py").write_text("def candidate(x):\n    return x + 1\n")
    reference, candidate = (JudgeTarget.of(tmp_path / name, ("candidate",)) for name in ("ref.py", "fast.py"))

    def hidden(reference: JudgeTarget) -> list[str]:
        case = SimpleNamespace(reference=reference, candidate=candidate)
        return _hidden_places(case, candidate)  # type: ignore[arg-type]

    cached = str(tmp_path / "__pycache__")
    assert hidden(reference) == [str(tmp_path / "ref.py"), cached]
    assert hidden(candidate) == [cached]
    (tmp_path / "__init__.py").touch()
    assert hidden(reference) == [str(tmp_path), cached]


def test_a_source_that_is_changed_meanwhile_leaves_the_verdict_incomplete(
    files: tuple[Path, Path], launcher: SandboxLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest in a statement would be that of a file which nobody has judged."""
    texts = [HELPER + "\n", HELPER]
    monkeypatch.setattr(engine, "_run_checks", lambda *_: files[1].with_name("helper.py").write_text(texts.pop()))
    for changed in (False, True):
        result = engine.judge(f"{files[0]}:reference", f"{files[1]}:candidate", launcher=launcher)
        assert dict(result.missing).get("sources", "").startswith("helper.py, a source") == changed
