# ruff: noqa: E501 (a case a line)
"""Edits that look harmless and would lose a value, an operator or a setting: each is refused with file and line."""

from pathlib import Path

import pytest

from shiplap_backend import BackendError
from shiplap_backend.project import create_project, open_project
from shiplap_testing.effort import sampled
from tests.backend import described

pytest.importorskip("openvino")

ADD = "  add.out: {template: binary, graph: self + other * alpha}\n"
EXP = "  exp.out:\n    template: unary\n    graph: Exp(self)\n"
RELU = "  relu:\n    template: functional\n    graph: Relu(self)\n    output: {result: {mode: bypass}}\n"

# ops, line, id, part of `got`
OPS = {
    "a scan as a sum": (
        "  cumsum.out: {template: structured, graph: 'CumSum(self, self)', shape_only: [dim, dtype]}\n",
        1,
        "SL901",
        "shape_only: 'dim' carries values",
    ),
    "all dims for some": (
        "  sum.IntList_out: {template: reduction, graph: 'ReduceSum(self, [0])', shape_only: [dim, keepdim, dtype]}\n",
        1,
        "SL901",
        "shape_only: 'dim' carries values",
    ),
    "a mode as a shape": (
        "  gelu.out: {template: unary, graph: Gelu(self), shape_only: [approximate]}\n",
        1,
        "SL901",
        "shape_only: 'approximate' carries values",
    ),
    "a flag as a shape": (
        "  topk.values: {template: structured, graph: {values: self, indices: self}, shape_only: [largest]}\n",
        1,
        "SL901",
        "shape_only: 'largest' carries values",
    ),
    "a number that a call chooses, redundant": (
        "  add.out: {template: binary, graph: self + other, redundant: {alpha: always 1}}\n",
        1,
        "SL901",
        "redundant: 'alpha', which no other argument decides",
    ),
    "a word that a call chooses, redundant": (
        "  gelu.out: {template: unary, dtypes: float, graph: Gelu(self), redundant: {approximate: about the same}}\n",
        1,
        "SL901",
        "redundant: 'approximate', which no other argument decides",
    ),
    "a range without numbers": (
        "  add.out: {template: binary, guard: {alpha > 1 and alpha < 1: a, alpha == 2: b}, graph: self + other}\n",
        1,
        "SL901",
        "guard: 'alpha > 1' and 'alpha < 1'",
    ),
    "a range without numbers, in two guards": (
        EXP + "    guard: {rank(self) > 3: many, 2 >= rank(self): few}\n",
        1,
        "SL901",
        "guard: 'rank(self) > 3' and '2 >= rank(self)'",
    ),
    "between two whole numbers": (
        EXP + "    guard: {'size(self, 0) > 2 and size(self, 0) < 3': size}\n",
        1,
        "SL901",
        "guard: 'size(self, 0) > 2' and 'size(self, 0) < 3'",
    ),
    "half a dim": (
        EXP + "    guard: {rank(self) == 2.5: dims}\n",
        1,
        "SL901",
        "'rank(self) == 2.5', which never holds",
    ),
    "more dims than torch has": (
        EXP + "    guard: {rank(self) > 64: dims}\n",
        1,
        "SL901",
        "'rank(self) > 64', which never",
    ),
    "an order and its opposite": (
        EXP + "    guard: {rank(self) < numel(self): a, rank(self) > numel(self): b}\n",
        1,
        "SL901",
        "guard: 'rank(self) < numel(self)' and 'rank(self) > numel(self)'",
    ),
    "each of two ways closed": (
        "  relu: {template: functional, graph: Relu(self), output: {result: {mode: bypass}}, guard: {rank(self) > 3 or rank(self) == 0: a, rank(self) == 2: b}}\n",
        1,
        "SL901",
        "guard: 'rank(self) == 0' and 'rank(self) == 2'",
    ),
    "neither way of a negation": (
        EXP + "    guard: {not (rank(self) > 2 or rank(self) < 3): dims}\n",
        1,
        "SL901",
        "guard: 'not rank(self) > 2' and 'not rank(self) < 3'",
    ),
    "a dtype that is not accepted": (
        EXP + "    dtypes: float\n    guard: {is_bool(self): dtype}\n",
        1,
        "SL901",
        "guard: 'is_bool(self)' holds for none of f32, f16, bf16",
    ),
    "no other dtype is accepted": (
        EXP + "    dtypes: float\n    guard: {not is_float(self): dtype}\n",
        1,
        "SL901",
        "guard: 'not is_float(self)' holds for none of f32, f16, bf16",
    ),
    "a number beyond the dtype": (
        "  exp.out: {template: unary, dtypes: [f16], compute: f16, graph: Exp(self) * 70000.0}\n",
        1,
        "SL901",
        "the number 70000.0 in the graph, which is beyond in f16",
    ),
    "a negative number beyond the dtype": (
        "  abs.out: {template: functional, dtypes: [i8], compute: i8, graph: 'Maximum(self, -200)', output: {out: {mode: iterator, of: unary_op}}}\n",
        1,
        "SL901",
        "the number -200 in the graph, which is beyond in i8",
    ),
    "a number that becomes zero": (
        "  exp.out: {template: unary, dtypes: [f16], compute: f16, graph: Exp(self) + 1.0e-12}\n",
        1,
        "SL901",
        "the number 1e-12 in the graph, which is 0 in f16",
    ),
    "no dtype": (EXP + "    dtypes: []\n", 4, "SL901", "dtypes: no dtype at all"),
    "a dtype twice": (EXP + "    dtypes: [f32, f32]\n", 4, "SL901", "dtypes: 'f32' twice"),
    "an unknown dtype in a list": (
        EXP + "    dtypes: [f32, fp16]\n",
        4,
        "SL901",
        "dtypes: 'fp16'; did you mean 'f16'?",
    ),
    "an in-place overload of a group": (
        "  erf_: {template: inplace, graph: Erf(self)}\n",
        1,
        "SL901",
        "erf_: an overload that torch hands to 'erf.out'",
    ),
    "a body for it": ("  erf_: {template: custom}\n", 1, "SL901", "erf_: an overload that torch hands to 'erf.out'"),
    "a guard that leaves a value free": (
        "  add.out: {template: binary, guard: {alpha != 2: alpha}, graph: self + other}\n",
        1,
        "SL903",
        "'alpha' of add.out(",
    ),
    "a guard that bounds a value": (
        "  add.out: {template: binary, guard: {alpha > 0 and alpha < 2: alpha}, graph: self + other}\n",
        1,
        "SL903",
        "'alpha' of add.out(",
    ),
    "a guard of two values": (
        "  add.out: {template: binary, guard: {alpha == 1 or alpha == 2: alpha}, graph: self + other}\n",
        1,
        "SL903",
        "'alpha' of add.out(",
    ),
    "a guard of itself": (
        "  add.out: {template: binary, guard: {alpha == alpha: alpha}, graph: self + other}\n",
        1,
        "SL901",
        "guard: 'alpha == alpha' always holds",
    ),
    "a guard without a reason": (
        "  div.out_mode:\n    template: binary\n    guard: {rounding_mode is None: ' '}\n    graph: self / other\n",
        3,
        "SL901",
        "guard: rounding_mode is None: no reason",
    ),
    "redundant without a reason": (
        "  add.out:\n    template: binary\n    redundant: {alpha: ''}\n    graph: self + other\n",
        3,
        "SL901",
        "redundant: alpha: no reason",
    ),
    "used and redundant": (
        "  add.out: {template: binary, graph: self + other * alpha, redundant: {alpha: usually 1}}\n",
        1,
        "SL901",
        "'alpha' is stated as unused",
    ),
    "shape only and redundant": (
        "  sum.IntList_out:\n    template: reduction\n    graph: 'ReduceSum(self, axes(dim, self))'\n    shape_only: [keepdim, dtype]\n    redundant: {dtype: see above}\n",
        5,
        "SL901",
        "'dtype' is shape_only and redundant",
    ),
    "shape only twice": (
        "  sum.IntList_out:\n    template: reduction\n    graph: 'ReduceSum(self, axes(dim, self))'\n    shape_only: [keepdim, dtype, dtype]\n",
        4,
        "SL901",
        "shape_only: 'dtype' twice",
    ),
    "a binding that nothing reads": (
        "  add.out: {template: binary, let: {scaled: other * alpha}, graph: self + other}\n",
        1,
        "SL901",
        "let: nothing reads 'scaled'",
    ),
    "bindings that read each other": (
        "  add.out: {template: binary, let: {a: other * alpha, b: a + 1}, graph: self + other}\n",
        1,
        "SL901",
        "let: nothing reads 'b'",
    ),
    "a binding that is an argument": (
        "  add.out: {template: binary, let: {self: other * alpha}, graph: self + other}\n",
        1,
        "SL901",
        "let: 'self' is an argument or an output",
    ),
    "a binding that is C++": (
        EXP.replace("Exp(self)", "'x'") + "    let: {'x = 1; evil': Exp(self)}\n",
        4,
        "SL901",
        "let: 'x = 1; evil'",
    ),
    "a choice of the same": (
        "  add.out: {template: binary, graph: self + other if alpha == 1 else self + other}\n",
        1,
        "SL902",
        "is the same either way",
    ),
    "a value in a rule of shapes": (
        "  logsumexp: {template: functional, graph: 'Log(ReduceSum(Exp(self), [0]))', output: {result: {mode: reduce}}}\n",
        1,
        "SL903",
        "'dim' of logsumexp(",
    ),
    "a value that mode infer takes": (
        "  celu: {template: functional, graph: Relu(self), output: {result: {mode: infer}}}\n",
        1,
        "SL903",
        "'alpha' of celu(",
    ),
    "a tensor for its shape": (
        "  relu: {template: functional, graph: '1.0', output: {result: {mode: bypass}}}\n",
        1,
        "SL903",
        "'self' of relu(",
    ),
    "a raw number": (
        "  add.out: {template: binary, graph: self + other * alpha, inputs: {alpha: raw}}\n",
        1,
        "SL901",
        "inputs: 'alpha' is no tensor",
    ),
    "no version": (EXP + "    torch: '>=2.14,<2.11'\n", 4, "SL901", "in which no version lies"),
    "no version but one": (EXP + "    vendor: '==2026.1,>2026.1'\n", 4, "SL901", "in which no version lies"),
    "empty, sometimes": (EXP + "    empty: sometimes\n", 4, "SL901", "Invalid enum value 'sometimes'"),
    "a mode without its field": (
        RELU.replace("mode: bypass", "mode: sizes"),
        4,
        "SL901",
        "mode 'sizes' without 'sizes'",
    ),
    "a field of another mode": (
        RELU.replace("mode: bypass", "mode: bypass, sizes: sizes(self)"),
        4,
        "SL901",
        "'sizes', which mode 'bypass' does not read",
    ),
    "no such mode": (RELU.replace("mode: bypass", "mode: same"), 4, "SL901", "Invalid enum value 'same'"),
    "a number as a graph": (
        "  exp.out:\n    template: unary\n    graph: 5\n",
        3,
        "SL901",
        "Expected `str | object`, got `int`",
    ),
    "no graph": ("  exp.out: {template: unary}\n", 1, "SL901", "graph ''"),
    "a guard of nothing": (
        "  add.out: {template: binary, guard: {'False': later}, graph: self + other * alpha}\n",
        1,
        "SL901",
        "guard: 'False' asks for no argument",
    ),
    "a value times zero": (
        "  add.out: {template: binary, graph: self + other + alpha * 0}\n",
        1,
        "SL902",
        "alpha * 0 is the same for every value",
    ),
    "a value less itself": (
        "  add.out: {template: binary, graph: self + other + (alpha - alpha)}\n",
        1,
        "SL902",
        "'alpha' is compared or combined with itself",
    ),
    "an update of a result": (
        "  exp.out: {template: unary, graph: Exp(self), updates: {out: {graph: self}}}\n",
        1,
        "SL901",
        "updates: 'out' is an output",
    ),
    "a number as a name": ("  3: {template: unary, graph: Exp(self)}\n", 1, "SL901", "a name that is 3, a int"),
    "a truth as a name": (EXP + "  yes: {template: unary}\n", 4, "SL901", "a name that is True, a bool"),
    "too deep an expression": (
        f"  exp.out: {{template: unary, graph: '{'-' * 5000}self'}}\n",
        1,
        "SL902",
        "nested too deeply",
    ),
    "a memory format without a structured meta": (
        RELU.replace("mode: bypass", "mode: meta, format: [self]"),
        1,
        "SL901",
        "output mode 'meta' of 'result'",
    ),
    "a mode meta of nothing": (
        EXP + "    output: {out: {mode: meta}}\n",
        4,
        "SL901",
        "mode 'meta' without 'format'",
    ),
    "a memory format of no argument": (
        EXP + "    output: {out: {mode: meta, format: [slef]}}\n",
        1,
        "SL901",
        "format: 'slef'; did you mean 'self'?",
    ),
    "None for what is always given": (
        "  add.out: {template: binary, graph: self + other * alpha if other is not None else self}\n",
        1,
        "SL902",
        "'other is not None': 'other' is never None",
    ),
    "None for a number that is always given": (
        "  add.out: {template: binary, guard: {alpha is None: alpha}, graph: self + other}\n",
        1,
        "SL902",
        "'alpha is None': 'alpha' is never None",
    ),
    "guards that exclude each other": (
        "  add.out: {template: binary, guard: {alpha == 1: one, alpha == 2: two}, graph: self + other}\n",
        1,
        "SL901",
        "guard: 'alpha == 1' and 'alpha == 2'",
    ),
    "a guard that excludes itself": (
        '  topk.values: {template: structured, guard: {largest and not largest: l, sorted: s}, graph: {values: \'TopK(self, k, dim, "MAX", "NONE")[0]\', indices: \'TopK(self, k, dim, "MAX", "NONE")[1]\'}}\n',
        1,
        "SL901",
        "guard: 'largest' and 'not largest'",
    ),
    "a number of dims that is never negative": (
        "  add.out: {template: binary, guard: {rank(self) < 0: dims}, graph: self + other * alpha}\n",
        1,
        "SL902",
        "'rank(self) < 0' has one outcome",
    ),
    "an element of a list that is written out": (
        "  add.out: {template: binary, graph: '[self, other * alpha][0]'}\n",
        1,
        "SL902",
        "'[self, other * alpha][0]' takes one element of a list",
    ),
    "the first of a list of tensors": (
        "  cat.out: {template: structured, graph: 'Concat([tensors[0]], dim)'}\n",
        1,
        "SL902",
        "'tensors[0]' leaves out the other tensors",
    ),
    "two names for one expression": (
        "  add.out:\n    template: binary\n    let: {x: self + other, y: self +  other}\n    graph: x if alpha == 1 else y\n",
        3,
        "SL901",
        "let: 'y' is 'x' again",
    ),
    "an operand called redundant": (
        "  mul.out: {template: binary, graph: self * self, redundant: {other: usually the same}}\n",
        1,
        "SL901",
        "redundant: 'other', an operand of an elementwise overload",
    ),
    "a template of one operand for two": (
        "  add.out: {template: unary, graph: self + other * alpha}\n",
        1,
        "SL901",
        "add.out: template 'unary' of add.out(",
    ),
    "a template of two operands for one": (EXP.replace("unary", "binary"), 1, "SL901", "exp.out: template 'binary'"),
    "a template of products": (EXP.replace("unary", "matmul"), 1, "SL901", "exp.out: template 'matmul'"),
    "a template of reductions": (EXP.replace("unary", "reduction"), 1, "SL901", "exp.out: template 'reduction'"),
    "a template without a tensor": (RELU.replace("functional", "factory"), 1, "SL901", "relu: template 'factory'"),
    "a template that writes": (RELU.replace("functional", "inplace"), 1, "SL901", "relu: template 'inplace'"),
    "integers for floating point": (
        EXP + "    compute: i32\n",
        4,
        "SL901",
        "compute: 'i32', which cannot hold the values of f32",
    ),
    "a narrower computation": (
        EXP + "    compute: f16\n",
        4,
        "SL901",
        "compute: 'f16', which cannot hold the values of f32",
    ),
    "truth for values": (EXP + "    compute: bool\n", 4, "SL901", "compute: 'bool' of an entry"),
    "an input of fewer values": (
        EXP + "    inputs: {self: i32}\n",
        4,
        "SL901",
        "inputs: self: 'i32' of an elementwise overload",
    ),
    "a format twice": (
        RELU.replace("mode: bypass", "mode: sizes, sizes: sizes(self), format: [self, self]"),
        4,
        "SL901",
        "format: 'self' twice",
    ),
    "a binding in a rule of shapes": (
        "  relu: {template: functional, let: {x: Relu(self)}, graph: x, output: {result: {mode: sizes, sizes: x}}}\n",
        1,
        "SL902",
        "'x' is a binding of 'let', which only 'graph' and 'updates' can read",
    ),
    "a list of guards": (EXP + "    guard: [self]\n", 4, "SL901", "Expected `object`, got `array`"),
    "a list of operators": ("  - exp.out\n", 0, "SL901", "Expected `object`, got `array`"),
}

# of the target: what is replaced, by what, part of `got`
TARGET = {
    "no such operator": ('"^": LogicalXor', '"^^": LogicalXor', "SL901", "operators: '^^'"),
    "no such function": ('"^": LogicalXor', '"^": LogicalXour', "SL902", "did you mean 'LogicalXor'?"),
    "a set of nothing": ("float: [f32, f16, bf16]", "float: []", "SL901", "dtypes: float: no dtype at all"),
    "a set of an unknown dtype": ("float: [f32, f16, bf16]", "float: [f32, half]", "SL901", "dtypes: float: 'half'"),
    "a set called as a dtype": ("float: [f32, f16, bf16]", "f32: [f16]", "SL901", "a set that is called 'f32'"),
    "no such parameter": (
        "index_parameters: [output_shape,",
        "index_parameters: [output_shap,",
        "SL901",
        "'output_shap'; did you mean 'output_shape'?",
    ),
    "another runtime": ("runtime: openvino", "runtime: onednn", "SL901", "a target of runtime 'onednn'"),
    "no such version": (
        'openvino: ">=2026.1,<2027"',
        'openvino: ">=2026.1,<2026"',
        "SL901",
        "requires: openvino: '>=2026.1,<2026', in which",
    ),
    "no version at all": ('openvino: ">=2026.1,<2027"', "openvino: newest", "SL901", "requires: openvino: 'newest'"),
    "no reason": (
        '"linalg_*": opset 15 has no factorisations',
        '"linalg_*": ""',
        "SL901",
        "falls_back: linalg_*: no reason",
    ),
    "a pattern of no operator": (
        '"linalg_*": opset',
        '"linagl_*": opset',
        "SL901",
        "falls_back: 'linagl_*'",
    ),
    "a reason for all": ('"linalg_*":', '"*":', "SL901", "falls_back: '*' fits every overload"),
    "a reason that an earlier pattern hides": (
        '"_linalg_*":',
        '"linalg_lu*":',
        "SL901",
        "falls_back: 'linalg_lu*'; earlier patterns fit all",
    ),
    "a package that is none": (
        'openvino: ">=2026.1,<2027"',
        '"open vino": ">=2026.1,<2027"',
        "SL901",
        "requires: 'open vino'",
    ),
    "an operator of one operand": ('"+": Add', '"+": Relu', "SL902", "Relu("),
    "an operator of a value": ('"+": Add', '"+": rank', "SL902", "rank(t)"),
    "an operator that needs more": ('"+": Add', '"+": Softmax', "SL902", "Softmax("),
    "a parameter twice": (
        "index_parameters: [output_shape,",
        "index_parameters: [output_shape, output_shape,",
        "SL901",
        "index_parameters: 'output_shape' twice",
    ),
    "a key that nothing reads": ("index_parameters: [", "layout: [", "SL901", "unknown field `layout`"),
    "unknown key": ("falls_back:", "fallsback:", "SL901", "did you mean 'falls_back'?"),
}

# of backend.toml: its text, the line, part of `got`
GOOD = 'device = "mine"\nruntime = "openvino"\nunits = 3\n'
SETTINGS = {
    "a key misspelt": (GOOD.replace("units", "unit"), 3, "unknown key 'unit'; did you mean 'units'?"),
    "a table": (GOOD + "[more]\nunits = 2\n", 4, "unknown key 'more'"),
    "a device of torch": (GOOD.replace("mine", "cuda"), 1, "device 'cuda'"),
    "a part of torch": (GOOD.replace("mine", "nn"), 1, "device 'nn'"),
    "an upper-case device": (GOOD.replace("mine", "Mine"), 1, "device 'Mine'"),
    "a device that is a number": (GOOD.replace('"mine"', "3"), 1, "device = 3, not a text"),
    "a number in quotes": (GOOD.replace("3", '"3"'), 3, "units = '3', not a number"),
    "a truth as a number": (GOOD.replace("3", "true"), 3, "units = True, not a number"),
    "no units": (GOOD.replace("3", "0"), 3, "units 0"),
    "too many units": (GOOD.replace("3", "3000"), 3, "units 3000"),
    "no such runtime": (GOOD.replace("openvino", "openvin"), 2, "did you mean 'openvino'?"),
    "no such directory": (GOOD.replace("openvino", "./nowhere"), 2, "runtime './nowhere': No such file"),
    "no device": (GOOD.partition("\n")[2], 1, "no 'device'"),
    "no TOML": (GOOD.replace('"openvino"', "openvino"), 2, "Invalid value"),
}


@pytest.mark.parametrize("name", sampled(OPS, len(OPS) // 3))
def test_an_entry(tmp_path: Path, name: str) -> None:
    ops, number, id, got = OPS[name]
    with pytest.raises(BackendError) as caught:
        described.made(tmp_path, ops)
    assert (caught.value.id, *place(caught.value)) == (id, str(tmp_path / "ops.yaml"), described.line(number))
    assert got in caught.value.got


@pytest.mark.parametrize("name", TARGET)
def test_a_target(tmp_path: Path, name: str) -> None:
    old, changed, id, got = TARGET[name]
    path = described.write(tmp_path, ADD)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, changed, 1), encoding="utf-8")
    with pytest.raises(BackendError) as caught:
        described.generated(path)
    file, line = place(caught.value)
    assert (caught.value.id, file) == (id, str(path))
    assert changed.partition(":")[0] in path.read_text(encoding="utf-8").splitlines()[line - 1]
    assert got in caught.value.got


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path: Path, name: str) -> None:
    text, line, got = SETTINGS[name]
    path = create_project("mine", "openvino", tmp_path / "p").root / "backend.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BackendError) as caught:
        open_project(path.parent)
    assert (caught.value.id, *place(caught.value)) == ("SL905", str(path), line)
    assert got in caught.value.got


def test_what_is_right_is_accepted(tmp_path: Path) -> None:
    """The pieces of which the cases are made."""
    assert len(described.made(tmp_path, ADD + EXP + RELU).wrappers) == 3
    root = create_project("mine", "openvino", tmp_path / "p").root
    (root / "backend.toml").write_text(GOOD, encoding="utf-8")
    assert open_project(root).units == 3


def test_only_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ops.yaml"
    for only, got in {"[]": "only: no overload at all", "add.out": "Expected `array | null`, got `str`"}.items():
        path.write_text(f"extends: openvino\nonly: {only}\n", encoding="utf-8")
        with pytest.raises(BackendError) as caught:
            described.generated(path)
        assert (*place(caught.value), caught.value.got) == (str(path), 2, got)


def place(error: BackendError) -> tuple[str, int]:
    """File and line of ``where``."""
    file, line = error.where.split(":")[:2]
    return file, int(line)
