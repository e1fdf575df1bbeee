"""``shiplap eject``: plain sources that need no Shiplap, and the ops that have none."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shiplap.cli.target import resolve_targets
from shiplap.errors import ShiplapError
from shiplap.packaging.eject import EjectedPackage, eject
from shiplap_testing.forked import python

HELPERS = '''
import torch
from jaxtyping import Float

FACTOR = 2.0


def doubled(x: Float[torch.Tensor, "*n"]):
    """Twice x."""
    return x * FACTOR
'''
OPS = '''
import functools
import math
import torch
from jaxtyping import Float, Int64
from torch import Tensor
import shiplap as sl
from {ns}_helpers import doubled as twice

WEIGHTS = {{"half": 0.5}}
EPS = math.sqrt(1e-12)

@sl.op("{ns}::cast", autocast="float32")  # a name that the generated code has too
def cast(x: Float[Tensor, "n c"], bias: Float[Tensor, "c"] | None = None, scale: float = 1.0) -> Float[Tensor, "n c"]:
    """A sum."""
    out = twice(x) * WEIGHTS["half"] * scale + EPS
    return out if bias is None else out + bias

@cast.kernel("cpu", dtypes="float32", supports=lambda_free)
def _(x, bias, scale, *, out):
    # a comment that stays
    torch.add(x * scale, 0 if bias is None else bias, out=out)

@cast.backward
def _(grad, saved, needs):
    return {{"x": grad * saved.scale, "bias": grad.sum(0) if needs.bias else None}}

@sl.op("{ns}::total", outputs=("sums", "count"))
def total(xs: list[Float[Tensor, "n"]], *, power: int = 1) -> tuple[Float[Tensor, "n"], Int64[Tensor, ""]]:
    return torch.stack(xs).pow(power).sum(0), torch.tensor(len(xs))

@total.backward
def _(grads, saved, needs):
    return {{"xs": [saved.power * x.pow(saved.power - 1) * grads[0] for x in saved.xs]}}

@sl.op("{ns}::fill_", mutates="table", aliases="table")
def fill_(table: Float[Tensor, "m c"], rows: Float[Tensor, "n c"], at: Int64[Tensor, "n"]) -> Float[Tensor, "m c"]:
    table[at] = rows
    return table

@fill_.samples
def _(rng, sizes, dtype, device):
    n = min(sizes["n"], sizes["m"])
    table, rows = (torch.randn(k, sizes["c"], generator=rng).to(dtype) for k in (sizes["m"], n))
    return table, rows, torch.randperm(sizes["m"], generator=rng)[:n]

@sl.op("{ns}::drop_", mutates="table")
def drop_(table: Float[Tensor, "m c"], at: Int64[Tensor, "n"]) -> None:
    table[at] = 0  # which torch refuses where the table has no rows

@sl.op("{ns}::above", bounds={{"k": "n"}}, nondifferentiable=("x",))
def above(x: Float[Tensor, "n"], least: float) -> Float[Tensor, "k"]:
    return x[x > least]

@sl.op("{ns}::halves", requires="n % 2 == 0")
def halves(x: Float[Tensor, "n"], mode: int = 0) -> Float[Tensor, "n//2"]:
    return cast(x.reshape(-1, 2)).sum(1)
'''
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith(("shiplap", "jaxtyping")):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
"""
TESTS = (
    BLOCKED
    + """
import os
import pytest
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Shiplap's plugin would be imported
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *sys.argv[1:]]))
"""
)


def module(folder: Path, ns: str, text: str = OPS) -> Path:
    """Write the module of ops and the one that it imports from."""
    (folder / f"{ns}_helpers.py").write_text(HELPERS)
    file = folder / f"{ns}_ops.py"
    text = text.replace("supports=lambda_free", "supports=has_rows")
    file.write_text(text.format(ns=ns).replace("@sl.op", "def has_rows(x):\n    return len(x) > 0\n\n@sl.op", 1))
    return file


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of an ejected package where neither Shiplap nor jaxtyping can be imported."""
    program = folder.parent / "blocked_tests.py"
    program.write_text(TESTS)
    return python(program, folder, *options, cwd=folder.parent)


def ejected(folder: Path, ns: str) -> tuple[EjectedPackage, Path]:
    made, out = eject(resolve_targets([str(module(folder, ns))]), f"{ns}_plain"), folder / f"{ns}_plain"
    made.write(out)
    return made, out


def test_ejected_ops_pass_their_tests_without_shiplap(tmp_path: Path, ns: str) -> None:
    made, out = ejected(tmp_path, ns)
    assert made.ops == tuple(f"{ns}::{name}" for name in ("cast", "total", "fill_", "drop_", "above", "halves"))
    text = (out / "__init__.py").read_text()
    assert "shiplap" not in text.lower().replace("ejected from their declarations by shiplap", "")
    assert {"    # a comment that stays", "FACTOR = 2.0", "EPS = math.sqrt(1e-12)"} <= {*text.splitlines()}
    done = run_tests(out, "-k", "not compiled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.long
def test_ejected_ops_compile(tmp_path: Path, ns: str) -> None:
    _, out = ejected(tmp_path, ns)
    done = run_tests(out, "-k", "compiled")
    assert done.returncode == 0, done.stdout + done.stderr


CALLS = """
import torch
sys.path.insert(0, sys.argv[1])
import {ns}_plain as plain

def refused(function, *args):
    try:
        function(*args)
    except (ValueError, RuntimeError) as e:
        print(str(e).replace("\\n", " | "))

x = torch.ones(3, 4, requires_grad=True)
refused(plain.cast, x, torch.ones(5))
refused(plain.cast, x.double(), torch.ones(4))
refused(plain.halves, torch.ones(3))
refused(lambda: plain.above(x[0], 0.5).sum().backward())
table = torch.zeros(4, 2)
refused(plain.fill_, table, table[:2], torch.tensor([0, 1]))
version = table._version
assert plain.fill_(table, torch.ones(2, 2), torch.tensor([0, 3])) is table and table.sum() == 4
assert table._version > version  # autograd is told
with torch.autocast("cpu", torch.bfloat16):
    assert plain.cast(x.bfloat16(), torch.ones(4)).dtype is torch.float32
"""


def test_wrong_calls_get_the_words_of_the_declaration(tmp_path: Path, ns: str) -> None:
    ejected(tmp_path, ns)
    program = tmp_path / "calls.py"
    program.write_text(BLOCKED + CALLS.format(ns=ns))
    done = python(program, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sizes, dtypes, requires, gradient, memory = done.stdout.splitlines()
    assert "argument 'bias', dim 'c' (axis 0): sizes disagree |   got      c = 5 |   expected c = 4, in 'x'" in sizes
    assert "dtypes disagree" in dtypes
    assert "declaration" not in dtypes
    assert "got      n = 3 |   expected n % 2 == 0" in requires
    assert f"{ns}::above has no gradient" in gradient
    assert "memory of argument 'rows'" in memory


CHANGED = """
import torch
import shiplap as sl
from jaxtyping import Float
from torch import Tensor, sum

SCALE = 1.0
SCALE *= 3.0
TABLE = {{}}
for number in range(3):
    TABLE[number] = number * 2.0
if TABLE:
    LEAST = 4.0
else:
    LEAST = 5.0

@sl.op("{ns}::rows")
def rows(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    return sum(x, 1) * SCALE * TABLE[2] + LEAST
"""


def test_names_keep_the_values_that_they_had(tmp_path: Path, ns: str) -> None:
    file = tmp_path / f"{ns}_changed.py"
    file.write_text(CHANGED.format(ns=ns))
    lines = eject(resolve_targets([str(file)]), "plain").files["__init__.py"].splitlines()
    assert "from torch import sum" in lines  # which is not the builtin one
    assert {"SCALE = 3.0", "TABLE = {0: 0.0, 1: 2.0, 2: 4.0}", "LEAST = 4.0"} <= {*lines}


def test_a_module_beside_the_ops_is_not_imported(tmp_path: Path, ns: str) -> None:
    (tmp_path / f"{ns}_helpers.py").write_text(HELPERS)
    file = tmp_path / f"{ns}_beside.py"
    text = CHANGED.format(ns=ns).replace("import torch\n", f"import torch\nimport {ns}_helpers as helpers\n", 1)
    file.write_text(text.replace("sum(x, 1)", "helpers.doubled(sum(x, 1))"))
    with pytest.raises(ShiplapError, match=f"helpers is the module {ns}_helpers beside it"):
        eject(resolve_targets([str(file)]), "plain")


REFUSED = {
    "object": (
        "class Plan(sl.Opaque):\n    pass\n\n"
        '@sl.op("{ns}::bad")\ndef bad(x: Float[Tensor, "n"], plan: Plan) -> Float[Tensor, "n"]:\n    return x\n',
        "its argument plan is an object",
    ),
    "closure": (
        'def make(k):\n    @sl.op("{ns}::bad")\n    def bad(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:\n'
        "        return x * k\n    return bad\n\nbad = make(3)\n",
        "reads k of the function around it",
    ),
    "lambda": (
        '@sl.op("{ns}::bad")\ndef bad(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:\n    return x\n\n'
        'bad.kernel("cpu", lambda x: x * 1)\n',
        "is not written as a def",
    ),
    "name": (
        '@sl.op("{ns}::bad")\ndef bad(x: Float[Tensor, "n"], output: float) -> Float[Tensor, "n"]:\n'
        "    return x * output\n\n@bad.backward\ndef _(grad, saved, needs):\n"
        '    return {{"x": grad * saved.output}}\n',
        "an argument is called output, as something in the generated code is",
    ),
    "shiplap": (
        '@sl.op("{ns}::bad")\ndef bad(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:\n    return x\n\n'
        '@bad.kernel("cpu")\ndef _(x):\n    sl.settings()\n    return x * 1\n',
        "its code uses sl of shiplap",
    ),
    "configs": (
        '@sl.op("{ns}::bad")\ndef bad(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:\n    return x\n\n'
        '@bad.kernel("cpu", name="tiled", configs=[{{"T": 1}}, {{"T": 2}}])\ndef _(x, *, out, T):\n    out.copy_(x)\n',
        "its kernel tiled is chosen among configs by tuning (--accept-loss ejects it without)",
    ),
    "template": (
        '@sl.op("{ns}::bad")\ndef bad(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:\n    return x\n\n'
        'open("t.cpp.jinja", "w").close()\nbad.template("cpu", "t.cpp.jinja")\n',
        "it has the template t, which only Shiplap's lowering renders",
    ),
}


ADOPTED = """
import torch
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

@torch.library.custom_op("{ns}::foreign", mutates_args=())
def source(x: Tensor) -> Tensor:
    return x * 2

@sl.adopt("{ns}::foreign")
def foreign(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2

@sl.adopt("{ns}::foreign", into="{ns}::taken")
def taken(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2

@sl.op("{ns}::good")
def good(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1

@sl.op("{ns}::bad")
def bad(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return foreign(x) + 1
"""


def test_what_is_adopted_is_left_out_with_a_word(tmp_path: Path, ns: str) -> None:
    file = tmp_path / f"{ns}_adopted.py"
    file.write_text(ADOPTED.format(ns=ns))
    ops = resolve_targets([str(file)])
    with pytest.raises(ShiplapError, match=f"{ns}::foreign: it is adopted, and an op that is ejected calls it"):
        eject(ops, "plain")
    made = eject([op for op in ops if op.spec.opname != "bad"], "plain")
    assert (made.ops, list(made.lost)) == ((f"{ns}::good",), [f"{ns}::taken"])


@pytest.mark.parametrize("case", REFUSED)
def test_an_op_without_a_plain_form_is_named_before_anything_is_written(
    case: str, tmp_path: Path, ns: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, reason = REFUSED[case]
    head = "import torch\nimport shiplap as sl\nfrom jaxtyping import Float\nfrom torch import Tensor\n\n"
    file = tmp_path / f"{ns}_refused.py"
    good = '\n@sl.op("{ns}::good")\ndef good(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:\n    return x + 1\n'
    file.write_text((head + text + good).format(ns=ns))
    result = run("eject", file, "-o", tmp_path / "plain", "--json")
    assert result.exit_code == 2, result.output
    failure = json.loads(result.stdout)["error"]
    assert (failure["id"], failure["got"].partition(": ")[0]) == ("SL323", f"{ns}::bad")
    assert reason in failure["got"]
    assert f"{ns}::good" not in failure["got"]
    assert not (tmp_path / "plain").exists()
    result = run("eject", f"{file}:good", "-o", tmp_path / "plain", "--json")  # as the fix says
    assert result.exit_code == 0, result.output
    if case in ("configs", "template"):
        result = run("eject", file, "-o", tmp_path / "lossy", "--accept-loss", "--json")
        assert list(json.loads(result.stdout)["lost"]) == [f"{ns}::bad"], result.output


def test_no_file_is_overwritten_unless_asked(tmp_path: Path, ns: str, run: Any) -> None:
    file, out = module(tmp_path, ns), tmp_path / "plain"
    assert run("eject", f"{file}:halves", "-o", out).exit_code == 0
    assert (out / "__init__.py").read_text().count("def _check_cast(") == 1  # an op that another one calls comes along
    (out / "__init__.py").write_text("mine")
    result = run("eject", f"{file}:halves", "-o", out, "--json")
    assert json.loads(result.stdout)["error"]["id"] == "SL602"
    assert (out / "__init__.py").read_text() == "mine"
    result = run("eject", f"{file}:halves", "-o", out, "--json", "--force")
    assert json.loads(result.stdout)["ops"] == [f"{ns}::halves", f"{ns}::cast"]
    assert (out / "__init__.py").read_text() != "mine"


def test_a_folder_that_python_does_not_import_is_refused(tmp_path: Path, ns: str, run: Any) -> None:
    result = run("eject", module(tmp_path, ns), "-o", tmp_path / "my-ops", "--json")
    assert json.loads(result.stdout)["error"]["id"] == "SL613"


SOURCE = '''
import torch
from jaxtyping import Float32
from torch import Tensor
import shiplap as sl

@sl.op("{ns}::scaled_")
def scaled(x: Float32[Tensor, "n c"], by: float = 2.0) -> Float32[Tensor, "n c"]:
    return x * by

@scaled.backward
def _(grad, saved, needs):
    return {{"x": scaled(grad, saved.by)}}

CODE = """
#include "{ns}_part.h"
int {ns}_scaled(const sl_context* ctx, const DLTensor* x, DLTensor* out, double by) {{
  const float* from = static_cast<const float*>(x->data);
  for (int64_t i = 0; i < x->shape[0] * x->shape[1]; i++) static_cast<float*>(out->data)[i] = times(from[i], by);
  return SL_OK;
}}
"""
scaled.kernel("cpu", sl.source(symbol="{ns}_scaled", code=CODE, language="c++", include_dirs=["."]))
'''


def native_module(folder: Path, ns: str) -> Path:
    (folder / f"{ns}_part.h").write_text(
        "static float times(float a, double b) { return static_cast<float>(a * b); }\n"
    )
    file = folder / f"{ns}_native.py"
    file.write_text(SOURCE.format(ns=ns))
    return file


def test_a_kernel_in_cpp_becomes_a_torch_library(tmp_path: Path, ns: str) -> None:
    made = eject(resolve_targets([str(native_module(tmp_path, ns))]), "plain")
    text = made.files["csrc/ops.cpp"]
    assert f"STABLE_TORCH_LIBRARY_FRAGMENT({ns}, m)" in text
    assert f"STABLE_TORCH_LIBRARY_IMPL({ns}, CPU, m)" in text
    assert 'm.def("scaled_(Tensor x, float by=2.0) -> Tensor");' in text
    assert "SL2" not in text  # no ids of a catalogue
    assert {f"csrc/{ns}_scaled/{ns}_part.h", f"csrc/{ns}_scaled/code.cpp", "build.py"} <= made.files.keys()
    assert "csrc/shiplap/abi.h" in made.copies  # a header, beside the sources that include it
    assert ".define(" not in made.files["__init__.py"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_an_ejected_cpp_op_passes_its_tests(tmp_path: Path, ns: str) -> None:
    out = tmp_path / "plain"
    eject(resolve_targets([str(native_module(tmp_path, ns))]), "plain").write(out)
    done = run_tests(out)
    assert done.returncode == 0, done.stdout + done.stderr


WRITES = '''
import torch
from jaxtyping import Float32
from torch import Tensor
import shiplap as sl

@sl.op("{ns}::bump_", mutates="x")
def bump(x: Float32[Tensor, "n"], by: float = 2.0) -> None:
    x.add_(by)

CODE = """
int {ns}_bump(const sl_context* ctx, DLTensor* x, double by) {{
  for (int64_t i = 0; i < x->shape[0]; i++) static_cast<float*>(x->data)[i] += static_cast<float>(by);
  return SL_OK;
}}
"""
bump.kernel("cpu", sl.source(symbol="{ns}_bump", code=CODE, language="c++"))
'''
WRITING_CALLS = """
import torch
sys.path.insert(0, sys.argv[1])
import {ns}_plain as plain

x, w = torch.ones(3), torch.ones(3, requires_grad=True)
total = (w * x).sum()
plain.bump(x)
assert x.tolist() == [3.0] * 3
for call in (total.backward, lambda: plain.bump(w * 1)):
    try:
        call()
    except RuntimeError as e:
        print(str(e).partition(chr(10))[0])
with torch.no_grad():
    plain.bump(w)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_autograd_knows_of_writes_in_cpp(tmp_path: Path, ns: str) -> None:
    file = tmp_path / f"{ns}_writes.py"
    file.write_text(WRITES.format(ns=ns))
    made = eject(resolve_targets([str(file)]), f"{ns}_plain")
    assert "support.watch_writes(" in made.files["__init__.py"]
    made.write(tmp_path / f"{ns}_plain")
    program = tmp_path / "calls.py"
    program.write_text(BLOCKED + WRITING_CALLS.format(ns=ns))
    done = python(program, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved, written = done.stdout.splitlines()
    assert "modified by an inplace operation" in saved
    assert "a tensor that is written to requires a gradient" in written
