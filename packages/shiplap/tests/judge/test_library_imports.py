"""The launcher imports what a candidate will import of torch, and a fork of it has that, with compiled headers."""

from __future__ import annotations

import os
import py_compile
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.judge import library_imports
from shiplap.judge.library_imports import COMPILER, imports_from_package, library_modules
from shiplap.judge.target import file_of_module
from shiplap.sandbox import protocol
from shiplap.sandbox.request_errors import Timeout
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap_testing.forked import python
from tests.judge.cheats import HEAD
from tests.judge.test_cheats import REFERENCE

TRITON = ["triton", "triton.language.extra.libdevice"]


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import torch\n", []),
        ("import torch\ncandidate = torch.compile(torch.relu)\n", list(COMPILER)),
        ("import triton\nimport triton.language as tl\n", TRITON),
        ("from torch.utils.cpp_extension import load_inline\n", ["torch.utils.cpp_extension"]),
        ("import torch._secret_module\n", []),  # no name of the source is imported
    ],
)
def test_the_text_of_a_candidate_shows_what_it_imports(tmp_path: Path, text: str, modules: list[str]) -> None:
    (tmp_path / "it.py").write_text(text)
    assert library_modules(str(tmp_path / "it.py"), "") == modules


def test_packages_that_peft_imports_come_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be harmful where a GPU is used, and the others are imported all the same."""
    monkeypatch.setattr(library_imports, "MOST_SOURCES", 1)  # peft itself, where it is installed, is not read
    (tmp_path / "it.py").write_text("try:\n    import peft\nexcept ImportError:\n    peft = None\n")
    assert library_modules(str(tmp_path / "it.py")) == ["transformers.modeling_utils", "accelerate", "peft"]


def test_the_packages_that_a_candidate_imports_are_read_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "kernels_of_others"
    (package / "ops" / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from kernels_of_others.ops.inner import norm\n")
    # Neither ``ops`` nor ``inner`` has an __init__.py.
    (package / "ops" / "inner" / "norm.py").write_text("import triton\nimport kernels_of_others\n")
    (package / "ops" / "inner" / "__init__.py").write_text("import kernels_of_others.ops.inner.norm\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    (tmp_path / "it.py").write_text("from kernels_of_others import norm\n")
    assert library_modules(str(tmp_path / "it.py")) == TRITON
    assert "kernels_of_others" not in sys.modules
    assert file_of_module("kernels_of_others.ops.inner.norm") == str(package / "ops" / "inner" / "norm.py")
    assert file_of_module("kernels_of_others.ops.none") == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from kernels.helper import scale\n", True),
        ("from kernels import helper\n", True),
        ("def f():\n    import kernels.inner.deep\n", True),
        ("import helper\n", False),
        ("from others.kernels import helper\n", False),
    ],
)
def test_a_candidate_imports_from_the_package_of_the_reference(tmp_path: Path, text: str, found: bool) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "it.py").write_text(text)
    places = [str(tmp_path), str(tmp_path / "kernels"), os.devnull]
    assert imports_from_package(str(tmp_path / "it" / "it.py"), str(tmp_path / "kernels"), places) == found


SCALED = "def candidate(x, w):\n    return honest(x, w) * ONE\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("from kernels.helper import ONE\n" + SCALED, "accepted"),
        ("from kernels.helper import ONE\nfrom kernels.problem import reference as honest\n" + SCALED, "refused"),
        ("from helper import ONE\n" + SCALED, "refused"),
    ],
)
def test_a_helper_in_the_package_of_the_reference_is_imported_and_the_reference_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, verdict: str
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "candidate").mkdir()
    (tmp_path / "kernels" / "problem.py").write_text(REFERENCE)
    (tmp_path / "kernels" / "helper.py").write_text("ONE = 1.0\n")
    (tmp_path / "candidate" / "it.py").write_text(HEAD + text)
    for source in (tmp_path / "kernels").iterdir():
        py_compile.compile(str(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    result = sl.judge(
        tmp_path / "kernels" / "problem.py", tmp_path / "candidate" / "it.py", seconds=120, rounds=5, timed=False
    )
    assert result.verdict == verdict, str(result)
    assert all("No module" in r.evidence or "Permission" in r.evidence for r in result.reasons), str(result)


def test_imports_of_the_launcher_that_take_too_long_are_no_time_of_the_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: SandboxLauncher, modules: Any, until: float) -> None:
        raise Timeout("the time of the judgement is over, and no process has started")

    monkeypatch.setattr(SandboxLauncher, "import_libraries", late)
    (tmp_path / "problem.py").write_text(REFERENCE)
    (tmp_path / "it.py").write_text(HEAD + "import triton\ndef candidate(x, w):\n    return honest(x, w)\n")
    result = sl.judge(tmp_path / "problem.py", tmp_path / "it.py", seconds=60, timed=False)
    assert result.verdict == "incomplete"
    assert dict(result.missing)["machine"].endswith(
        "the import of triton, triton.language.extra.libdevice takes longer than 300 s"
    )


PREPARED = """
import os, sys, tempfile, torch
from shiplap.torch_private.dynamo import VECTOR_MODULE, prepare_inductor
from shiplap.torch_private.process_state import forks_can_use_device
import torch._inductor.compile_fx, torch._inductor.cpu_vec_isa
with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
    read = lambda: (torch.get_num_threads(), os.environ.get("TORCHINDUCTOR_CACHE_DIR"), tempfile.gettempdir())
    before = read()
    prepare_inductor(folder)
    assert before == read(), (before, read())
    headers = {p: os.stat(p).st_mtime_ns for d, _, n in os.walk(folder) for p in (os.path.join(d, f) for f in n)}
    assert any(name.endswith(".gch") for name in headers), list(headers)
    assert forks_can_use_device()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = own
    assert torch.equal(torch.compile(lambda x: x * 2 + 1)(torch.arange(5.0)), torch.arange(5.0) * 2 + 1)
    assert not [f for _, _, n in os.walk(own) for f in n if f.endswith(".gch")]
    print("prepared")
"""


@pytest.mark.long  # it takes a compiler half a minute
def test_headers_are_compiled_once_for_all_forks() -> None:
    done = python("-c", PREPARED)
    assert done.stdout.strip() == "prepared", done.stderr


def test_a_fork_has_what_its_launcher_imported_on_request(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(REFERENCE)
    # The candidate is wrong in a process that has not imported the module before.
    text = "import sys\nHAS = 'wave' in sys.modules\ndef candidate(x, w):\n    return honest(x, w) + (not HAS)\n"
    (tmp_path / "it.py").write_text(HEAD + text)
    with SandboxLauncher() as launcher:
        launcher.import_libraries(["wave", "a_module_that_is_not_there"])
        launcher.import_libraries(["wave"])
        options: dict[str, Any] = {"launcher": launcher, "seconds": 120, "timed": False}
        result = sl.judge(tmp_path / "problem.py", tmp_path / "it.py", **options)
    assert result.verdict == "accepted", str(result)


def test_the_launcher_imports_no_file_of_a_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peft.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with SandboxLauncher() as launcher:
        launcher.import_libraries(["peft", "wave"])
    assert not (tmp_path / "imported").exists()


def test_a_launcher_whose_forks_could_use_no_device_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    ask = SandboxLauncher.ask

    def answer(self: SandboxLauncher, message: Any, *args: Any, **keywords: Any) -> Any:
        if isinstance(message, protocol.ImportLibraries):
            asked.append(message.modules)
            return protocol.Number([*message.modules, "wave"].index("wave"))
        return ask(self, message, *args, **keywords)

    monkeypatch.setattr(SandboxLauncher, "ask", answer)
    with SandboxLauncher() as launcher:
        launcher.import_libraries(["colorsys"])
        first = launcher.pid
        launcher.import_libraries(["colorsys", "quopri", "wave"])
        second = launcher.pid
        assert second not in (first, -1)
        launcher.import_libraries(["wave", "colorsys"])
        assert launcher.pid == second
        assert launcher.harmful == {"wave"}
    assert asked == [["colorsys"], ["quopri", "wave"], ["colorsys", "quopri"]]


def test_the_count_of_devices_forbids_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.torch_private import process_state

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)  # as if no test had counted the devices
    assert process_state.forks_can_use_device()
    opened = os.open(os.devnull, os.O_RDONLY)
    try:
        monkeypatch.setattr(process_state, "USED_BY_DRIVER", os.readlink(f"/proc/self/fd/{opened}"))
        assert not process_state.forks_can_use_device()
    finally:
        os.close(opened)


def test_devices_are_counted_by_the_management_library_alone_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shiplap.torch_private.process_state import COUNT_BY_MANAGEMENT, counting_by_management

    for before in (None, "0"):
        monkeypatch.delenv(COUNT_BY_MANAGEMENT, raising=False)
        if before is not None:
            monkeypatch.setenv(COUNT_BY_MANAGEMENT, before)
        with counting_by_management():
            assert os.environ[COUNT_BY_MANAGEMENT] == "1"
        assert os.environ.get(COUNT_BY_MANAGEMENT) == before


def test_triton_is_prepared_where_a_gpu_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.torch_private.triton_internals import prepare_triton

    seen: list[str] = []

    class Driver:
        @property
        def active(self) -> object:
            seen.append(f"driver {os.environ['TRITON_CACHE_DIR']}")
            return self

    def note_key() -> None:
        seen.append("key")

    triton, runtime = types.ModuleType("triton"), types.ModuleType("triton.runtime")
    vars(runtime).update(cache=types.SimpleNamespace(triton_key=note_key), driver=Driver())
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        prepare_triton(str(tmp_path))
        assert seen == (["key", f"driver {tmp_path}"] if has_gpu else [])
    assert "TRITON_CACHE_DIR" not in os.environ


def test_the_variable_of_the_cache_may_be_gone_at_the_end(tmp_path: Path) -> None:
    from shiplap.torch_private.triton_internals import files_in

    with files_in(str(tmp_path), "SHIPLAP_TEST_FOLDER"):
        del os.environ["SHIPLAP_TEST_FOLDER"]
    assert "SHIPLAP_TEST_FOLDER" not in os.environ
