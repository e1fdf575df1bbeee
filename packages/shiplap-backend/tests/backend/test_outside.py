"""Runtimes that live outside of the package: found by path and by entry point, refused with a reason, and working."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap_backend import BackendError
from shiplap_backend.entries import target_dtypes, wide_dtype
from shiplap_backend.generate import generate_wrappers
from shiplap_backend.metadata import load_metadata
from shiplap_backend.project import create_project, generate_project, open_project
from shiplap_backend.runtimes import find_runtime, runtime_names
from tests.backend.examples import EXAMPLE, built

GOOD = (EXAMPLE / "runtime.py").read_text(encoding="utf-8")

# runtime.py, id, line, part of `got`
BAD = {
    "another contract": (GOOD.replace("contract=1", "contract=99"), "SL909", 1, "contract 99"),
    "no such module": ("\nimport tinyc_is_not_here\n", "SL910", 2, "No module named 'tinyc_is_not_here'"),
    "no Python": ("RUNTIME = (\n", "SL910", 1, "SyntaxError"),
    "no RUNTIME": ("runtime = 1\n", "SL910", 1, "no RUNTIME"),
    "no Runtime": ("RUNTIME = 1\n", "SL910", 1, "a int"),
    "a text for a path": (GOOD.replace("directory=HERE", "directory='here'"), "SL910", 1, "directory = 'here'"),
    "no metadata": (GOOD.replace("ops.yaml", "opps.yaml"), "SL910", 1, "opps.yaml"),
    "no vendor.h": (GOOD.replace(', graph="eager"', ""), "SL910", 1, "vendor.h"),
    "no functions": (GOOD.replace("directory=HERE", "directory=HERE / 'none'"), "SL910", 1, "functions.h"),
    "no such graph": (GOOD.replace('"eager"', '"lazy"'), "SL910", 1, "graph = 'lazy'"),
    "no name": (GOOD.replace('"tinyc"', '"Tiny-C"'), "SL910", 1, "a runtime named 'Tiny-C'"),
    "no contract": (GOOD.replace("contract=1, ", ""), "SL910", 8, "missing 1 required positional argument: 'contract'"),
}


def copied(directory: Path, description: str = GOOD) -> Path:
    """The example with another runtime.py."""
    directory.mkdir()
    for file in EXAMPLE.iterdir():
        if file.is_file():
            (directory / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    (directory / "runtime.py").write_text(description, encoding="utf-8")
    return directory


@pytest.mark.parametrize("name", BAD)
def test_a_directory_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    description, id, line, got = BAD[name]
    where = copied(tmp_path / "runtime", description)
    with pytest.raises(BackendError) as caught:
        create_project("mine", str(where), tmp_path / "p")
    assert caught.value.id == id
    assert caught.value.where.startswith(f"{where / 'runtime.py'}:{line}")
    assert got in caught.value.got
    assert not (tmp_path / "p").exists()


def test_no_directory_and_no_name(tmp_path: Path) -> None:
    for name, got in {
        str(tmp_path): "No such file",
        "./nothing": "No such file",
        "tinycc": "no runtime 'tinycc'",
    }.items():
        with pytest.raises(BackendError, match=f"SL907(.|\n)*{re.escape(got)}"):
            find_runtime(name)


def test_a_project_finds_its_runtime_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied(tmp_path / "runtime").parent)
    root = create_project("mine", "./runtime", Path("p")).root.resolve()
    assert 'runtime = "../runtime"' in (root / "backend.toml").read_text(encoding="utf-8")
    monkeypatch.chdir("/")
    project = open_project(root)
    made, touched = generate_project(project)
    assert project.runtime.name == "tinyc"
    assert len(made.wrappers) == len(load_metadata(project.runtime.metadata).entries)
    assert "wrappers_00.cpp" in touched


def offered(site: Path, name: str, value: str) -> None:
    """An installed distribution that offers a runtime."""
    info = site / f"{name}_{len(list(site.iterdir()))}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {info.name.partition('-')[0]}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[shiplap.runtimes]\n{name} = {value}\n")


def test_an_installed_runtime_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = copied(tmp_path / "tinyc_outside")
    (package / "__init__.py").write_text(GOOD, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    offered(tmp_path, "tinyc", "tinyc_outside:RUNTIME")
    assert "tinyc" in runtime_names()
    project = create_project("mine", "tinyc", tmp_path / "p")
    assert 'runtime = "tinyc"' in (project.root / "backend.toml").read_text(encoding="utf-8")
    assert open_project(project.root).runtime.directory == package
    assert open_project(project.root).metadata().target.runtime == "tinyc"
    offered(tmp_path, "tinyc", "tinyc_outside:OTHER")
    with pytest.raises(BackendError, match=r"SL910(.|\n)*2 runtimes of this name"):
        find_runtime("tinyc")
    offered(tmp_path, "wrong", "tinyc_outside:RUNTIME")
    with pytest.raises(BackendError, match=r"SL910(.|\n)*a runtime named 'tinyc'(.|\n)*'wrong'"):
        find_runtime("wrong")
    offered(tmp_path, "gone", "tinyc_gone:RUNTIME")
    with pytest.raises(BackendError, match=r"SL910(.|\n)*No module named 'tinyc_gone'"):
        find_runtime("gone")


@pytest.mark.parametrize(
    ("guard", "cpp"),
    [
        ("alpha == 1", "(alpha.toDouble() == INT64_C(1))"),
        ("not alpha != -1", "!((alpha.toDouble() != -(INT64_C(1))))"),
        ("0 < alpha < 2 and alpha == 1", "((INT64_C(0) < alpha.toDouble()) && (alpha.toDouble() < INT64_C(2)))"),
    ],
)
def test_scalars_are_compared_by_us_and_not_by_the_vendor(tmp_path: Path, guard: str, cpp: str) -> None:
    """tinyc has no operator `==`: an argument that is no tensor needs none."""
    head = (EXAMPLE / "ops.yaml").read_text(encoding="utf-8").partition("ops:\n")[0]
    path = tmp_path / "ops.yaml"
    tinyc = find_runtime(str(EXAMPLE))
    for entry in (
        f"guard: {{{guard}: scaled}}, graph: self + other * alpha",
        f'graph: "self + other if {guard} else self + other * alpha"',
    ):
        path.write_text(f"{head}ops:\n  add.out: {{template: binary, {entry}}}\n", encoding="utf-8")
        assert cpp in generate_wrappers(load_metadata(path), tinyc, units=1).files["wrappers_00.cpp"]


def test_a_function_that_metadata_cannot_call_is_named_where_it_stands(tmp_path: Path) -> None:
    """It was listed as a function, and the entry that called it was at fault."""
    where = copied(tmp_path / "runtime")
    header = where / "functions.h"
    lines = header.read_text(encoding="utf-8").splitlines()
    header.write_text("\n".join([*lines, "inline Node Scan(Node a, job_kind kind) { return a; }"]), encoding="utf-8")
    head = (where / "ops.yaml").read_text(encoding="utf-8").partition("ops:\n")[0]
    (where / "ops.yaml").write_text(
        f"{head}ops:\n  exp.out: {{template: unary, graph: 'Scan(self, 1)'}}\n", encoding="utf-8"
    )
    with pytest.raises(BackendError) as caught:
        generate_wrappers(load_metadata(where / "ops.yaml"), find_runtime(str(where)))
    assert caught.value.got == (
        f"{header}:{len(lines) + 1}: metadata cannot call it, since no expression gives 'job_kind kind'"
    )


@pytest.mark.long
def test_a_model_trains_on_it(request: pytest.FixtureRequest) -> None:
    """The tutorial's last step: a device of the example, and the losses of the CPU."""
    project = built(request.config, "tinyc", EXAMPLE)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(EXAMPLE / "train.py")]
    run = subprocess.run(command, cwd=project.root.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "as on the CPU" in run.stdout
    calls = dict(re.findall(r"^(aten::\S+) +(\d+) native", run.stdout, re.M))
    for op in ("add.out", "addmm.out", "mm.out", "mul.out", "relu", "sum.IntList_out", "threshold_backward.grad_input"):
        assert int(calls[f"aten::{op}"]) > 0, op
    assert "dtype" not in run.stdout  # a Python number among tensors is float32 as well


@pytest.mark.parametrize(
    ("more", "line", "got"),
    [
        ("inline Node Add(Node a, Node c) { return a; }", 1, "a second function 'Add' for the same arguments"),
        ("inline Node Add(Node a, double c) { return a; }", 1, "a second function 'Add' for the same arguments"),
        ("inline Node Sum(Node a, Sizes n, bool b = true) { return a; }", 1, "a second function 'Sum' for the same"),
        ("inline int64_t rank(Node a) { return 0; }", 1, "'rank' for the same arguments; every runtime has the first"),
    ],
)
def test_two_functions_that_one_call_may_mean(tmp_path: Path, more: str, line: int, got: str) -> None:
    """The first one was taken without a word."""
    where = copied(tmp_path / "runtime")
    header = where / "functions.h"
    text = header.read_text(encoding="utf-8")
    header.write_text(f"{text}{more}\n", encoding="utf-8")
    with pytest.raises(BackendError) as caught:
        find_runtime(str(where)).functions()
    assert (caught.value.id, caught.value.where) == ("SL910", f"{header}:{text.count(chr(10)) + line}")
    assert got in caught.value.got
    # Other arguments are another call.
    others = "inline Node Add(Node a, Node b, Node c) { return a; }\ninline Node rank(Node a, bool b) { return a; }\n"
    header.write_text(text + others, encoding="utf-8")
    functions = find_runtime(str(where)).functions()
    assert (len(functions["Add"]), len(functions["rank"])) == (2, 2)


def target(tmp_path: Path, dtypes: str, entry: str) -> Path:
    """Return a metadata file of tinyc with other dtypes and one entry, in its last line."""
    head = (EXAMPLE / "ops.yaml").read_text(encoding="utf-8").partition("ops:\n")[0].replace("[f32]", dtypes)
    path = tmp_path / "ops.yaml"
    path.write_text(f"{head}ops:\n  {entry}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("dtypes", "computes"),
    [("[f16]", "opmath(op.common_dtype(), dtypes({at::kHalf}))"), ("[f32, i32]", "opmath(op.common_dtype())")],
)
def test_a_target_computes_in_its_own_dtypes(tmp_path: Path, dtypes: str, computes: str) -> None:
    """A target of f16 alone was asked to compute in f32, which its functions do not take."""
    path = target(tmp_path, dtypes, "exp.out: {template: unary, graph: Exp(self)}")
    made = generate_wrappers(load_metadata(path), find_runtime(str(EXAMPLE)), units=1)
    assert f"const at::ScalarType compute = {computes};" in made.files["wrappers_00.cpp"]
    there = target_dtypes(load_metadata(path).target)
    assert wide_dtype("f16", there) == ("f16" if dtypes == "[f16]" else "f32")


@pytest.mark.parametrize("field", ["compute: f32", "inputs: {self: f32}"])
def test_a_dtype_beyond_the_target(tmp_path: Path, field: str) -> None:
    entry = f"relu: {{template: functional, {field}, graph: Relu(self), output: {{result: {{mode: bypass}}}}}}"
    path = target(tmp_path, "[f16]", entry)
    with pytest.raises(BackendError) as caught:
        load_metadata(path)
    last = path.read_text(encoding="utf-8").count("\n")
    assert (caught.value.id, caught.value.where) == ("SL901", f"{path}:{last}")
    assert "'f32', which no set of the target's dtypes holds" in caught.value.got


def test_one_graph_only(tmp_path: Path) -> None:
    where = copied(tmp_path / "runtime")
    (where / "vendor.h").write_text("#pragma once\n", encoding="utf-8")
    with pytest.raises(BackendError, match=r"SL910(.|\n)*graph = 'eager' and a vendor\.h"):
        find_runtime(str(where))


def test_the_example_is_short() -> None:
    """What a vendor writes besides the kernels themselves, in lines of 88 columns that are not blank."""
    files = ("runtime.py", "functions.h", "ops.yaml")
    lines = [line for f in files for line in (EXAMPLE / f).read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) < 100
