"""The schema lock: drift of torch is told in schemas, and stops the generator."""

import json
from pathlib import Path

import pytest

from shiplap import ShiplapError
from shiplap_backend import BackendError, lock
from shiplap_backend.metadata import load_metadata
from shiplap_backend.project import Project, create_project, generate_project
from tests.backend import described

pytest.importorskip("openvino")

OPS = """\
  exp.out: {template: unary, graph: Exp(self)}
  relu: {template: functional, graph: Relu(self), output: {result: {mode: bypass}}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = create_project("drifting", "openvino", tmp_path / "p")
    described.write(made.root, OPS)
    generate_project(made)
    return made


def _edit(project: Project, change) -> None:
    data = json.loads(project.lock.read_text())
    change(data)
    project.lock.write_text(json.dumps(data))


def test_the_lock_holds_the_entries_and_what_they_serve(project: Project) -> None:
    held = lock.read_lock(project.lock)
    assert {"exp", "exp_", "exp.out", "relu", "relu_"} <= set(held.schemas)
    assert "add.out" not in held.schemas


def test_a_changed_schema_stops_the_generator_and_is_shown(project: Project) -> None:
    old = "relu(Tensor self, bool inplace=False) -> Tensor"
    _edit(project, lambda d: d.update(torch="2.10.0") or d["schemas"].update(relu=old))
    before = {p: p.stat().st_mtime_ns for p in project.generated.iterdir()}
    with pytest.raises(BackendError) as caught:
        generate_project(project)
    assert caught.value.id == "SL904"
    assert caught.value.got == f"changed relu\n  - {old}\n  + relu(Tensor self) -> Tensor"
    assert "torch 2.10.0" in caught.value.expected
    assert before == {p: p.stat().st_mtime_ns for p in project.generated.iterdir()}
    generate_project(project, accept_drift=True)
    assert lock.read_lock(project.lock).schemas["relu"] == "relu(Tensor self) -> Tensor"


def test_a_new_entry_joins_the_lock(project: Project) -> None:
    described.write(project.root, OPS + "  mm.out: {template: matmul, graph: self @ mat2}\n")
    generate_project(project)
    assert "mm.out" in lock.read_lock(project.lock).schemas


def test_difference_of_two_releases() -> None:
    old = lock.SchemaLock("2.13.0", {"a": "a() -> ()", "b": "b(Tensor grad) -> Tensor", "c": "c() -> ()"})
    new_ = lock.SchemaLock("2.15.0", {"b": "b(Tensor grad_output) -> Tensor", "c": "c() -> ()", "d": "d() -> ()"})
    assert [str(c) for c in lock.diff_schemas(old, new_)] == [
        "removed a() -> ()",
        "changed b\n  - b(Tensor grad) -> Tensor\n  + b(Tensor grad_output) -> Tensor",
        "added d() -> ()",
    ]


def test_a_damaged_lock_says_so(project: Project) -> None:
    project.lock.write_text("{")
    with pytest.raises(BackendError, match="SL904: the schema lock is damaged"):
        generate_project(project)


def test_an_overload_that_torch_no_longer_has_is_an_error_of_its_line(project: Project) -> None:
    described.write(project.root, OPS + "  cholesky_gone: {template: functional, graph: self}\n")
    with pytest.raises(BackendError) as caught:
        generate_project(project)
    assert (caught.value.id, caught.value.where) == ("SL901", f"{project.root / 'ops.yaml'}:{described.line(3)}")


def test_shipped_metadata_names_no_overload_twice() -> None:
    from shiplap_backend.metadata import shipped_metadata

    text = shipped_metadata("openvino").read_text()
    assert len(load_metadata(shipped_metadata("openvino")).entries) == text.count("template:")


@pytest.mark.parametrize(
    "text", ["[]", "[" * 100_000, '{"torch": "2", "schemas": []}', '{"torch": 1}', "5", '"\\ud800"']
)
def test_a_lock_of_another_shape_is_an_error_of_the_catalogue(tmp_path, text):
    """A list raised TypeError, and deep brackets RecursionError."""
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(ShiplapError, match="SL904"):
        lock.read_lock(path)
