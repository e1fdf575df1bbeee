"""What the command line and the audit make of the families that are installed beside the core."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.projects import COMPILED, FAMILIES

import shiplap_sparse3d as sparse3d
from shiplap.audit import audit
from shiplap.cli import target
from shiplap.cli.families import Family, families
from shiplap.errors import ShiplapError


def names(*targets: str) -> list[str]:
    return [op.spec.name for op in target.resolve_targets(targets)]


def test_ops_of_installed_families_need_no_module() -> None:
    assert names("sparse3d::conv") == ["sparse3d::conv"]


def test_a_package_has_the_ops_of_its_submodules() -> None:
    assert "sparse3d::unique_coords" in names("shiplap_sparse3d")


def test_a_near_miss_among_their_ops() -> None:
    with pytest.raises(ShiplapError) as caught:
        names("sparse3d::convv")
    raised = caught.value
    assert (raised.id, raised.what, raised.expected) == (
        "SL501",
        "no op has this name",
        "did you mean 'sparse3d::conv'?",
    )


def test_the_audit_says_what_was_probably_meant(run: Any) -> None:
    result = run("audit", "sparse3d::subm_tabel")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean 'sparse3d::subm_table'?" in result.stderr


def test_their_verbs_are_listed_beside_those_of_the_core(run: Any) -> None:
    listed = re.findall(r"^  (\w+) ", run("--help").stdout.split("Commands:")[1].split("Exit status")[0], re.MULTILINE)
    assert {"backend", "demo", "slidesparse"} <= set(listed)


def test_help_of_the_demonstration_has_examples_and_exit_codes(run: Any) -> None:
    text = run("demo", "--help").stdout
    assert len(re.findall(r"^ +shiplap demo\b", text, re.MULTILINE)) >= 2
    assert re.search(r"Exit status:\n +0 ", text)
    assert "--json" in text
    assert max(map(len, text.splitlines())) <= 100


def test_env_lists_their_libraries(run: Any) -> None:
    assert "sparse3d" in run("env").stdout


def test_families_are_found_through_entry_points() -> None:
    listed = {f.name: f.module for f in families()}
    assert listed == dict(FAMILIES.values())
    assert listed["sparse3d"] == "shiplap_sparse3d"


@pytest.mark.parametrize("family", families(), ids=lambda f: f.module)
def test_families_with_c_kernels_have_a_header(family: Family) -> None:
    (distribution,) = (name for name, (short, _) in FAMILIES.items() if short == family.name)
    assert (family.header is not None) == (distribution in COMPILED)
    assert family.header is None or family.header.is_file()


def test_their_headers_agree_with_the_declarations(run: Any) -> None:
    result = run("header", "--check")
    assert result.exit_code == 0, result.stdout


def test_the_library_of_sparse3d_keeps_no_state() -> None:
    (finding,) = audit(sparse3d.conv, checks=["stateless"])
    assert finding.verdict == "ok", finding.evidence
