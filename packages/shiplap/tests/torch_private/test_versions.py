"""The releases of torch are listed once, and the list says only what can be."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from shiplap.torch_private import CAPABILITIES
from shiplap.torch_private.versions import RELEASES, short
from shiplap_testing.paths import REPOSITORY

LIST = re.compile(r"""["']2\.\d\d(\.\d)?["'],\s*["']2\.\d\d(\.\d)?["']""")
NAMES = {capability.name for capability in CAPABILITIES}


def test_what_was_not_verified_is_a_capability() -> None:
    assert {name for unverified in RELEASES.values() for name in unverified} <= NAMES
    assert all(capability.verified for capability in CAPABILITIES), "what no release verifies is not known to work"


def test_a_capability_is_verified_where_no_release_says_otherwise() -> None:
    for capability in CAPABILITIES:
        assert capability.verified == tuple(short(r) for r, but in RELEASES.items() if capability.name not in but)
    assert short("2.13.0+cpu") == "2.13"


def test_pip_takes_the_first_of_them_and_every_later_one() -> None:
    project = tomllib.loads((REPOSITORY / "packages" / "shiplap" / "pyproject.toml").read_text(encoding="utf-8"))
    (torch,) = (r for r in map(Requirement, project["project"]["dependencies"]) if r.name == "torch")
    assert str(torch.specifier) == f">={short(min(RELEASES, key=Version))}"
    assert list(RELEASES) == sorted(RELEASES, key=Version)


def test_nothing_else_lists_releases() -> None:
    files = [REPOSITORY / "noxfile.py", *REPOSITORY.glob("tools/*.py"), *REPOSITORY.glob("packages/*/src/**/*.py")]
    assert len(files) > 300
    lists = [file for file in files if LIST.search(file.read_text(encoding="utf-8"))]
    assert lists == []
    assert LIST.search('VERIFIED = ("2.11", "2.13")')
