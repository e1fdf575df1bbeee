"""A package that only child processes import: what they find and record is what this process would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap.audit.child_process import ChildDeath
from shiplap.audit.installed import apart, engine
from shiplap.audit.installed.apart import InstalledOverload, find_apart, import_before_forks, record_apart
from shiplap.audit.installed.engine import InstalledRequest, audit_installed_op
from shiplap.audit.installed.functions import InstalledFunction
from shiplap.audit.installed.recipes import TensorRecipe, evaluate
from shiplap.audit.installed.refusals import has_no_kernel, is_withdrawn
from shiplap.cli.audit_installed import InstalledOptions, _find_subjects, _split_arguments, audit_package
from shiplap.cli.recording import run_recorded
from shiplap.errors import ShiplapError

PACKAGE = """\
import torch
from torch.autograd import Function

library = torch.library.Library("apart_ops", "DEF")
library.define("double(Tensor x) -> Tensor")
library.define("trailing(Tensor x) -> Tensor")
library.define("named(Dict(str, Tensor) x) -> Tensor")
library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
packed = lambda x: torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
library.impl("trailing", lambda x: packed(x) * 2, "CPU")


class Triple(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 2
"""
SCRIPT = """\
import torch, apart_package
apart_package.Triple.apply(torch.ones(3, 2))
torch.ops.apart_ops.trailing(torch.ones(5, 4))
"""


@pytest.fixture
def options(tmp_path, monkeypatch):
    (tmp_path / "apart_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return InstalledOptions("apart_package", ["apart_ops"], None, [], None, False, None, 5, 4.0, 1, True, "cuda")


def find(options):
    found = find_apart("apart_package", lambda: _find_subjects(options))
    assert not isinstance(found, ChildDeath), found
    return found.subjects


def test_a_child_process_finds_and_records(options, tmp_path, monkeypatch, working_forks):
    found = find(options)
    assert "apart_package" not in sys.modules
    kinds = {name: type(subject) for name, subject in found.items()}
    assert kinds == {
        "apart_ops::double": InstalledOverload,
        "apart_ops::trailing": InstalledOverload,
        "apart_ops::named": InstalledOverload,
        "apart_package:Triple": InstalledFunction,
    }
    named = found["apart_ops::named"]
    assert named.form is None
    assert "Dict" in named.undeclarable
    (tmp_path / "calls.py").write_text(SCRIPT)
    recorded = record_apart(found, 5, lambda m: run_recorded(tmp_path / "calls.py", [], m))
    assert not recorded.failed
    assert evaluate(recorded.calls["apart_package:Triple"][0].texts())["x"].shape == (3, 2)
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    asked = InstalledRequest("apart_package", "1", seed=5, seconds=4.0)
    findings = {
        name: {f.check for f in audit_installed_op(name, found[name], recorded.calls.get(name, ()), asked).findings}
        for name in found
    }
    assert findings["apart_ops::double"] == set()
    assert findings["apart_ops::named"] == set()
    assert "layout" in findings["apart_ops::trailing"]
    assert "gradient" in findings["apart_package:Triple"]
    assert "apart_package" not in sys.modules


@pytest.mark.parametrize("user", ["apart_package", "apart_driver"])
def test_modules_that_leave_the_gpu_alone_are_imported_before_forks(options, tmp_path, monkeypatch, user):
    """A module that uses the GPU, and those behind it, are left to the children."""
    modules = ["apart_broken", "apart_helper", "apart_driver", "apart_package"]
    for name in modules:  # what an earlier test has imported comes back behind this one
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
    for name in ("apart_helper", "apart_driver", "apart_broken"):
        (tmp_path / f"{name}.py").write_text("raise OSError\n" if name == "apart_broken" else "")
    (tmp_path / "apart_package.py").write_text(f"import apart_helper, apart_driver\n{PACKAGE}")
    found = find_apart("apart_package", lambda: _find_subjects(options))
    assert not isinstance(found, ChildDeath), found
    assert {"apart_helper", "apart_driver", "apart_package"} <= set(found.modules)
    monkeypatch.setattr(apart, "uses_gpu", lambda: user in sys.modules)
    expected = ["apart_helper"] if user == "apart_driver" else ["apart_helper", "apart_driver"]
    assert import_before_forks("apart_package", modules) == expected
    assert user not in sys.modules


def test_files_of_tests_are_recorded_by_as_many_processes_as_jobs(tmp_path, monkeypatch):
    """A value of an option that is a folder was taken for one of tests, and files of other names were lost."""
    for name in ("test_a.py", "b_test.py", "test_c.py", "other.py", "slow/test_d.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        line = f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})"
        (tmp_path / "tests" / name).write_text(f"def test_it():\n    {line}\n")
    monkeypatch.chdir(tmp_path)
    given = ["-q", "-p", "no:cacheprovider", "--ignore", "tests/slow", "--basetemp", "base", "tests"]
    ran, environment = [], {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins import for a second
    for at, group in enumerate(_split_arguments(Path("pytest"), given, 4)):
        (tmp_path / "ran").write_text("")
        command = [sys.executable, "-m", "pytest", *group]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (at, done.stdout, done.stderr)  # also of the process for which no file is left
        ran.append((tmp_path / "ran").read_text().split())
    assert ran == [["b_test.py"], ["test_a.py"], ["test_c.py"], []]
    assert _split_arguments(Path("pytest"), ["-q", "tests/other.py"], 2) == [["-q", "tests/other.py"]]
    assert _split_arguments(Path("pytest"), ["-q"], 2) == [["-q"]]
    assert _split_arguments(Path("run.py"), ["tests"], 2) == [["tests"]]


def test_a_program_that_dies_leaves_no_call_and_is_named(options, tmp_path):
    found = find(options)
    (tmp_path / "dies.py").write_text("import os\nos.abort()\n")
    recorded = record_apart(found, 5, lambda m: run_recorded(tmp_path / "dies.py", [], m))
    assert recorded.calls == {}
    assert "SIGABRT" in recorded.failed


def test_a_package_that_ends_its_process_is_an_error(options, tmp_path, monkeypatch):
    (tmp_path / "apart_package.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setattr("shiplap.cli.console.require_device", lambda device: None)
    with pytest.raises(ShiplapError, match=r"SL601: the package cannot be imported"):
        audit_package(options, as_json=False, html=None)


def test_a_package_without_ops_is_an_error(options, tmp_path, monkeypatch):
    """A child process finds so."""
    monkeypatch.setattr("shiplap.cli.console.require_device", lambda device: None)
    (tmp_path / "apart_package.py").write_text("")
    with pytest.raises(ShiplapError, match="SL501"):
        audit_package(InstalledOptions(**{**vars(options), "namespaces": []}), as_json=False, html=None)


def test_a_device_that_is_missing_is_an_error(options):
    with pytest.raises(ShiplapError, match="SL605"):
        audit_package(
            InstalledOptions(**{**vars(options), "device": "mtia"}),
            as_json=False,
            html=None,
        )


def test_a_recipe_names_its_device():
    recipe = TensorRecipe("float32", (2, 3), 1, device="meta")
    assert str(recipe).endswith(".to('meta')")
    made = evaluate({"x": f"guarded({recipe})", "y": f"strided({recipe})", "z": f"shifted({recipe})"})
    assert {t.device.type for t in made.values()} == {"meta"}
    assert made["y"].stride() == (6, 2)


def test_a_kernel_that_is_missing_on_cuda_is_told_from_another_refusal():
    text = "Could not run 'apart_ops::trailing' with arguments from the 'CUDA' backend."
    assert has_no_kernel("apart_ops::trailing", text)
    assert not has_no_kernel("apart_ops::double", text)
    assert not has_no_kernel("apart_ops::trailing", text.replace("CUDA", "QuantizedCPU"))


def test_an_op_that_says_that_it_is_deprecated_is_not_searched_further():
    text = "RuntimeError: lookup_function is deprecated. Please see the announcement."
    assert is_withdrawn("apart_ops::lookup_function", text)
    assert is_withdrawn("apart_ops::lookup_function.out", text)
    assert not is_withdrawn("apart_ops::function", text)
    assert not is_withdrawn("apart_ops::lookup_function", text.replace(".", " for tensors of whole numbers.", 1))


@pytest.mark.long
def test_the_import_of_a_package_takes_no_time_from_the_search(options, tmp_path, monkeypatch):
    """The import takes more processor time than the search may take."""
    slow = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end:\n    pass\n"
    (tmp_path / "apart_package.py").write_text(PACKAGE + slow)
    found = find(options)
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    asked = InstalledRequest("apart_package", "1", seed=5, seconds=0.5)
    assert audit_installed_op("apart_ops::double", found["apart_ops::double"], (), asked).calls > 1


@pytest.mark.long
def test_errors_and_notes_of_a_child_process_are_shown(options, tmp_path, capsys, monkeypatch):
    """The error and the note of a child process are those of this process."""
    monkeypatch.setattr("shiplap.cli.console.require_device", lambda device: None)
    monkeypatch.setattr(engine, "script_shows", lambda text, limits: True)
    (tmp_path / "apart_empty").mkdir()
    (tmp_path / "apart_empty" / "__init__.py").write_text("")
    (tmp_path / "apart_empty" / "broken.py").write_text("raise RuntimeError('no driver')\n")
    given = {**vars(options), "package": "apart_empty", "namespaces": []}
    with pytest.raises(ShiplapError, match="SL501"):
        audit_package(InstalledOptions(**given), as_json=False, html=None)
    ops = PACKAGE.partition("class Triple")[0].replace("apart_ops", "works_ops")
    (tmp_path / "apart_empty" / "works.py").write_text(ops)
    (tmp_path / "apart_empty" / "__init__.py").write_text("from apart_empty import works\n")
    audit_package(InstalledOptions(**{**given, "namespaces": ["works_ops"], "seconds": 0.5}), as_json=False, html=None)
    assert "apart_empty.broken is left out: RuntimeError: no driver" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("script", "shows"),
    [
        ("from __future__ import annotations\nproblem = 'differs'\nassert not problem\n", True),
        ("import ctypes\nctypes.string_at(0)\n", True),
        ("raise ValueError('another error than that of a finding')\n", False),
        ("print('nothing found')\n", False),
    ],
    ids=["assertion", "crash", "error", "nothing"],
)
def test_a_fork_shows_the_finding_of_a_script(working_forks, script, shows):
    assert engine.script_shows(script, engine._LIMITS) is shows
