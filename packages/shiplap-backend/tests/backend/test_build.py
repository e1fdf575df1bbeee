"""What ninja is told to compile, separate and together; conftest.py compiles the tests' device together."""

from pathlib import Path

import pytest

from shiplap_backend.build import _render_ninja_file
from shiplap_backend.project import create_project, generate_project

HERE = Path(__file__).parent


@pytest.mark.parametrize("together", [False, True])
def test_the_core_and_the_wrappers_are_compiled_once_each(tmp_path: Path, together: bool) -> None:
    pytest.importorskip("openvino")
    made = create_project("mine", "openvino", tmp_path / "mine", units=2)
    (made.root / "ops.yaml").write_text((HERE / "ops.yaml").read_text())
    generate_project(made, accept_drift=True)
    (made.root / "build").mkdir()
    rules = _render_ninja_file(made, made.package / "_C.so", together)
    objects = {line.split(":")[0].removeprefix("build ") for line in rules.splitlines() if ": compile" in line}
    separate = {"all.o", "wrappers_00.o", "wrappers_01.o"}
    assert objects & (separate | {"together.o"}) == ({"together.o"} if together else separate)
    assert {"graph.o", "profiler.o"} < objects
    (link,) = [line for line in rules.splitlines() if ": link" in line]
    assert {word for word in link.split() if word.endswith(".o")} == objects
    if together:
        included = (made.root / "build" / "together.cpp").read_text().splitlines()
        names = [Path(line.split('"')[1]).name for line in included]
        assert names == ["wrappers.h", "wrappers_00.cpp", "wrappers_01.cpp", "all.cpp"]
