"""The generated translation unit: what it checks, in which order, and what it refuses to bind."""

import re

import pytest
from jaxtyping import Float, Int32, Shaped, UInt16
from torch import Tensor

import shiplap as sl
from shiplap.codegen.native import NativeOp, native_source
from shiplap.declare.dim_expression import Expr

V = Float[Tensor, "n"]


@pytest.fixture
def gather(ns):
    @sl.op(f"{ns}::gather", mutates=["table"], dims={"k": "prod(kernel)"}, bounds={"m": "n * k"}, requires="k > 0")
    def gather(
        x: Float[Tensor, "n 4"],
        table: Int32[Tensor, "n k"],
        bias: Float[Tensor, "n"] | None,
        kernel: list[int],
        *,
        mode: str = "a",
    ) -> Float[Tensor, "m 2"]: ...

    return gather


def source(op, **keywords):
    text = native_source([NativeOp(op.spec, "f", (op.spec.opname,), **keywords)])
    return text.replace(op.spec.namespace, "NS")


def test_checks_follow_the_declaration(gather):
    text = source(gather, workspace=Expr.parse("n * itemsize + threads", ""), dtypes=("float32", "float64"))
    expected = [
        'if (!among(peek_dtype(values[0]), uint64_t{192})) return defer("NS::gather__python", values);',
        "Tensor t_x = stack.tensor(0);",
        "Tensor t_bias = stack.optional_tensor(2);",
        "a_kernel = stack.scalar<List>(3);",
        "const int32_t type_x = t_x.dtype();",
        "if (!(among(type_x, uint64_t{",
        "const int32_t dtype_Float = type_x;",
        "const Device device = device_of(t_x);",
        "const int64_t* shape_x = t_x.sizes();",
        'if (!(rank_x == 2)) [[unlikely]] refuse("SL201", "a tensor has the wrong number of dims", '
        '"NS::gather, argument \'x\'", "{} dims, shape {}", '
        '"Float[Tensor, \\"n 4\\"]", "reshape the tensor to the number of dims under \'expected\', for example with '
        'x.unsqueeze(0)", {rank_x, Sizes(shape_x, rank_x)});',
        "const int64_t d_n = shape_x[0];",
        "if (!(shape_x[1] == 4)) [[unlikely]] refuse(",
        "if (!(type_table == 3)) [[unlikely]] refuse(",
        "if (!(device_of(t_table) == device)) [[unlikely]] refuse(",
        "if (!(shape_table[0] == d_n)) [[unlikely]] refuse(",
        "const int64_t d_k = shape_table[1];",
        "if (!(own_memory(t_table))) [[unlikely]] refuse(",
        "if (t_bias) {",
        "  if (!(type_bias == dtype_Float)) [[unlikely]] refuse(",
        "try { v_dim_k = shiplap::prod(a_kernel); } catch (const NoValue& why) { refuse(",
        "if (!(v_dim_k == d_k)) [[unlikely]] refuse(",
        "if (!((d_k > int64_t{0}))) [[unlikely]] refuse(",
        "if (!(!shares_memory(t_table, t_x))) [[unlikely]] refuse(",
        "try { v_bound_m = shiplap::mul(d_n, d_k); }",
        "const int64_t d_m = v_bound_m;",
        "Tensor t_out = empty({d_m, int64_t{2}}, dtype_Float, device);",
        "const Tensor original_table = pack(t_table, false, 1);",
        "widest({dtype_Float})",
        "shiplap::add(shiplap::mul(d_n, w_itemsize), w_threads);",
        "scratch = workspace(needed, device);",
        "look(v_x, t_x)",
        "t_bias ? look(v_bias, t_bias) : nullptr",
        "look(v_out, t_out)",
        "a_mode.c_str()",
        "&extent_m",
        "if (original_table) copy(original_table, t_table);",
        "if (!(0 <= extent_m && extent_m <= d_m)) [[unlikely]] refuse(",
        "{extent_m, int64_t{2}}",
    ]
    position = 0
    for fragment in expected:
        position = text.find(fragment, position)
        assert position >= 0, fragment
    assert "__python" in text
    assert not re.search(r"\{\{|\{%", text)


def test_what_python_has_to_serve(ns):
    def reason(fn, *, workspace="", **keywords):
        op = sl.op(f"{ns}::f", **keywords)(fn)
        return NativeOp(op.spec, "f", ("f",), workspace=Expr.parse(workspace, "") if workspace else None).unfit

    def any_rank(x: Float[Tensor, "*b n"]) -> V: ...
    def later(x: Float[Tensor, "n+1"], y: V) -> V: ...
    def optional(x: V | None, y: V) -> V: ...
    def masked(x: V, masks: Int32[Tensor, "parts b"] | None = None) -> V: ...
    def small(x: UInt16[Tensor, "n"]) -> Int32[Tensor, "n"]: ...
    def real(x: V, p: float) -> V: ...
    def wide(x: Shaped[Tensor, "a b c d e f g h i"]) -> Int32[Tensor, "a"]: ...
    def plain(x: Shaped[Tensor, "n"], s: str) -> Int32[Tensor, "n"]: ...

    variables = dict(vars())
    for name in ("any_rank", "later", "optional", "masked", "small", "real", "wide", "plain"):
        variables[name].__qualname__ = "f"  # one op, declared again
    assert "whose rank is not fixed" in reason(any_rank)
    assert reason(later) == reason(optional) == reason(masked) == ""
    assert "uint16, which torch's stable ABI does not name" in reason(small)
    assert "p // 2 > 1, which is not of integers" in reason(real, requires=["p // 2 > 1"])
    assert "of more than 8 dims" in reason(wide)
    assert "'s == \"é\"' is not printable ASCII" in reason(plain, requires=['s == "é"'])
    assert reason(plain, requires=['s == "a"']) == ""


def test_a_kernel_that_takes_strides_may_want_an_address(gather):
    text = source(gather, align=16, strided=frozenset({"table"}))
    assert "pack(t_x, false, 16)" in text
    assert "pack(t_table, true, 16)" in text
    assert "original_table" not in source(gather, strided=frozenset({"table"}))


def test_sizes_that_depend_on_data_go_to_python_in_a_capture(gather):
    """Python refuses the call there (SL318) before the copy to the host breaks the capture."""
    assert "if (is_capturing()) return defer(" in source(gather, device="cuda")
    assert "is_capturing" not in source(gather)
