"""Headers → signatures: node classes as OpenVINO declares them, free functions as ours do."""

from pathlib import Path

import pytest

from shiplap_backend.runtimes import find_runtime
from shiplap_backend.vendor import enum_values, free_functions, node_classes

HEADER = """
namespace ov { namespace op { namespace v1 {
// class OPENVINO_API Commented : public Op { Commented(int a); };
class OPENVINO_API Pool : public Op {
public:
    enum class Mode { FAST, RIGHT = 3 };
    Pool() = default;
    Pool(const Output<Node>& arg, const Strides& strides = {1, 1}, const std::vector<int64_t>& axes = {},
         const Mode mode = Mode::FAST);
    Pool(const OutputVector& args, std::shared_ptr<Thing> opaque);
    bool visit(AttributeVisitor& v);
};
} namespace v2 {
class OPENVINO_API Pool : public Op { public: Pool(const Output<Node>& newer); };
} } }
"""


def test_constructors_of_the_listed_version(tmp_path: Path) -> None:
    headers = tmp_path / "vendor" / "op"
    headers.mkdir(parents=True)
    (headers / "pool.hpp").write_text(HEADER)
    table = tmp_path / "table.hpp"
    table.write_text("_OPENVINO_OP_REG(Pool, ov::op::v1)\n_OPENVINO_OP_REG(Gone, ov::op::v0)\n")
    (pool,) = node_classes(headers, table)["Pool"]
    assert str(pool) == "Pool(arg, strides = ..., axes = ..., mode = ...)"
    assert [p.kind for p in pool.parameters] == ["node", "ints", "ints", "enum Mode"]
    assert pool.parameters[1].cpp == "ov::Strides"
    assert pool.call == "make<ov::op::v1::Pool>"
    assert pool.header == "vendor/op/pool.hpp"


def test_free_functions(tmp_path: Path) -> None:
    path = tmp_path / "h.h"
    path.write_text(
        "// In another dtype,\n// by torch's rules.\n"
        "inline Node cast(Node v, at::ScalarType to) { return v; }\n"
        "static int hidden(int a);\n"
        "inline std::vector<int64_t> axes(at::OptionalIntArrayRef d, const at::Tensor& t) {\n}\n"
    )
    functions = free_functions(path, "helpers", "h.h")
    signatures = {n: [str(f) for f in fs] for n, fs in functions.items()}
    assert signatures == {"axes": ["axes(d, t)"], "cast": ["cast(v, to)"]}
    assert (functions["axes"][0].about, functions["cast"][0].about) == ("", "In another dtype, by torch's rules.")
    assert (functions["axes"][0].returns, functions["cast"][0].returns) == ("ints", "node")


def test_the_result_type_may_stand_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "functions.h"
    path.write_text(
        "/* A comment of\n   two lines: http://example.org */\n"
        "// Twice.\n"
        "inline std::vector<Node>\n"
        "twice(Node a) { return {a, a}; }\n"
        "inline\nNode job(job_kind kind) { return {}; }\n"
    )
    functions = free_functions(path, "functions", "functions.h", ())
    twice, job = functions["twice"][0], functions["job"][0]
    assert (str(twice), twice.returns, twice.about) == ("twice(a)", "nodes", "Twice.")
    assert job.unusable.startswith(f"{path}:7: metadata cannot call it")


def test_a_function_that_no_expression_can_call_says_why(tmp_path: Path) -> None:
    path = tmp_path / "functions.h"
    path.write_text(
        "// Comment.\n"
        'inline Node scaled(Node a, Sizes sizes, std::string mode = "x") { return a; }\n'
        "inline Node job(job_kind kind, Node a) { return a; }\n"
        "inline Node shaped(Node a, Shapes sizes) { return a; }\n"
        "inline Node mixed(Node a, Mode mode) { return a; }\n"
    )
    functions = free_functions(path, "functions", "functions.h", {"Mode"})
    assert {n: f[0].unusable for n, f in functions.items()} == {
        "scaled": "",
        "mixed": "",
        "job": f"{path}:3: metadata cannot call it, since no expression gives 'job_kind kind'",
        "shaped": f"{path}:4: metadata cannot call it, since no expression gives 'Shapes sizes'",
    }
    assert [(p.kind, p.cpp, p.optional) for p in functions["scaled"][0].parameters[1:]] == [
        ("ints", "Sizes", False),
        ("str", "std::string", True),
    ]


@pytest.fixture(scope="module")
def openvino():
    pytest.importorskip("openvino")
    return find_runtime("openvino")


def test_the_installed_opset(openvino) -> None:
    functions = openvino.functions()
    assert len(functions) > 150
    assert str(functions["MatMul"][0]) == "MatMul(A, B, transpose_a = ..., transpose_b = ...)"
    assert {str(f) for f in functions["Swish"]} == {"Swish(arg, beta)", "Swish(arg)"}


def test_enums_of_the_class_that_is_meant(openvino) -> None:
    """ScatterElementsUpdate and ScatterNDUpdate each have a Reduction."""
    enums = openvino.enums()
    for cls, n in (("ov::op::v12::ScatterElementsUpdate", 6), ("ov::op::v15::ScatterNDUpdate", 6)):
        values = enum_values(enums, "enum Reduction", f"make<{cls}>")
        assert values["SUM"] == f"{cls}::Reduction::SUM"
        assert len(values) == n


def test_outputs_of_the_installed_operations(openvino) -> None:
    """The table of operations with several outputs is what OpenVINO makes of them."""
    import numpy
    import openvino.opset15 as ov

    data, numbers = ov.parameter([2, 4, 8, 8]), ov.constant(numpy.arange(4))
    made = {
        "MaxPool": (ov.max_pool(data, [1, 1], [1, 1], [0, 0], [0, 0], [2, 2]), 2),
        "AdaptiveMaxPool": (ov.adaptive_max_pool(data, [2, 2]), 2),
        "TopK": (ov.topk(data, 2, 1, "max", "none"), 2),
        "Unique": (ov.unique(numbers), 4),
        "ConvertPromoteTypes": (ov.convert_promote_types(numbers, numbers), 2),
        "Split": (ov.split(data, 1, 2), "num_splits"),
        "VariadicSplit": (ov.variadic_split(data, 1, [1, 3]), "split_lengths"),
        "Concat": (ov.concat([data, data], 1), 1),
        "Softmax": (ov.softmax(data, 1), 1),
    }
    functions = openvino.functions()
    for name, (node, outputs) in made.items():
        assert {f.outputs for f in functions[name]} == {outputs}, name
        assert node.get_output_size() == (outputs if isinstance(outputs, int) else 2), name
