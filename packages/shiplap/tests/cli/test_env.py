"""``shiplap env`` describes; it never fails because something is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap.cli import env
from shiplap.compat.versions import RELEASES, short


def test_json_is_all_of_stdout(process: Any) -> None:
    done = process("env", "--json")
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert set(parsed) == {"versions", "devices", "capabilities", "settings", "libraries", "bindings"}
    assert parsed["versions"]["torch"] == torch.__version__
    assert parsed["devices"][0]["device"] == "cpu"


def test_text_and_json_say_the_same(run: Any) -> None:
    text = run("env").stdout
    for row in json.loads(run("env", "--json").stdout)["settings"]:
        assert row["variable"] in text
        assert row["meaning"] in text


def test_capabilities_on_an_unknown_torch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    verified = ", ".join(short(release) for release in RELEASES)
    assert f"unverified (run on {verified})" in run("env").stdout


def test_settings_in_force(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    settings = {s["variable"]: s["value"] for s in json.loads(run("env", "--json").stdout)["settings"]}
    assert settings["SHIPLAP_STRICT"] == "True"


def test_missing_library_has_its_fix(tmp_path: Path) -> None:
    entry = env._located("a.family", tmp_path / "libabsent.so")
    assert (entry["found"], entry["symbols"]) == (False, 0)
    assert entry["problem"].startswith("SL401: the kernel library cannot be loaded; build the library")


def test_compiler_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert env.versions()["compiler"] is None


def test_a_family_that_cannot_be_imported_is_described() -> None:
    (entry,) = env._libraries_of("absent_family")
    assert entry["problem"].startswith("cannot be imported: ModuleNotFoundError")
