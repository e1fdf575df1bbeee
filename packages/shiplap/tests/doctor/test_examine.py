"""The program runs as it would alone; a crash, an exit status, a child process end up in the result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import shiplap as sl
from shiplap.doctor import Diagnosis, diagnose_command
from shiplap.errors import ShiplapError
from tests.doctor.programs import run, write

BREAKING = """
    import sys, torch

    def f(x):
        print("inside", file=sys.stderr)
        return x + 1

    torch.compile(f, backend="eager")(torch.ones(3))
"""


@pytest.mark.long
def test_arguments_directory_streams_and_status_are_the_programs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        BREAKING
        + """
    import os, subprocess
    print(sys.argv[1:], os.getcwd(), len(sys.stdin.read()), flush=True)
    if "child" not in sys.argv:
        subprocess.run([sys.executable, __file__, "child"])
    sys.exit(7)
    """,
    )
    monkeypatch.chdir(tmp_path)
    diagnosis = diagnose_command([sys.executable, script.name, "--json", "-x"])
    assert capfd.readouterr().out.startswith(f"['--json', '-x'] {tmp_path} ")
    assert diagnosis.exit_code == 7
    assert [b.place.line for b in diagnosis.breaks] == [4]
    assert not diagnosis.ok
    assert diagnosis.processes == 2, "its processes are read together"
    assert [(b.graphs, b.times) for b in diagnosis.breaks] == [(2, 2)]


@pytest.mark.long
def test_a_crash_leaves_what_was_seen_until_then_and_a_trace_that_the_user_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "trace"
    monkeypatch.setenv("TORCH_TRACE", str(wanted))
    diagnosis = run(tmp_path, BREAKING + "    import os; os.abort()")
    assert diagnosis.exit_code == 134
    assert [b.cause for b in diagnosis.breaks] == ["print"]
    assert len(list(wanted.glob("shiplap-doctor-*/*.log"))) == 1


@pytest.mark.long
def test_a_program_that_compiles_nothing(tmp_path: Path) -> None:
    diagnosis = run(tmp_path, "import torch; torch.compile(lambda x: x, backend='eager')")
    assert (diagnosis.compiled, diagnosis.breaks, diagnosis.exit_code, diagnosis.ok) == (0, (), 0, False)
    assert diagnosis.summary.startswith("nothing was compiled")


def test_no_such_program() -> None:
    with pytest.raises(ShiplapError, match="SL701: the program cannot be started") as e:
        diagnose_command(["/no/such/program"])
    assert e.value.got == "No such file or directory"


def test_a_file_of_python_is_no_program(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("")
    with pytest.raises(ShiplapError, match="SL701") as e:
        diagnose_command([str(script), "--quick"])
    assert e.value.fix == f"let Python run the file: shiplap doctor -- python {script} --quick"


# --- in this process ----------------------------------------------------------------------------------------------


def breaking(x: torch.Tensor, times: int = 1) -> torch.Tensor:
    return x * x.sum().item() * times


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_plain_function_is_compiled_here() -> None:
    diagnosis = sl.doctor(breaking, torch.ones(3), times=2)
    assert isinstance(diagnosis, sl.Diagnosis)
    (b,) = diagnosis.breaks
    assert (b.place.code, b.place.function, b.cause) == ("return x * x.sum().item() * times", "breaking", "item")
    assert Path(b.place.file) == Path(__file__)
    assert (diagnosis.target, diagnosis.exit_code, diagnosis.error) == ("breaking", 0, "")


def test_a_compiled_function_is_called_as_it_is() -> None:
    calls: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return compiled(x)

    compiled = torch.compile(breaking, backend="aot_eager")
    diagnosis = sl.doctor(step, torch.ones(3))
    assert len(calls) == 1
    assert [b.cause for b in diagnosis.breaks] == ["item"]


def test_a_module_without_breaks_is_ok() -> None:
    diagnosis: Diagnosis = sl.doctor(torch.nn.Linear(3, 3), torch.ones(2, 3))
    assert diagnosis.ok
    assert diagnosis.target == "Linear"


def test_an_exception_is_told_and_the_handler_is_gone() -> None:
    import logging

    def fails(x: torch.Tensor) -> None:
        breaking(x)
        raise ValueError("no such thing\nmore")

    before = list(logging.getLogger("torch.__trace").handlers)
    diagnosis = sl.doctor(torch.compile(fails, backend="eager"), torch.ones(3))
    assert (diagnosis.exit_code, diagnosis.error) == (1, "ValueError: no such thing")
    assert {b.cause for b in diagnosis.breaks} == {"item", "exception"}
    assert logging.getLogger("torch.__trace").handlers == before


def test_an_error_inside_a_function_that_must_not_break() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def prints(x: torch.Tensor) -> torch.Tensor:
        print(x)
        return x + 1

    diagnosis = sl.doctor(prints, torch.ones(3))
    assert diagnosis.error.startswith("Unsupported: Failed to trace builtin operator")
    (b,) = diagnosis.breaks
    assert (b.place.code, b.cause, b.registry, b.call) == ("print(x)", "print", "GB0059", "print")


def test_the_summary_counts() -> None:
    diagnosis = sl.doctor(lambda x: x + 1, torch.ones(3))
    assert (diagnosis.compiled, diagnosis.graphs, diagnosis.processes) == (1, 1, 1)
    assert diagnosis.summary.startswith("0 graph breaks, 0 recompiles in 1 compiled function, 1 graph;")


def test_the_way_through_a_library_to_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages" / "shiplap_test_kernels"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("from shiplap_test_kernels.norm import norm\n")
    (library / "norm.py").write_text(
        "def norm(x):\n    return x / scale(x)\n\ndef scale(x):\n    return x.max().item()\n"
    )
    monkeypatch.syspath_prepend(str(library.parent))
    import shiplap_test_kernels as kernels

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kernels.norm(x)

    b = sl.doctor(Model(), torch.ones(3)).breaks[0]
    assert (b.place.short, b.place.package) == ("shiplap_test_kernels/norm.py:5", "shiplap_test_kernels")
    assert (Path(b.user.file), b.user.code) == (Path(__file__), "return kernels.norm(x)")
    assert [(p.code, p.package) for p in b.chain[-3:]] == [
        ("return kernels.norm(x)", ""),
        ("return x / scale(x)", "shiplap_test_kernels"),
        ("return x.max().item()", "shiplap_test_kernels"),
    ]
