"""Dim expressions mean the same in C++ as in Python: compiled once, compared on many values."""

import ctypes
import subprocess

import pytest

from shiplap.declare.cpp_expression import quote_cpp, to_cpp
from shiplap.declare.dim_expression import Expr
from shiplap.kernels.native.build_digest import FLAGS, INCLUDE

EXPRESSIONS = (
    "a + b * 2 - 3",
    "-a // b",
    "a % b",
    "-a % -b",
    "cdiv(a, b)",
    "gcd(a, b)",
    "pow2ceil(a)",
    "pow2(a) + where(a < b, a, -b)",
    "min(a, b, 7)",
    "max(a, b)",
    "broadcast(a, 1, b)",
    "broadcast(v) + broadcast(1)",
    "prod(a, b, 2)",
    "len(v) * prod(v) + min(v) - max(v)",
    "v[0] + v[-1]",
    "v[len(v) - 2]",
    "a < b <= 5 and a != 3",
    "a == b",
    "a >= 2 and b > 1",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expression")
    lines = ['#include "shiplap/base.h"']
    for i, text in enumerate(EXPRESSIONS):
        value = to_cpp(Expr.parse(text, ""), lambda name: name)
        lines.append(f"""extern "C" SL_EXPORT int e{i}(
    int64_t a, int64_t b, const int64_t* p, int64_t n, int64_t* out) {{
  const shiplap::List v(p, p + n);
  try {{ *out = {value}; return 1; }} catch (const std::runtime_error& e) {{ return 0; }}
}}""")
    source = folder / "e.cpp"
    source.write_text("\n".join(lines))
    command = ["c++", *FLAGS, "-Wno-unused", f"-I{INCLUDE}", "-o", folder / "e.so", source]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "e.so"))


def both(library, index, a, b, v):
    """The value in Python and in C++, None for a refusal."""
    try:
        want = int(Expr.parse(EXPRESSIONS[index], "")({"a": a, "b": b, "v": v}))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        want = None
    out, values = ctypes.c_int64(), (ctypes.c_int64 * max(1, len(v)))(*v)
    numbers = ctypes.c_int64(a), ctypes.c_int64(b), values, ctypes.c_int64(len(v))
    return want, out.value if getattr(library, f"e{index}")(*numbers, ctypes.byref(out)) else None


@pytest.mark.parametrize("index", range(len(EXPRESSIONS)), ids=EXPRESSIONS)
def test_same_value_or_same_refusal(library, index):
    for a in (-7, -1, 0, 1, 3, 8, 9):
        for b in (-4, -1, 0, 1, 3, 5):
            for v in ([], [4], [3, -2], [1, 2, 3]):
                want, got = both(library, index, a, b, v)
                assert got == want, (a, b, v)


@pytest.mark.parametrize("index", range(len(EXPRESSIONS)), ids=EXPRESSIONS)
def test_no_other_value_where_64_bits_are_too_few(library, index):
    ends = (-(2**63), -(2**62), -1, 0, 1, 3, 2**32, 2**62 + 1, 2**63 - 1)
    for a in ends:
        for b in ends:
            for v in ([a, b], [b, 0, a]):
                want, got = both(library, index, a, b, v)
                assert got in (want, None), (a, b, v)
                exact = EXPRESSIONS[index] in ("cdiv(a, b)", "gcd(a, b)", "pow2ceil(a)", "a % b", "prod(a, b, 2)")
                if exact and want is not None and -(2**63) <= want < 2**63 and b > 0:
                    assert got == want, (a, b, v)


def test_text():
    assert to_cpp(Expr.parse('mode == "a"', ""), lambda name: f"a_{name}") == '(a_mode == std::string("a"))'
    assert quote_cpp('a "b" \\') == '"a \\"b\\" \\\\"'
    for text in ("é", "a\nb"):
        with pytest.raises(ValueError, match="printable ASCII"):
            quote_cpp(text)
