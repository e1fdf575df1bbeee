"""What the distributions under ``packages/`` say of themselves, so that no test lists them again."""

from __future__ import annotations

import tomllib
from typing import Any

from shiplap_testing.paths import REPOSITORY

# The distribution -> its parsed pyproject.toml.
PROJECTS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8"))
    for file in sorted(REPOSITORY.glob("packages/*/pyproject.toml"))
}

PUBLISHED = tuple(
    name
    for name, project in PROJECTS.items()
    if "Private :: Do Not Upload" not in project["project"].get("classifiers", ())
)

# Those whose wheels hold compiled kernels.
COMPILED = tuple(name for name in PUBLISHED if (REPOSITORY / "packages" / name / "CMakeLists.txt").is_file())

# The families: the distribution -> the name of the family and the module that declares its ops.
FAMILIES: dict[str, tuple[str, str]] = {
    name: family
    for name, project in PROJECTS.items()
    for family in project["project"].get("entry-points", {}).get("shiplap.families", {}).items()
}
