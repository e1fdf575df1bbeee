# ruff: noqa: E501 (a case a line; C++ as it is written)
"""Bad metadata: file, line, what is wrong and the nearest correct name, before any C++ is written."""

from pathlib import Path

import pytest

from shiplap_backend import BackendError
from shiplap_testing.effort import sampled
from tests.backend import described

pytest.importorskip("openvino")

# ops, line, id, part of `got`
BAD = {
    "unknown overload": (
        "  add.outt: {template: binary, graph: self}\n",
        1,
        "SL901",
        "'add.outt'; did you mean 'add.out'?",
    ),
    "base name": ("  add: {template: binary, graph: self}\n", 1, "SL901", "'add'"),
    "functional overload of a structured group": (
        "  add.Tensor: {template: binary, graph: self + other * alpha}\n",
        1,
        "SL901",
        "add.Tensor: template 'binary'",
    ),
    "template": ("  add.out: {template: binry, graph: self}\n", 1, "SL901", "template 'binry'; did you mean 'binary'?"),
    "field": ("  add.out:\n    template: binary\n    grpah: self\n", 3, "SL901", "did you mean 'graph'?"),
    "type of a field": (
        "  add.out:\n    template: binary\n    shape_only: alpha\n",
        3,
        "SL901",
        "Expected `array`, got `str`",
    ),
    "duplicate": (
        "  add.out: {template: binary, graph: self}\n  add.out: {template: binary, graph: self}\n",
        2,
        "SL901",
        "duplicate 'add.out'",
    ),
    "dtype": ("  add.out:\n    template: binary\n    dtypes: flaot\n", 3, "SL901", "'flaot'; did you mean 'float'?"),
    "version range": ("  add.out:\n    template: binary\n    torch: newest\n", 3, "SL901", "torch: 'newest'"),
    "what a body does not read": (
        "  trace:\n    template: custom\n    graph: self\n",
        1,
        "SL901",
        "'graph', which template 'custom' does not read",
    ),
    "what ATen decides": (
        "  exp.out: {template: unary, graph: Exp(self), output: {out: {mode: bypass}}}\n",
        1,
        "SL901",
        "'output', which template 'unary' does not read",
    ),
    "a number that C++ has not": (
        "  exp.out: {template: unary, graph: Exp(self) * 1e999}\n",
        1,
        "SL902",
        "inf is not a number that C++ has",
    ),
    "not YAML": ("  add.out: {template: binary\n", 2, "SL901", "not YAML"),
    "input that is no argument": (
        "  add.out: {template: binary, graph: self + other * alpha, inputs: {othr: raw}}\n",
        1,
        "SL901",
        "'othr'; did you mean 'other'?",
    ),
    "values called shapes": (
        "  add.out: {template: binary, graph: self + other, shape_only: [alpha]}\n",
        1,
        "SL901",
        "shape_only: 'alpha' carries values",
    ),
    "dropped argument": ("  add.out: {template: binary, graph: self + other}\n", 1, "SL903", "'alpha' of add.out("),
    "two dropped arguments": (
        "  addmm.out: {template: matmul, graph: self + mat1 @ mat2}\n",
        1,
        "SL903",
        "'beta', 'alpha'",
    ),
    "vendor function": (
        "  add.out: {template: binary, graph: 'Addd(self, other * alpha)'}\n",
        1,
        "SL902",
        "'Addd' is no vendor function; did you mean 'Add'?",
    ),
    "too few vendor arguments": ("  exp.out: {template: unary, graph: 'MatMul(self)'}\n", 1, "SL902", "needs B"),
    "too many vendor arguments": (
        "  exp.out: {template: unary, graph: 'Exp(self, self)'}\n",
        1,
        "SL902",
        "at most 1 arguments, got 2",
    ),
    "vendor keyword": (
        "  gelu.out: {template: unary, graph: \"Gelu(self, mod='ERF')\"}\n",
        1,
        "SL902",
        "did you mean 'mode'?",
    ),
    "vendor enum": (
        "  gelu.out: {template: unary, graph: \"Gelu(self, mode='ERV')\"}\n",
        1,
        "SL902",
        "did you mean 'ERF'?",
    ),
    "argument of an expression": (
        "  exp.out: {template: unary, graph: Exp(slef)}\n",
        1,
        "SL902",
        "did you mean 'self'?",
    ),
    "type in an expression": (
        "  exp.out: {template: unary, graph: 'Softmax(self, self)'}\n",
        1,
        "SL902",
        "'self' is a tensor, expected a int",
    ),
    "not an expression": ("  exp.out: {template: unary, graph: 'Exp(self'}\n", 1, "SL902", "not an expression"),
    "no language of ours": (
        "  exp.out: {template: unary, graph: 'Exp((lambda: self)())'}\n",
        1,
        "SL902",
        "not part of the language",
    ),
    "C++ in a string": (
        "  gelu.out: {template: unary, graph: \"Gelu(self, mode='ERF);evil(')\"}\n",
        1,
        "SL902",
        "is not a number that C++ has",
    ),
    "graph without an output": (
        "  max.dim_max: {template: reduction, graph: {max: self}, shape_only: [keepdim]}\n",
        1,
        "SL901",
        "no 'max_values'",
    ),
    "unstructured without a rule": (
        "  relu: {template: functional, graph: Relu(self)}\n",
        1,
        "SL901",
        "output 'result' has no rule",
    ),
    "update of no argument": (
        "  relu: {template: functional, graph: Relu(self), output: {result: {mode: bypass}}, updates: {slef: {graph: self}}}\n",
        1,
        "SL901",
        "updates: 'slef'; did you mean 'self'?",
    ),
    "format of no argument": (
        "  relu: {template: functional, graph: Relu(self), output: {result: {mode: sizes, sizes: sizes(self), format: [slef]}}}\n",
        1,
        "SL901",
        "format: 'slef'; did you mean 'self'?",
    ),
    "overload of the device core": ("  empty_strided: {template: custom}\n", 1, "SL901", "'empty_strided'"),
}


@pytest.mark.parametrize("name", sampled(BAD, len(BAD) // 2))
def test_says_file_line_and_nearest_name(tmp_path: Path, name: str) -> None:
    ops, number, id, got = BAD[name]
    with pytest.raises(BackendError) as caught:
        described.made(tmp_path, ops)
    assert caught.value.id == id
    assert caught.value.where.startswith(f"{tmp_path / 'ops.yaml'}:{described.line(number)}")
    assert got in caught.value.got


def test_a_vendor_function_of_another_signature(tmp_path: Path) -> None:
    """The headers are read again with each release of the vendor: what no longer fits says where, and what fits."""
    import dataclasses

    from shiplap_backend.generate import generate_wrappers
    from shiplap_backend.metadata import load_metadata
    from shiplap_backend.runtimes import find_runtime
    from shiplap_backend.vendor import VendorFunction, VendorParameter

    openvino = find_runtime("openvino")
    text = "  gelu.out: {template: unary, graph: \"Gelu(self, mode='TANH' if approximate == 'tanh' else 'ERF')\"}\n"
    metadata = load_metadata(described.write(tmp_path, text))
    (whole, *_) = openvino.opset()["Gelu"]
    (data, mode) = whole.parameters
    integer = VendorParameter("axis", "int", "int64_t", False)
    for parameters, got in {
        (data, dataclasses.replace(mode, name="approximation")): "no parameter 'mode'",
        (data, mode, integer): "Gelu(data, mode = ..., axis) needs axis",
        (data, dataclasses.replace(mode, kind="bool")): "expected a bool",
        (data,): "Gelu(data) has no parameter 'mode'",
    }.items():
        changed = VendorFunction("Gelu", whole.call, whole.every, parameters, "node", whole.header)
        with pytest.raises(BackendError) as caught:
            generate_wrappers(
                metadata, dataclasses.replace(openvino, opset=lambda c=changed: {**openvino.opset(), "Gelu": (c,)})
            )
        assert (caught.value.id, caught.value.where.partition(": ")[0]) == (
            "SL902",
            f"{tmp_path}/ops.yaml:{described.line(1)}",
        )
        assert got in caught.value.got


def test_the_whole_message(tmp_path: Path) -> None:
    with pytest.raises(BackendError) as caught:
        described.made(tmp_path, "  add.out: {template: binary, graph: self + other}\n")
    schema = "add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)"
    assert str(caught.value) == (
        "SL903: an ATen argument is not used\n"
        f"  where    {tmp_path}/ops.yaml:{described.line(1)}: add.out\n"
        f"  got      'alpha' of {schema}\n"
        "  expected an argument that is mapped, guarded or shape only\n"
        "  fix      use the argument in 'graph'. If the backend supports only some of its values, add it to 'guard'. "
        "If it affects only shapes, add it to 'shape_only'"
    )


def test_a_version_range_leaves_an_entry_out_with_its_reason(tmp_path: Path) -> None:
    made = described.made(tmp_path, "  exp.out: {template: unary, graph: Exp(self), torch: '<2.0'}\n")
    assert not made.wrappers
    assert made.skipped[0].reason.startswith("needs torch <2.0, here is 2.")


def test_extends_and_only(tmp_path: Path) -> None:
    from shiplap_backend.metadata import load_metadata

    path = tmp_path / "ops.yaml"
    path.write_text("extends: openvino\nonly: [add.out, mm.out]\nops: {exp.out: {template: unary, graph: Exp(self)}}\n")
    assert sorted(load_metadata(path).entries) == ["add.out", "exp.out", "mm.out"]
    path.write_text("extends: openvion\n")
    with pytest.raises(BackendError, match="did you mean 'openvino'"):
        load_metadata(path)
    path.write_text("extends: openvino\nonly: [add.oout]\n")
    with pytest.raises(BackendError, match=r"only: 'add.oout'; did you mean 'add.out'"):
        load_metadata(path)
