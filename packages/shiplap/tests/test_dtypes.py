"""The table of dtypes: it is right, all of it is used, and there is no other."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

import shiplap as sl
import shiplap_headers
from shiplap.codegen import dtypes as printed
from shiplap.dtypes import DTYPES, differentiable, floating, in_aten, mask, number, of, preferred
from shiplap.plan import CallPlan
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails

PACKAGES = Path(__file__).parents[2]
LIBRARY = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
every = pytest.mark.parametrize("name", DTYPES)


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


def exported(t: Tensor) -> tuple[int, int, int]:
    """The DLPack type that torch itself gives a tensor."""
    capsule = torch.utils.dlpack.to_dlpack(t)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = DLTensor.from_address(pointer(capsule, b"dltensor"))
    return tensor.code, tensor.bits, tensor.lanes


@every
def test_a_row_is_what_torch_says(name):
    row, dtype = DTYPES[name], getattr(torch, name)
    assert of(dtype, "test") is row
    assert (row.floating, row.itemsize) == (dtype.is_floating_point, dtype.itemsize)
    assert row.differentiable == (dtype.is_floating_point or dtype.is_complex)
    if row.kind != "bool":
        assert dtype.is_signed == (row.kind != "unsigned") or row.kind in ("float8", "float4")
    assert exported(torch.empty(2, dtype=dtype)) == row.dlpack


@every
def test_torch_numbers_it_so(name):
    ask = getattr(LIBRARY, f"aoti_torch_dtype_{name}", None)
    assert ask is not None or not DTYPES[name].native, "generated C++ allocates it"
    if ask is not None:
        assert ask() == DTYPES[name].number
    assert number(name) == (DTYPES[name].number if DTYPES[name].native else -1)


def test_codes_that_were_taken_for_others():
    assert DTYPES["float8_e8m0fnu"].dlpack == (14, 8, 1)
    assert DTYPES["float4_e2m1fn_x2"].dlpack == (17, 4, 2)


def test_numbers_codes_and_names_are_unique():
    rows = list(DTYPES.values())
    for facts in ([r.number for r in rows], [r.dlpack for r in rows], [r.short for r in rows]):
        assert len(set(facts)) == len(rows)
    assert max(r.number for r in rows) < 64, "masks are of 64 bits"


def test_what_is_derived():
    assert preferred()[:4] == floating() == ("float32", "float64", "bfloat16", "float16")
    assert floating(widest=16) == ("bfloat16", "float16")
    assert list(in_aten())[:3] == ["f32", "f64", "bf16"]
    assert mask(["float32", "uint16"]) == "uint64_t{64}", "what C++ may not allocate is in no mask"
    assert differentiable(()) is differentiable(["int8", "complex64"]) is True
    assert differentiable(["int8", "int4"]) is False


def test_a_mutated_complex_tensor_that_requires_grad_is_refused(ns):
    @sl.op(f"{ns}::f", mutates=["x"])
    def f(x: Shaped[Tensor, "n"]) -> None: ...

    with fails("SL304"):
        f.bind((torch.zeros(2, dtype=torch.complex64, requires_grad=True),))


def test_the_header_is_up_to_date():
    assert not printed.write_or_compare(["--check"])
    assert printed.write_or_compare(["--what"]).startswith("usage")


def test_a_header_that_is_not_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "shiplap").mkdir()
    (tmp_path / "shiplap" / "dtypes.h").write_text("")
    monkeypatch.setattr(printed, "include_dir", lambda: tmp_path)
    assert "is not what shiplap/dtypes.py says" in printed.write_or_compare(["--check"])
    assert not printed.write_or_compare([])
    assert not printed.write_or_compare(["--check"])


def test_c_and_cpp_read_the_header(tmp_path):
    """As C it is a table; in C++ it makes the names and the types."""
    include = str(shiplap_headers.include_dir())
    (tmp_path / "t.c").write_text(
        '#include <stdbool.h>\n#include "shiplap/dtypes.h"\n'
        "#define ROW(NAME, NUMBER, CODE, BITS, LANES) {NUMBER, CODE, BITS, LANES},\n"
        "const int rows[][4] = {SL_DTYPES(ROW)};\n"
    )
    (tmp_path / "t.cpp").write_text(
        '#include "shiplap/base.h"\n'
        'std::string shiplap::device_name(Device) { return ""; }\n'
        'extern "C" int find(uint8_t c, uint8_t b, uint16_t l) { return shiplap::number_of({c, b, l}); }\n'
        'extern "C" long bytes(int n) { return shiplap::bytes_of(n); }\n'
        'extern "C" DLDataType type(int n) { return shiplap::element_type(n); }\n'
        'extern "C" const char* name(int n) { static std::string s; s = shiplap::dtype_name(n); return s.c_str(); }\n'
    )
    flags = ["-shared", "-fPIC", "-I", include]
    subprocess.run(["cc", *flags, "-o", tmp_path / "c.so", tmp_path / "t.c"], check=True)
    subprocess.run(["c++", "-std=c++20", *flags, "-o", tmp_path / "cpp.so", tmp_path / "t.cpp"], check=True)
    rows = ctypes.c_int * 4 * len(DTYPES)
    by_number = sorted(DTYPES.values(), key=lambda r: r.number)
    table = [tuple(row) for row in rows.in_dll(ctypes.CDLL(str(tmp_path / "c.so")), "rows")]
    assert table == [(r.number, *r.dlpack) for r in by_number]
    library = ctypes.CDLL(str(tmp_path / "cpp.so"))
    library.name.restype, library.bytes.restype, library.type.restype = ctypes.c_char_p, ctypes.c_long, DLDataType
    for row in by_number:
        code, bits, lanes = row.dlpack
        assert library.find(code, bits, lanes) == row.number
        assert tuple(getattr(library.type(row.number), field) for field in ("code", "bits", "lanes")) == row.dlpack
        assert (library.bytes(row.number), library.name(row.number)) == (row.itemsize, f"torch.{row.name}".encode())
    assert library.find(3, 64, 1) == -1, "a handle"


TYPE = """int type(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  int64_t* o = out->data;
  o[0] = x->dtype.code; o[1] = x->dtype.bits; o[2] = x->dtype.lanes;
  return SL_OK;
}"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The dtype that a C kernel sees of its argument, under the Python binding."""

    @sl.op("dtypes_test::type")
    def type(x: Shaped[Tensor, "n"]) -> Int64[Tensor, "3"]: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_NATIVE", "0")
        library = compile_c(tmp_path_factory.mktemp("dtypes"), "type", {"type": type}, TYPE)
        type.kernel("cpu", sl.cabi(library, "type"))
        yield lambda x: tuple(type(x).tolist())


@every
def test_a_c_kernel_sees_the_true_code(seen, name):
    assert seen(torch.empty(3, dtype=getattr(torch, name))) == DTYPES[name].dlpack


@pytest.mark.parametrize("dtype", [torch.quint8, torch.bits8])
def test_a_dtype_without_a_code_is_refused(seen, dtype):
    x = (
        torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, dtype)
        if dtype is torch.quint8
        else torch.empty(3, dtype=dtype)
    )
    with fails("SL214", where="dtypes_test::type, kernel type", got=str(dtype)):
        seen(x)


# --- there is no other table ------------------------------------------------------------------------------------------

MANY = 5  # dtypes in one literal of Python make a table
ALLOWED = {
    "shiplap-backend/src/shiplap_backend/opinfo.py": "which of them are compared unless the caller says others",
    "shiplap/src/shiplap/kernels/triton/specialize.py": "what Triton calls them in the signature of a kernel",
    "shiplap-slidesparse/src/shiplap_slidesparse/lt/native.py": "cudaDataType, which NVIDIA numbers",
}
WORDS = {word: row.name for row in DTYPES.values() for word in (row.name, row.short) if row.name != "bool"}


def literals(path: Path) -> list[set[str]]:
    """The dtypes that each dict, tuple, list or set of a file names."""
    numbers = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Dict, ast.Tuple, ast.List, ast.Set)):
            elements = node.keys if isinstance(node, ast.Dict) else node.elts
            values = [*elements, *node.values] if isinstance(node, ast.Dict) else elements
            strings = {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
            attributes = {v.attr for v in values if isinstance(v, ast.Attribute)}
            numbers.append({WORDS[word] for word in strings | attributes if word in WORDS})
    return numbers


def tables() -> dict[str, set[str]]:
    files = [p for p in PACKAGES.glob("*/src/**/*.py") if "templates" not in p.parts]
    assert len(files) > 300
    crowded = ((p, names) for p in files for names in literals(p) if len(names) >= MANY)
    return {str(p.relative_to(PACKAGES)): names for p, names in crowded}


@pytest.mark.docs
def test_python_has_one_table():
    assert tables().keys() == ALLOWED.keys()


def test_another_table_would_be_noticed(tmp_path):
    (tmp_path / "t.py").write_text(
        "X = {torch.int8: 0, torch.uint8: 1, torch.float16: 2, torch.bfloat16: 4, 'f32': 5}\n"
    )
    assert max(map(len, literals(tmp_path / "t.py"))) == MANY


def test_cpp_has_one_table():
    """No header or template of the core numbers dtypes by itself."""
    core = [*shiplap_headers.include_dir().rglob("*.h"), *(PACKAGES / "shiplap" / "src").rglob("*.jinja")]
    assert len(core) >= 10
    for path in core:
        if path.name != "dtypes.h":
            names = set(re.findall(r'"(?:torch\.)?(\w+)"', path.read_text())) & WORDS.keys()
            cases = re.findall(r"case \d+: return \{\d+, \d+", path.read_text())
            assert len(names) < MANY, path
            assert not cases, path


@every
def test_every_dtype_is_checked_in_both_languages(name):
    """A declaration that admits one dtype alone: Python compares with it, C++ with its number."""
    from shiplap.codegen.plan import rule_condition
    from shiplap.plan.expression import TensorPlace
    from shiplap.plan.rules import dtype_is_among

    rule = dtype_is_among(TensorPlace("op", "x"), "One", (name,))
    assert rule.constants == {"ok_x": getattr(torch, name)}
    wanted = f"type_x == {DTYPES[name].number}" if DTYPES[name].native else "among(type_x, uint64_t{0})"
    assert rule_condition(rule) == wanted
    assert CallPlan.__module__.startswith("shiplap.plan")
