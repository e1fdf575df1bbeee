"""Drafts of all ops of a package that is made here: with meta kernels, without, and with what cannot be declared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shiplap.cli.init import draft_package
from shiplap_testing.forked import WITH_VERBS, python

PACKAGE = '''
"""A package of ops, as a library author registers them."""
import torch
from torch import Tensor

lib = torch.library.Library("NAME", "DEF")
lib.define("pool(Tensor x, int[2] kernel, int stride=1) -> Tensor")
lib.define("above(Tensor x, float limit) -> Tensor")
lib.define("gather(Tensor rows, Tensor index) -> Tensor")
lib.define("add_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
lib.define("table(Dict(str, Tensor) parts) -> Tensor")
lib.define("log(Tensor x) -> ()")
lib.define("unused.here(Tensor? x, *, ScalarType dtype=6) -> Tensor?")


def pool(x: Tensor, kernel: list[int], stride: int = 1) -> Tensor:
    """Average windows of the last two dims. They do not overlap the border."""
    return torch.ops.NAME.pool(x, kernel, stride)


lib.impl("pool", lambda x, kernel, stride=1: torch.nn.functional.avg_pool2d(x, kernel, stride), "CPU")
lib.impl("above", lambda x, limit: x[x > limit].clone(), "CPU")
lib.impl("gather", lambda rows, index: rows[index], "CPU")
lib.impl("add_", lambda x, y: x.add_(y), "CPU")


@torch.library.register_fake("NAME::pool", lib=lib)
def _(x, kernel, stride=1):
    n, c, h, w = x.shape
    return x.new_empty(n, c, (h - kernel[0]) // stride + 1, (w - kernel[1]) // stride + 1)


@torch.library.register_fake("NAME::gather", lib=lib)
def _(rows, index):
    torch._check(index.dim() == 1 and rows.dim() == 2)
    return rows.new_empty(index.shape[0], rows.shape[1])


@torch.library.custom_op("NAME::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor, power: int) -> Tensor:
    """x with each column scaled."""
    return x * weight**power


@scaled.register_fake
def _(x, weight, power):
    torch._check(x.shape[-1] == weight.shape[0])
    return torch.empty_like(x)
'''

SCRIPT = """
import sys
import torch
import NAME

torch.manual_seed(1)  # how many are above 0 may look like another rule in three draws
for n, k, h in ((3, 5, 7), (6, 2, 9), (8, 4, 12)):
    NAME.pool(torch.rand(n, 3, h, h + 1), [2, 3], 2)
    torch.ops.NAME.above(torch.randn(n * k), 0.0)
    torch.ops.NAME.gather(torch.randn(n, k), torch.randint(0, n, (h,)))
    torch.ops.NAME.gather(torch.randn(n, k), torch.tensor([n - 1, 0]))
    NAME.scaled(torch.randn(n, k), torch.rand(k), 2)
    torch.ops.NAME.add_(torch.zeros(n, k), torch.ones(n, k))
    print("a line that must not be in the JSON")
if "fail" in sys.argv:
    raise ValueError("after the calls")
"""


@pytest.fixture
def package(tmp_path: Path, request: Any) -> Any:
    """``(name, folder)``: each test has a package of its own, since torch keeps what was registered."""
    name = f"drafted_{abs(hash(request.node.name)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(PACKAGE.replace("NAME", name))
    (tmp_path / "script.py").write_text(SCRIPT.replace("NAME", name))
    sys.path.insert(0, str(tmp_path))
    yield name, tmp_path
    sys.path.remove(str(tmp_path))


def text_of(path: Path) -> str:
    return path.read_text()


def test_recorded_calls_become_dims_dtypes_bounds_and_samples(run: Any, package: Any) -> None:
    name, folder = package
    done = run("init", folder / "ops.py", "--package", name, "--record", folder / "script.py")
    assert done.exit_code == 0, done.stderr
    text = text_of(folder / "ops.py")
    assert f'@sl.adopt("{name}::above", bounds={{"m": "n"}})' in text
    assert '    x: Float32[Tensor, "n"],  # inferred: 3 recorded calls' in text
    assert '    rows: Float32[Tensor, "n m"],  # inferred: 6 recorded calls and' in text
    assert '    index: Int64[Tensor, "k"],  # inferred: ' in text
    assert ') -> Float32[Tensor, "k m"]:  # inferred: ' in text
    assert '    index = torch.randint(0, sizes["n"], (sizes["k"],), generator=rng, dtype=torch.int64)' in text
    assert '    weight: Float32[Tensor, "m"],  # inferred: ' in text
    assert f'@sl.adopt("{name}::add_", mutates="x", aliases="x")' in text
    assert '    """Average windows of the last two dims."""' in text
    assert f"# inferred: the sentence is that of {name}.pool" in text
    assert "kernel: tuple[int, int]," in text
    assert ') -> Float32[Tensor, "n m (k-kernel[0])//stride+1 (p-kernel[1])//stride+1"]:' in text


@pytest.mark.long
def test_what_cannot_be_said_is_listed_with_its_reason(run: Any, package: Any) -> None:
    name, folder = package
    done = run("init", folder / "ops.py", "--package", name, "--json")
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    reasons = {row["op"]: row["reason"] for row in summary["not_drafted"]}
    assert reasons == {
        f"{name}::table": "the type Dict(str, Tensor), which no declaration has",
        f"{name}::log": "no result and nothing written to: torch would remove the call from a graph",
    }
    assert {row["op"] for row in summary["ops"]} == {
        f"{name}::{op}" for op in ("pool", "above", "gather", "add_", "unused.here", "scaled")
    }
    text = text_of(folder / "ops.py")
    assert f"#   {name}::table: the type Dict(str, Tensor)" in text
    assert 'rows: Shaped[Tensor, "n m"],  # inferred: ' in text  # the meta kernel takes no other rank
    assert ') -> Shaped[Tensor, "..."]:  # not inferred: no meta kernel' in text  # of above
    assert all(row["line"] and row["fill"] for row in summary["fill"])


def test_a_draft_is_audited_before_it_has_a_reference(run: Any, package: Any) -> None:
    """Nothing that needs a reference is green, the rest is looked at."""
    name, folder = package
    done = run("init", folder / "ops.py", "--package", name, "--record", folder / "script.py", "--json")
    assert done.exit_code == 0, done.stderr
    calls = {row["op"]: row["calls"] for row in json.loads(done.stdout)["ops"]}
    assert calls[f"{name}::gather"] == 6
    assert calls[f"{name}::unused.here"] == 0
    checks = [word for check in ("schema", "edges", "numerics") for word in ("--check", check)]
    done = run("audit", f"{folder / 'ops.py'}:gather", *checks, "--json")
    verdicts = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert verdicts["schema"]["verdict"] == "ok", verdicts
    assert (verdicts["numerics"]["verdict"], verdicts["edges"]["verdict"]) == ("incomplete", "incomplete")
    assert "the reference is not written yet" in verdicts["numerics"]["evidence"]


@pytest.mark.long
def test_a_finished_draft_is_proven_right(package: Any, process: Any) -> None:
    """A reader replaces the one line that is marked, and the audit compares."""
    name, folder = package
    assert process("init", "ops.py", "--package", name, "--record", "script.py", cwd=folder).returncode == 0
    text = text_of(folder / "ops.py")
    marked = f'raise error("SL113", where="{name}::gather, reference")'
    assert marked in text
    for body, verdict in (("return rows[index]", "ok"), ("return rows[index] + 1", "fail")):
        (folder / "finished.py").write_text(text.replace(marked, body))
        done = process("audit", "finished.py:gather", "--check", "numerics", "--json", cwd=folder)
        (finding,) = json.loads(done.stdout)["findings"]
        assert finding["verdict"] == verdict, finding


FALLBACK = """
import os, signal
import torch
LIB = torch.library.Library("torchtext", "FRAGMENT")  # fakes of this namespace may run the real kernel
LIB.define("NAME_a_scale(Tensor x, Tensor w) -> Tensor")
LIB.define("NAME_b_ends(Tensor x) -> Tensor")
LIB.define("NAME_c_copy(Tensor x) -> Tensor")

def scale(x, w):
    open("MARK", "w").write("the kernel ran")
    return x * w

LIB.impl("NAME_a_scale", scale, "CPU")
torch.library.register_fake("torchtext::NAME_b_ends", lambda x: os.kill(os.getpid(), signal.SIGSEGV), lib=LIB)
torch.library.register_fake("torchtext::NAME_c_copy", lambda x: torch.empty_like(x), lib=LIB)
"""


@pytest.mark.usefixtures("working_forks")
def test_no_kernel_runs_and_one_that_ends_its_process_takes_nothing_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    name, mark = f"drafted_{abs(hash(tmp_path)) % 10**8}", tmp_path / "mark"
    (tmp_path / f"{name}.py").write_text(FALLBACK.replace("NAME", name).replace("MARK", str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path))
    kept: list[str] = []
    draft = draft_package(name, [], None, [], kept.append)
    assert not mark.exists()
    reasons = {op.rpartition("_")[2]: why for op, why in draft.drafted.left_out.items()}
    assert "its meta kernel ends the process: crashed with SIGSEGV" in reasons["ends"]
    assert [e.form.name.rpartition("_")[2] for e in draft.drafted.entries] == ["scale", "copy"]
    assert len(kept) == 3
    assert "_a_scale" in kept[0]
    assert kept[-1] == draft.text


@pytest.mark.long
def test_a_script_that_fails_leaves_what_it_recorded(run: Any, package: Any) -> None:
    name, folder = package
    done = run("init", folder / "ops.py", "--package", name, "--record", folder / "script.py", "--json", "--", "fail")
    assert done.exit_code == 1
    summary = json.loads(done.stdout)
    assert summary["failure"].startswith("ValueError: after the calls (line ")
    assert "Float32[Tensor" in text_of(folder / "ops.py")
    assert "script.py failed: ValueError: after the calls" in done.stderr


@pytest.mark.parametrize(
    ("options", "id", "expected"),
    [
        (["--package", "no_such_package_here"], "SL501", "an installed module"),
        (["--package", "json"], "SL501", "the package has no op to draft"),
        ([], "SL501", "--from SOURCE, or --package NAME"),
        (["--package", "json", "--from", "aten::relu"], "SL501", "both --from and --package"),
        (["--from", "aten::relu", "--namespace", "x"], "SL501", "--from and --namespace"),
        (["--package", "json", "--record", "absent.py"], "SL602", "no such file"),
        (["--package", "json", "--", "--size", "3"], "SL501", "the arguments --size 3 without --record"),
    ],
)
def test_what_cannot_be_drafted_is_refused(run: Any, options: list[str], id: str, expected: str) -> None:
    done = run("init", "-", *options)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(id)
    assert expected in done.stderr


@pytest.mark.long
def test_a_draft_of_a_whole_package_parses_and_imports_with_every_op_as_it_is(package: Any) -> None:
    """Every drafted op is adopted when the module is imported, and a call of it goes to the package's op."""
    name, folder = package
    program = (
        "import sys\nfrom shiplap.cli.app import main\n"
        f"sys.argv[1:] = ['init', 'ops.py', '--package', '{name}', '--record', 'script.py']\n"
        "try: main()\nexcept SystemExit as e: assert not e.code, e.code\n"
        "import torch, ops\nfrom shiplap.dispatch import Op\n"
        "adopted = [v for v in vars(ops).values() if isinstance(v, Op)]\n"
        "assert len(adopted) == 6, adopted\n"
        "assert torch.equal(ops.gather(torch.eye(3), torch.tensor([2])), torch.eye(3)[2:])\n"
    )
    (folder / "program.py").write_text(program)
    done = python(folder / "program.py", cwd=folder, imported=WITH_VERBS)
    assert done.returncode == 0, done.stdout + done.stderr
