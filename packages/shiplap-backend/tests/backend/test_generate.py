# ruff: noqa: E501 (a case a line; C++ as it is written)
"""The generator: the C++ of one op, the same bytes twice, files that stay as they are, the whole shipped metadata."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from shiplap_backend import BackendError
from shiplap_backend.generate import generate_wrappers, write_generated
from shiplap_backend.metadata import load_metadata, shipped_metadata
from shiplap_backend.project import create_project, generate_project
from shiplap_backend.runtimes import find_runtime
from tests.backend import described

pytest.importorskip("openvino")

ADD = '  add.out: {template: binary, graph: "self + other if alpha == 1 else self + other * alpha"}\n'
EXP = "  exp.out: {template: unary, graph: Exp(self)}\n"


def _wrapper(cpp: str) -> str:
    """The wrapper alone: what is around it names the torch."""
    return cpp.partition("namespace {\n\n")[2].partition("} // namespace")[0].strip()


@pytest.mark.parametrize(
    ("ops", "checked"),
    [
        ("  mm.out: {template: matmul, graph: self @ mat2}\n", "dtypes({dtype_of(self)}), self, mat2)"),
        (ADD, ""),  # torch promotes its operands
        ("  mm.out: {template: matmul, dtypes: [f32], graph: self @ mat2}\n", ""),  # there is one dtype
        ("  exp.out: {template: unary, graph: Exp(self)}\n", ""),
    ],
)
def test_operands_that_are_not_promoted_have_one_dtype(tmp_path: Path, ops: str, checked: str) -> None:
    body = described.body(tmp_path, ops)
    assert ("operands of several dtypes" in body) == bool(checked)
    assert checked in body


def test_the_wrapper_of_add(tmp_path: Path) -> None:
    assert_expected_inline(
        _wrapper(described.body(tmp_path, ADD)),
        """\
// add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)
//   graph: self + other if alpha == 1 else self + other * alpha
OpInfo info_add_out{"aten::add.out"};
at::Tensor & add_out(const at::Tensor & self, const at::Tensor & other, const at::Scalar & alpha, at::Tensor & out) {
  constexpr auto accepted = dtypes({at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool});
  if (const auto bad = outside(accepted, self, other)) return fallback<at::_ops::add_out>::call(Why::dtype, c10::toString(*bad), self, other, alpha, out);
  const c10::DeviceGuard guard(out.device());
  Structured<at::meta::structured_add_Tensor, 1> op(out);
  op.meta(self, other, alpha);
  if (!in(accepted, op.common_dtype())) return fallback<at::_ops::add_out>::call(Why::dtype, c10::toString(op.common_dtype()), self, other, alpha, out);
  [[maybe_unused]] const at::ScalarType compute = opmath(op.common_dtype());
  if (!(holds(self, op.common_dtype()) && holds(other, op.common_dtype()))) return fallback<at::_ops::add_out>::call(Why::value, "a number that the dtype does not hold", self, other, alpha, out);
  if ((is_empty(self) || is_empty(other)) && !(nothing_in(op.maybe_get_output(0)))) return fallback<at::_ops::add_out>::call(Why::empty, "an input has no elements", self, other, alpha, out);
  Call call(info_add_out);
  call.input(computed(self, op.common_dtype(), compute));
  call.input(computed(other, op.common_dtype(), compute));
  call.scalar(alpha, compute);
  call.attribute((alpha.toDouble() == INT64_C(1)));
  call.attribute(op.common_dtype());
  call.output(op.maybe_get_output(0));
  call.run([&](Graph& g) {
    [[maybe_unused]] size_t next = 0;
    const Node n_self = promoted(g, next++, op.common_dtype(), compute);
    const Node n_other = promoted(g, next++, op.common_dtype(), compute);
    const Node n_alpha = promoted(g, next++, op.common_dtype(), compute);
    [[maybe_unused]] size_t given = 0;
    g.output(given++, ((alpha.toDouble() == INT64_C(1)) ? make<ov::op::v1::Add>(n_self, n_other) : make<ov::op::v1::Add>(n_self, make<ov::op::v1::Multiply>(n_other, n_alpha))));
  });
  op.finish();
  return out;
}""",
    )


@pytest.fixture(scope="module")
def everything():
    return generate_wrappers(load_metadata(shipped_metadata("openvino")), find_runtime("openvino"))


def test_the_shipped_metadata_is_right(everything) -> None:
    native = {n for w in everything.wrappers for n in (w.declaration.name, *(d.name for d in w.derived))}
    native |= {n for w in everything.wrappers if w.declaration.structured for n in w.declaration.group}
    assert len(native) >= 570  # and those of the device core
    assert {"add.Tensor", "add_.Tensor", "mm", "relu_", "max.dim", "native_layer_norm"} <= native


def test_a_comparison_reads_its_number_in_the_dtype_of_the_operand(everything) -> None:
    compared = {w.declaration.name: w.keys for w in everything.wrappers if w.declaration.name.endswith(".Scalar_out")}
    for base in ("eq", "ne", "lt", "le", "gt", "ge"):
        assert "call.scalar(other, compared(op.common_dtype(), compute));" in compared[f"{base}.Scalar_out"]


def test_every_argument_is_used(everything) -> None:
    for w in everything.wrappers:
        if w.family.graph:
            assert set(w.uses) == {a.name for a in w.declaration.inputs}
            assert all(w.uses.values()), w.declaration.name


def test_everything_that_shapes_the_graph_is_in_the_key(everything) -> None:
    """Defect 7: label and output sizes were the key. An argument that the graph is built from is an input or an attribute."""
    for w in everything.wrappers:
        if w.family.graph:
            keys = " ".join(w.keys)
            for argument, use in w.uses.items():
                if use in ("graph input", "attribute"):
                    assert argument in keys, (w.declaration.name, argument)


def test_which_outputs_there_are_is_in_the_key(everything) -> None:
    """Gradients of input and weight can be alike in sizes: a graph of one must not be taken for one of the other."""
    text = "\n".join(everything.files.values())
    conditional = [(w, i) for w in everything.wrappers for i, sometimes in enumerate(w.sometimes) if sometimes]
    assert {"convolution_backward_overrideable", "native_batch_norm_backward"} <= {w.id for w, _ in conditional}
    for w, i in conditional:
        assert f"call.attribute(has({w.outputs[i]})); if (has({w.outputs[i]})) call.output" in text, w.id


def test_statistics_are_written_beside_the_results_and_only_when_asked(everything) -> None:
    (w,) = [w for w in everything.wrappers if w.id == "native_batch_norm"]
    assert [(name, when) for name, _, when, _ in w.updates] == [
        ("running_mean", "training"),
        ("running_var", "training"),
    ]
    text = "\n".join(everything.files.values())
    assert "const bool updates_running_mean = has(value(running_mean)) && (training);" in text
    assert "call.attribute(updates_running_mean);" in text
    assert "if (updates_running_mean) call.output(value(running_mean));" in text


def test_same_bytes_twice(everything) -> None:
    assert (
        generate_wrappers(load_metadata(shipped_metadata("openvino")), find_runtime("openvino")).files
        == everything.files
    )


def test_unchanged_files_keep_their_time(tmp_path: Path) -> None:
    made = described.made(tmp_path, ADD + EXP, units=8)
    assert sorted(write_generated(tmp_path / "g", made.files)) == sorted(made.files)
    for path in (tmp_path / "g").iterdir():
        os.utime(path, (1, 1))
    assert write_generated(tmp_path / "g", made.files) == []
    changed = described.made(tmp_path, ADD + EXP.replace("Exp(self)", "Exp(Abs(self))"), units=8)
    touched = write_generated(tmp_path / "g", changed.files)
    assert len(touched) == 1
    assert [p.name for p in (tmp_path / "g").iterdir() if p.stat().st_mtime > 1] == touched
    assert write_generated(tmp_path / "g", described.made(tmp_path, ADD, units=8).files) == touched
    assert not (tmp_path / "g" / touched[0]).exists()


def test_the_torch_of_a_newer_release_changes_only_the_banner(everything) -> None:
    for name, text in everything.files.items():
        assert text.startswith("// Written by `shiplap backend gen` from the metadata and torch"), name


def test_new_refuses_names_and_places_that_are_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, where, got in (
        ("Nope-1", tmp_path / "a", "'Nope-1'"),
        ("cuda", tmp_path / "a", "'cuda'"),
        ("fine", tmp_path, "not empty"),
    ):
        with pytest.raises(BackendError) as caught:
            create_project(name, "openvino", where)
        assert caught.value.id == "SL905"
        assert got in caught.value.got
    with pytest.raises(BackendError, match="did you mean 'openvino'"):
        create_project("fine", "openvin", tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_paths_may_hold_what_shells_and_ninja_read(tmp_path: Path) -> None:
    from shiplap_backend import build

    project = create_project("spaced", "openvino", tmp_path / "my $HOME: 'projects'")
    (project.root / "ops.yaml").write_text("extends: openvino\nonly: [add.out]\n")
    generate_project(project)
    (tmp_path / "build.ninja").write_text(build._render_ninja_file(project, project.package / "_C.so"))
    listed = subprocess.run(
        [build._find_ninja(), "-C", tmp_path, "-t", "commands"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    words = [word for line in listed for word in shlex.split(line)]
    assert f"-I{project.generated}" in words
    assert str(next(project.generated.glob("wrappers_*.cpp"))) in words


def test_a_machine_without_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap_backend import build

    project = create_project("bare", "openvino", tmp_path / "p")
    (project.root / "ops.yaml").write_text("extends: openvino\nonly: [add.out]\n")
    generate_project(project)
    monkeypatch.setattr(build, "_find_ninja", lambda: "no-such-ninja")
    with pytest.raises(BackendError, match=r"SL906: .*\n.*\n.*no program 'ninja'"):
        build.build_extension(project)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BackendError, match=r"SL907: .*\n.*\n.*no package 'yaml'"):
        generate_project(project)


def test_a_build_says_how_many_files_are_done() -> None:
    from shiplap_backend import build

    told: list[str] = []
    program = "print('[1/2] g++ a.cpp\\nnote: [7/7] of the compiler\\n[2/2] g++ b.cpp'); raise SystemExit(3)"
    status, printed = build._run_ninja([sys.executable, "-c", program], told.append)
    assert (status, told, "note: [7/7]" in printed) == (3, ["1/2 files", "2/2 files"], True)


def test_a_custom_body_is_scaffolded_once_and_declared(tmp_path: Path) -> None:
    project = create_project("handmade", "openvino", tmp_path / "p")
    (project.root / "ops.yaml").write_text("extends: openvino\nonly: [add.out]\nops:\n  trace: {template: custom}\n")
    generate_project(project)
    scaffold = project.bodies / "trace.cpp"
    assert "at::Tensor trace(const at::Tensor & self)" in scaffold.read_text()
    assert "at::Tensor trace(const at::Tensor & self);" in (project.generated / "bodies.h").read_text()
    scaffold.write_text(mine := f"// mine\n{scaffold.read_text()}")
    generate_project(project)
    assert scaffold.read_text() == mine
