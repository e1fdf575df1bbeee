"""Edits of metadata, of a runtime's files and of settings that were written before anything was run on them.

``bad_edits.json`` has them by file: what becomes an entry, or a text and what replaces it. All are refused with the
file, before anything is compiled, but those of ``unknowable``, each with the reason why only values can tell.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shiplap_backend import BackendError
from shiplap_backend.project import create_project, generate_project, open_project
from shiplap_testing.effort import sampled
from shiplap_testing.paths import REPOSITORY
from tests.backend import described
from tests.backend.test_malformed import GOOD

pytest.importorskip("openvino")

EDITS = json.loads(Path(__file__).with_name("bad_edits.json").read_text(encoding="utf-8"))
UNKNOWABLE = EDITS.pop("unknowable")
CASES = [f"{file}: {name}" for file, edits in EDITS.items() for name in edits]


def use_edited(directory: Path, file: str, old: str, new: str = "") -> None:
    """Use ``file`` with ``new`` in the place of ``old``, or with the entry ``old``, up to the generated C++."""
    if file == "ops.yaml":
        described.made(directory, f"{old}\n")
        return
    root = directory / "runtime" if file != "backend.toml" else create_project("mine", "openvino", directory / "p").root
    if file == "backend.toml":
        (root / file).write_text(GOOD, encoding="utf-8")
    else:
        shutil.copytree(REPOSITORY / "examples" / "runtime-sticks", root)
    text = (root / file).read_text(encoding="utf-8")
    assert old in text
    (root / file).write_text(text.replace(old, new), encoding="utf-8")
    if file == "backend.toml":
        open_project(root)
    else:
        generate_project(create_project("mine", str(root), directory / "p"), accept_drift=True)


@pytest.mark.parametrize("case", sampled(CASES, 24))
def test_it_is_refused(tmp_path: Path, case: str) -> None:
    file, _, name = case.partition(": ")
    with pytest.raises(BackendError) as caught:
        use_edited(tmp_path, file, *EDITS[file][name])
    places = f"{file}:", *(("runtime.py", "ops.yaml:") if file in ("runtime.py", "functions.h") else ())
    assert any(place in caught.value.where for place in places), caught.value


@pytest.mark.parametrize("name", UNKNOWABLE)
def test_it_is_unknowable(tmp_path: Path, name: str) -> None:
    assert len(UNKNOWABLE) <= 3
    use_edited(tmp_path, "ops.yaml", UNKNOWABLE[name][0])
