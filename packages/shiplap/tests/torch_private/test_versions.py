"""The releases of torch are listed once, runs write what is verified, and an unlisted torch takes the public path."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from shiplap.torch_private import CAPABILITIES, available, versions
from shiplap.torch_private.versions import RELEASES, minor_version, read_table, verified_on
from shiplap_testing import capabilities
from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY

LIST = re.compile(r"""["']2\.\d\d(\.\d)?["'],\s*["']2\.\d\d(\.\d)?["']""")
NAMES = {capability.name for capability in CAPABILITIES}


def test_each_capability_has_tests_and_each_row_is_of_a_run() -> None:
    text = "\n".join(file.read_text("utf-8") for file in capabilities.marked_files())
    assert set(re.findall(r'capability\("([^"]+)"\)', text)) == NAMES
    for row in read_table().values():
        assert set(row["verified"]) <= NAMES
        assert row["tests"]["passed"] >= len(row["verified"]) > 0
    assert minor_version("2.13.0+cpu") == "2.13"


def test_what_has_a_public_way_asks_whether_it_is_verified() -> None:
    text = "\n".join(p.read_text("utf-8") for p in (REPOSITORY / "packages/shiplap/src").rglob("*.py"))
    asked = set(re.findall(r'available\("([^"]+)"\)', text))
    assert asked == {c.name for c in CAPABILITIES if c.otherwise}


def test_a_listed_release_is_not_verified_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "RELEASES", (*RELEASES, "9.9.0"))
    assert verified_on("9.9.0") == frozenset()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    assert not any(available(name) or c.known for name, c in zip(NAMES, CAPABILITIES, strict=True))


def test_a_run_writes_the_row_of_its_release_and_leaves_the_others(tmp_path: Path) -> None:
    outcomes, table = capabilities.Outcomes(), tmp_path / "table.json"
    ended = {"autocast rules": ("passed", "skipped"), "rewrites": ("passed", "failed")}
    for name, outcome in [(name, outcome) for name, several in ended.items() for outcome in several]:
        properties = [("capability", name)]
        outcomes.pytest_runtest_logreport(SimpleNamespace(user_properties=properties, when="call", outcome=outcome))
    row = capabilities.row_of(outcomes)
    assert row["verified"] == ["autocast rules"]
    assert row["tests"] == {"passed": 2, "failed": 1, "skipped": 1}
    table.write_text(json.dumps({"2.99": {"torch": "2.99.0", "verified": []}}))
    capabilities.write_row(table, row)
    assert list(json.loads(table.read_text())) == [minor_version(torch.__version__), "2.99"]


def test_pip_takes_the_first_of_them_and_every_later_one() -> None:
    project = tomllib.loads((REPOSITORY / "packages" / "shiplap" / "pyproject.toml").read_text(encoding="utf-8"))
    (torch,) = (r for r in map(Requirement, project["project"]["dependencies"]) if r.name == "torch")
    assert str(torch.specifier) == f">={minor_version(min(RELEASES, key=Version))}"
    assert list(RELEASES) == sorted(RELEASES, key=Version)


def test_nothing_else_lists_releases() -> None:
    files = [REPOSITORY / "noxfile.py", *REPOSITORY.glob("tools/*.py"), *REPOSITORY.glob("packages/*/src/**/*.py")]
    assert len(files) > 300
    lists = [file for file in files if LIST.search(file.read_text(encoding="utf-8"))]
    assert lists == [REPOSITORY / "packages/shiplap/src/shiplap/torch_private/versions.py"]
    assert LIST.search('VERIFIED = ("2.11", "2.13")')


UNLISTED = """
import warnings
import torch
torch.__version__ = "9.9.0"
from jaxtyping import Float
from torch import Tensor
import shiplap as sl

@sl.op("unlisted::double")
def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x

@double.kernel("cpu")
def kernel(x, *, out):
    torch.mul(x, 2, out=out)

@double.backward
def gradient(grad, saved, needs):
    return {"x": 2 * grad}

assert not double.separable and double.direct is double.overload
assert type(double.overload._op).__name__ == "builtin_function_or_method", "torch's own, not replaced"
x = torch.ones(3, requires_grad=True)
double(x).sum().backward()
assert x.grad.tolist() == [2.0, 2.0, 2.0]
with torch.no_grad():
    assert double(x).tolist() == double(x=x).tolist() == [2.0, 2.0, 2.0]
    out = torch.empty(3)
    assert double.out(x, out=out).tolist() == [2.0, 2.0, 2.0]
    assert torch.compile(lambda x: double(x), fullgraph=True)(x).tolist() == [2.0, 2.0, 2.0]
    assert torch.func.vmap(double)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2

from shiplap.inductor import fusion_choices
from tests.inductor.targets import qmm

arguments = torch.randn(5, 8), torch.ones(8, 4, dtype=torch.int8), torch.ones(4)
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    compiled = torch.compile(lambda *args: qmm(*args), fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), qmm.reference(*arguments))
    compiled(*arguments)
said = [str(w.message) for w in caught if "no template is used" in str(w.message)]
assert len(said) == 1 and "compiled code calls fusetest::qmm" in said[0] and "torch 9.9.0" in said[0], said
assert fusion_choices() == ()
"""


def test_an_unlisted_torch_takes_the_public_path_and_says_so(tmp_path: Path) -> None:
    """Eager, with gradients, into memory of the caller, mapped, compiled; templates are opaque calls, with notice."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "SHIPLAP_CACHE_DIR": str(tmp_path)}
    done = python("-c", UNLISTED, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


OBJECT = """
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

class Gain(sl.Opaque, fields="value"):
    value = 3.0

@sl.op("unlisted::scale")
def scale(x: Float[Tensor, "n"], gain: Gain) -> Float[Tensor, "n"]:
    return x * gain.value
"""


def test_an_import_and_a_declaration_use_no_deprecated_name_of_torch() -> None:
    """Torch logs these at every import: since 2.14 the module of opaque objects and two functions of it."""
    done = python("-W", "error", "-c", OBJECT)
    assert (done.returncode, done.stderr) == (0, "")
