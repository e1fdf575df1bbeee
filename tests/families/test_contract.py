"""What families may import, and whom the core may not name: wherever an import stands, in functions too."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tests.imports import Import, imports_of, modules
from tests.projects import FAMILIES

import shiplap
from shiplap_testing.paths import REPOSITORY

EXTEND = {name for name in modules("shiplap") if name == "shiplap.plugin_api" or name.startswith("shiplap.plugin_api.")}
# What shiplap-backend, a tool and not a family, may import besides; the contract in pyproject.toml names the same.
BACKEND = {
    "shiplap.codegen",
    "shiplap.torch_private.aten_operators",
    "shiplap.torch_private.host_device",
    "shiplap.torch_private.graph_objects",
    "shiplap.dtypes",
    "shiplap.safe_io",
}


def is_public(imported: Import) -> bool:
    """Whether an import of ``shiplap`` is of a documented name."""
    if imported.full in {"shiplap", *EXTEND}:
        return True
    if imported.module == "shiplap":
        return imported.name in shiplap.__all__
    return imported.module in EXTEND and imported.name in import_module(imported.module).__all__


def private_doors(package: str, allowed: frozenset[str] = frozenset()) -> Iterator[str]:
    """``module:line: what`` of each import, and each ``sl.name``, that is neither public nor allowed."""
    for name, path in modules(package).items():
        source = path.read_text(encoding="utf-8")
        for imported in imports_of(source, name):
            outside = imported.module == "shiplap" or imported.module.startswith("shiplap.")
            if outside and not is_public(imported) and not {imported.module, imported.full} & allowed:
                yield f"{name}:{imported.line}: {imported.full}"
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sl"):
                continue
            if node.attr not in shiplap.__all__:
                yield f"{name}:{node.lineno}: sl.{node.attr}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_imports_documented_names_only(family: str) -> None:
    assert list(private_doors(family)) == []


def test_the_backend_imports_what_the_contract_names() -> None:
    assert list(private_doors("shiplap-backend", frozenset(BACKEND))) == []
    assert {door.rpartition(": ")[2].rpartition(".")[0] for door in private_doors("shiplap-backend")} >= {
        "shiplap.codegen",
        "shiplap.torch_private.aten_operators",
    }, "the list of what is allowed is longer than it need be"


def test_a_private_door_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from typing import TYPE_CHECKING\n"
        "from importlib import import_module\n"
        "import shiplap as sl\n"
        "from shiplap.plugin_api import error, locate\n"
        "from shiplap import Op, torch_private\n"
        "if TYPE_CHECKING:\n"
        "    from shiplap.declare.config import Config\n"
        "def late():\n"
        "    from shiplap.plugin_api.verbs import out\n"
        "    import shiplap.tuning.engine\n"
        "    return import_module('shiplap.kernels'), sl.op, sl.errors\n"
    )
    monkeypatch.setattr("tests.families.test_contract.modules", lambda package: {"planted": planted})
    assert {door.removeprefix("planted:") for door in private_doors("")} == {
        "4: shiplap.plugin_api.locate",
        "5: shiplap.torch_private",
        "7: shiplap.declare.config.Config",
        "10: shiplap.tuning.engine",
        "11: shiplap.kernels",
        "11: sl.errors",
    }


def contracts() -> dict[str, dict[str, list[str]]]:
    data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["name"]: contract for contract in data["tool"]["importlinter"]["contracts"]}


def test_the_contracts_of_the_linter_list_every_room() -> None:
    rooms = {".".join(name.split(".")[:2]) for name in modules("shiplap") if "." in name} - {"shiplap.plugin_api"}
    families, backend = (c for name, c in contracts().items() if "uses" in name)
    assert set(families["forbidden_modules"]) == set(backend["forbidden_modules"]) == rooms
    assert set(families["source_modules"]) == {f.replace("-", "_") for f in FAMILIES}
    assert {line.rpartition(" -> ")[2] for line in backend["ignore_imports"]} == BACKEND


# --- who is named -----------------------------------------------------------------------------------------------------

OTHERS = sorted(p.name for p in (REPOSITORY / "packages").iterdir() if p.name not in ("shiplap", "shiplap-headers"))
NAMES = re.compile(
    "|".join(
        [
            *(name.replace("-", "[-_]") for name in OTHERS),
            *("sparse3d", "slidesparse", "dense::", "openvino", "onednn", "spconv", "flexgemm", "vllm"),
            *(f"shiplap {verb}" for verb in ("demo", "backend", "slidesparse")),
        ]
    ),
    re.IGNORECASE,
)
ALLOWED = (
    ("packages/shiplap/src/shiplap/torch_private/graph_keys.py", '"onednn",'),  # torch.ops.onednn
    ("packages/shiplap/src/shiplap/declare/code_files.py", '"vllm"'),  # one of the libraries that a user's code calls
)


@pytest.mark.parametrize("package", ["shiplap", "shiplap-headers"])
def test_the_core_names_no_family(package: str) -> None:
    """Neither in code nor in text: nobody has to look into the core when a family comes or goes."""
    files = [p for p in sorted((REPOSITORY / "packages" / package / "src").rglob("*")) if p.is_file()]
    texts = {p: p.read_text(encoding="utf-8") for p in files if p.suffix not in (".pyc", ".so")}
    told = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path, text in texts.items()
        if NAMES.search(text)  # one search for most files
        for number, line in enumerate(text.splitlines(), 1)
        if NAMES.search(line) and (path.relative_to(REPOSITORY).as_posix(), line.strip()) not in ALLOWED
    ]
    assert told == []
