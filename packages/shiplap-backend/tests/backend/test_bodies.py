"""Hand-written bodies: another signature is an error of its line when C++ is generated."""

from pathlib import Path

import pytest

from shiplap_backend import BackendError
from shiplap_backend.project import Project, create_project, generate_project

pytest.importorskip("openvino")

OPS = "extends: openvino\nonly: [exp.out]\nops:\n  addcmul.out: {template: custom}\n  trace: {template: custom}\n"
RIGHT = """\
#include <bodies.h>
namespace shiplap::backend::bodies {
// at::Tensor trace(int wrong) { in a comment }
static int trace_of(int n) { return n; }
Tensor trace(Tensor const& self) { return self; }

at::Tensor &addcmul_out(
    const at::Tensor &self, const at::Tensor& tensor1, const Tensor & tensor2, at::Scalar const& /*value*/,
    at::Tensor& out) {
  TORCH_CHECK(false, "at::Tensor trace(int wrong) {");
}
}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = create_project("handmade", "openvino", tmp_path_factory.mktemp("bodies") / "p")
    (made.root / "ops.yaml").write_text(OPS)
    return made


def write(project: Project, text: str) -> Path:
    for old in project.bodies.iterdir():
        old.unlink()
    path = project.bodies / "addcmul_out.cpp"
    path.write_text(text)
    return path


def test_bodies_may_stand_in_one_file_and_are_written_as_cpp_may_be(project: Project) -> None:
    path = write(project, RIGHT)
    generate_project(project)
    assert sorted(project.bodies.iterdir()) == [path]  # no scaffold beside a body that is there


@pytest.mark.parametrize(
    ("old", "new_", "line", "got"),
    [
        (
            "Tensor const& self)",
            "Tensor const& slef)",
            5,
            "parameter 1: 'Tensor const& slef' stands for 'self'; did you mean 'self'?",
        ),
        (
            "& tensor1, const Tensor & tensor2",
            "& tensor2, const Tensor & tensor1",
            7,
            "parameter 2: 'const at::Tensor& tensor2' stands for 'tensor1', 'tensor2' is parameter 3",
        ),
        ("at::Scalar const& /*value*/", "double value", 7, "parameter 4: 'double value' is no 'const at::Scalar &'"),
        ("at::Tensor& out)", "const at::Tensor& out)", 7, "parameter 5: 'const at::Tensor& out' is no 'at::Tensor &'"),
        (",\n    at::Tensor& out)", ")", 7, "4 parameters, not 5"),
        ("Tensor trace(Tensor", "void trace(Tensor", 5, "it returns void, not at::Tensor"),
        (
            "at::Tensor &addcmul_out(",
            "at::Tensor &addcmul_ou(",
            4,
            "no definition of 'addcmul_out'; did you mean 'addcmul_ou'?",
        ),
    ],
    ids=["name", "order", "type", "const", "number", "return", "function"],
)
def test_another_signature(project: Project, old: str, new_: str, line: int, got: str) -> None:
    assert old in RIGHT
    path = write(project, RIGHT.replace(old, new_))
    with pytest.raises(BackendError) as caught:
        generate_project(project)
    assert caught.value.id == "SL908"
    assert caught.value.got == got
    assert caught.value.where.startswith(f"{path}:{line}: ")
    assert "(const at::Tensor & self" in caught.value.expected


def test_a_functional_body_serves_the_overloads_that_follow_from_it(project: Project, tmp_path: Path) -> None:
    """`relu_` is registered with `relu`, and is made of its body."""
    mine = create_project("more", "openvino", tmp_path / "p")
    (mine.root / "ops.yaml").write_text("extends: openvino\nonly: [exp.out]\nops:\n  relu: {template: custom}\n")
    made, _ = generate_project(mine)
    text = "".join(made.files.values())
    assert 'm.impl("relu_"' in text
    assert "at::Tensor & relu_(at::Tensor & self) {\n  const auto results = relu(self);" in text
