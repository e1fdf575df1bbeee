"""What ninja is told to compile, separate and together; conftest.py compiles the tests' device together."""

import subprocess
from pathlib import Path

import pytest

from shiplap_backend import BackendError, build
from shiplap_backend.build import _render_ninja_file, build_extension
from shiplap_backend.project import create_project, generate_project
from tests.backend.examples import EXAMPLE

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


@pytest.mark.parametrize("flags", [[], ["-static-libstdc++"]])
def test_a_library_with_a_cxx_runtime_of_its_own_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some compilers link it in by default, and the first import of the device ended the process."""
    made = create_project("mine", str(EXAMPLE), tmp_path / "mine", units=1)
    generate_project(made, accept_drift=True)
    source = tmp_path / "m.cpp"
    source.write_text("#include <string>\nextern \"C\" int f() { return std::stoi(std::string(3, '1')); }\n")

    def linked(command: list[str], tell: object) -> tuple[int, str]:
        subprocess.run(["g++", "-shared", "-fPIC", "-o", made.package / "_C.so", source, *flags], check=True)
        return 0, ""

    monkeypatch.setattr(build, "_run_ninja", linked)
    monkeypatch.setenv("CXX", "/some/g++")
    if not flags:
        assert build_extension(made).is_file()
        return
    with pytest.raises(
        BackendError, match=r"SL906[\s\S]*/some/g\+\+ has linked the C\+\+ runtime[\s\S]*CXX=/usr/bin/g"
    ):
        build_extension(made)
    assert not (made.package / "_manifest.json").exists()
