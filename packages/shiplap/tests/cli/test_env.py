"""``shiplap env`` describes; it never fails because something is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap.cli import env
from shiplap.dispatch import registry
from shiplap.kernels.native import binding, build_plan
from shiplap.torch_private.versions import read_table
from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY


@pytest.mark.long
def test_json_is_all_of_stdout(process: Any) -> None:
    done = process("env", "--json")
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert set(parsed) == {"versions", "devices", "capabilities", "settings", "libraries", "bindings"}
    assert parsed["versions"]["torch"] == torch.__version__
    assert parsed["devices"][0]["device"] == "cpu"


@pytest.mark.long
def test_text_and_json_say_the_same_of_the_settings_in_force(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    text, settings = run("env").stdout, json.loads(run("env", "--json").stdout)["settings"]
    for row in settings:
        assert row["variable"] in text
        assert row["meaning"] in text
    assert {row["variable"]: row["value"] for row in settings}["SHIPLAP_STRICT"] == "True"


def test_capabilities_on_an_unknown_torch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    shown = run("env").stdout
    verified = ", ".join(version for version, row in read_table().items() if "calls below autograd" in row["verified"])
    assert f"unverified (run on {verified}); a call goes through torch's dispatcher" in shown
    assert "used all the same: torch has no public way" in shown


def test_bindings_that_share_a_library_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for each op, those of a large family took seconds."""
    written: list[tuple[int, ...]] = []
    plain = build_plan.native_source
    monkeypatch.setattr(build_plan, "native_source", lambda ops: (written.append(tuple(map(id, ops))), plain(ops))[1])
    rows = {row["op"]: (row["binding"], row["why"]) for row in env.op_bindings()}
    assert len(written) == len(set(written)) < len(rows)
    several = [op for op in registry.declared_op_list() if op.spec.name in rows][::20]
    assert [binding.state(op) for op in several] == [rows[op.spec.name] for op in several]


def test_missing_library_has_its_fix(tmp_path: Path) -> None:
    entry = env._locate_library("a.family", tmp_path / "libabsent.so")
    assert (entry["found"], entry["symbols"]) == (False, 0)
    assert entry["problem"].startswith("SL401: the kernel library cannot be loaded; correct the path in sl.cabi")


def test_compiler_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert env.installed_versions()["compiler"] is None


def test_a_family_that_cannot_be_imported_is_described() -> None:
    (entry,) = env._libraries_of("absent_family")
    assert entry["problem"].startswith("cannot be imported: ModuleNotFoundError")


WITHOUT = """
import torch
from jaxtyping import Float
from torch import Tensor
import shiplap as sl

@sl.op("no_compiler::double")
def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x

@double.kernel("cpu")
def kernel(x, *, out):
    torch.mul(x, 2, out=out)

x = torch.ones(3)
assert torch.equal(double(x), 2 * x)
assert torch.equal(torch.compile(lambda x: double(x) + 1, backend="aot_eager")(x), 2 * x + 1)
try:
    torch.compile(lambda x: (double(x) + 1).sin())(x)
except Exception as e:
    print(type(e).__name__, e)
"""


def test_without_a_compiler_eager_calls_work_and_every_place_says_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inductor has an error of its own; ``shiplap env`` and the tutorial name it before it is met."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = python("-c", WITHOUT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "InvalidCxxCompiler" in done.stdout
    monkeypatch.setenv("CXX", "no-such-compiler")
    env.command(json=False)
    assert "torch.compile raises InvalidCxxCompiler for the CPU" in capsys.readouterr().out
    assert "`InvalidCxxCompiler`" in (REPOSITORY / "docs" / "get-started.md").read_text(encoding="utf-8")
