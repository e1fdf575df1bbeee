"""C kernels compiled in the test: arguments of every kind and layout, status, workspace, extents, write-back."""

import ctypes
import struct
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails

D = Float[Tensor, "n c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cabi")


@pytest.fixture(scope="module")
def scaled(folder):
    @sl.op("cabi_test::scaled", outputs=["y", "info"])
    def scaled(
        x: Float[Tensor, "n c"],
        bias: Float[Tensor, "c"] | None,
        k: int,
        flag: bool = True,
        ks: list[int] = (),
        ps: list[float] = (),
        *,
        p: float = 1.0,
        mode: str = "add",
    ) -> tuple[Float[Tensor, "n c"], Int64[Tensor, "4"]]:
        y = x * (k * p) + sum(ks) + sum(ps) + (0 if bias is None else bias)
        return (y if flag else -y), torch.tensor([len(mode), len(ks), len(ps), bias is not None])

    body = """
int scaled(const sl_context* ctx, const DLTensor* x, const DLTensor* bias, DLTensor* y, DLTensor* info,
           int64_t k, int32_t flag, const int64_t* ks, int64_t ks_len, const double* ps, int64_t ps_len, double p,
           const char* mode) {
  if (ctx->abi_version != SL_ABI_VERSION || ctx->num_threads < 1 || ctx->stream) return SL_INTERNAL;
  if (x->dtype.code != 2 || x->dtype.bits != 64) {
    snprintf(ctx->error, ctx->error_size, "float64 only, got %d bits", x->dtype.bits);
    return SL_UNSUPPORTED;
  }
  if (k == 13) { snprintf(ctx->error, ctx->error_size, "k is unlucky"); return SL_INVALID_ARGUMENT; }
  if (k == 14) return 77;
  if (k == 15) { memset(ctx->error, 'x', ctx->error_size); return SL_INTERNAL; }
  double shift = 0;
  for (int64_t i = 0; i < ks_len; ++i) shift += ks[i];
  for (int64_t i = 0; i < ps_len; ++i) shift += ps[i];
  const double *in = x->data, *b = bias ? bias->data : 0;
  double* out = y->data;
  for (int64_t i = 0; i < x->shape[0]; ++i)
    for (int64_t j = 0; j < x->shape[1]; ++j) {
      double v = in[i * x->strides[0] + j * x->strides[1]] * (k * p) + shift + (b ? b[j] : 0);
      out[i * y->strides[0] + j * y->strides[1]] = flag ? v : -v;
    }
  int64_t* n = info->data;
  n[0] = strlen(mode); n[1] = ks_len; n[2] = ps_len; n[3] = bias != 0;
  return SL_OK;
}"""
    library = compile_c(folder, "scaled", {"scaled": scaled}, body)
    scaled.kernel("cpu", sl.cabi(library, "scaled", strided=["x"]), name="strided")
    return scaled, library


def same(op, *args, **kwargs):
    got, want = op(*args, **kwargs), op.reference(*args, **kwargs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_arguments_of_every_kind(scaled):
    op, _ = scaled
    x, b = torch.randn(3, 4).double(), torch.randn(4).double()
    same(op, x, None, 2)
    same(op, x, b, -3, False, [1, 2, 3], [0.5], p=0.25, mode="größe"[:2])
    same(op, x, b, 2**40, True, [], [], mode="")
    same(op, torch.empty(0, 4).double(), b, 1)


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["plain", "T", "step", "offset", "expand", "flip"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layouts(scaled, n, c, layout, strided):
    op, library = scaled
    op.kernel("cpu", sl.cabi(library, "scaled", strided=["x"] if strided else []), name="strided")
    base = torch.randn(8, 8).double()
    x = {
        "plain": lambda: base[:n, :c].contiguous(),
        "T": lambda: base[:c, :n].T,
        "step": lambda: base[::2, ::2][:n, :c],
        "offset": lambda: base[3:][:n, 2:][:, :c],
        "expand": lambda: base[:1, :c].expand(n, c),
        "flip": lambda: base[:n, :c].flip(0),
    }[layout]()
    same(op, x, None, 2)


def test_status_becomes_an_error_with_the_kernels_message(scaled):
    op, _ = scaled
    x = torch.zeros(2, 2).double()
    with fails("SL305", where="cabi_test::scaled, kernel scaled", got="float64 only, got 32 bits"):
        op(x.float(), None, 1)
    with fails("SL211", where="cabi_test::scaled, kernel scaled", got="k is unlucky"):
        op(x, None, 13)
    with fails("SL305", got="status 77", fix="write the reason of the status to ctx->error in the kernel"):
        op(x, None, 14)
    with fails("SL305", got="x" * 1024):  # a message without an end stays within its buffer
        op(x, None, 15)


def test_compiled_code_calls_it(scaled, fresh_compiler):
    op, _ = scaled
    f = torch.compile(lambda x: op(x.T, None, 2, mode="z")[0].sin(), fullgraph=True)
    x = torch.randn(3, 4).double()
    torch.testing.assert_close(f(x), (x.T * 2).sin())


def test_threads_call_it_at_once(scaled):
    op, _ = scaled
    failures = []

    def work(seed):
        x = torch.full((50, 20), float(seed)).double()
        failures.extend(seed for _ in range(50) if not torch.equal(op(x, None, 2)[0], x * 2))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


DESCRIBE = """
int describe(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  int64_t* o = out->data;
  o[0] = x->dtype.code; o[1] = x->dtype.bits; o[2] = x->dtype.lanes; o[3] = x->ndim; o[4] = x->device.device_type;
  o[5] = (int64_t)x->byte_offset; o[6] = ctx->num_threads; o[7] = (int64_t)ctx->workspace_size;
  o[8] = ctx->workspace_size ? (int64_t)((uintptr_t)ctx->workspace % 64) : ctx->workspace != 0;
  o[9] = (int64_t)(uintptr_t)x->data;
  if (ctx->workspace_size) memset(ctx->workspace, 1, ctx->workspace_size);
  return SL_OK;
}"""


@pytest.fixture(scope="module")
def describe(folder):
    @sl.op("cabi_test::describe")
    def describe(x: Shaped[Tensor, "*b"]) -> Int64[Tensor, "10"]: ...

    return describe, compile_c(folder, "describe", {"describe": describe}, DESCRIBE)


def test_dtype_codes(describe):
    op, library = describe
    op.kernel("cpu", sl.cabi(library, "describe"))
    codes = {
        torch.int8: (0, 8),
        torch.int64: (0, 64),
        torch.uint8: (1, 8),
        torch.uint32: (1, 32),
        torch.float16: (2, 16),
        torch.float64: (2, 64),
        torch.bfloat16: (4, 16),
        torch.complex64: (5, 64),
        torch.complex128: (5, 128),
        torch.bool: (6, 8),
        torch.float8_e4m3fn: (10, 8),
        torch.float8_e5m2: (12, 8),
    }
    for dtype, want in codes.items():
        x = torch.zeros(2, 3, dtype=dtype)
        outputs = op(x).tolist()
        assert tuple(outputs[:6]) == (*want, 1, 2, 1, 0)
        assert outputs[9] == x.data_ptr()
    assert op(torch.tensor(1.0)).tolist()[3] == 0


def test_threads_and_workspace(describe):
    op, library = describe
    x = torch.zeros(6, 5, dtype=torch.float64)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            op.kernel("cpu", sl.cabi(library, "describe"), workspace="prod(b) * itemsize + 3 * threads")
            assert op(x).tolist()[6:9] == [threads, 240 + 3 * threads, 0]
    finally:
        torch.set_num_threads(before)
    op.kernel("cpu", sl.cabi(library, "describe"))
    assert op(x).tolist()[7:9] == [0, 0]
    with fails("SL105", got="prod(b) * size uses 'size'"):
        op.kernel("cpu", sl.cabi(library, "describe"), workspace="prod(b) * size")


@pytest.fixture(scope="module")
def keep(folder):
    """The positive elements; ``extra`` is added to the reported count, to lie about it."""

    @sl.op("cabi_test::keep", bounds={"m": "n"}, outputs=["kept", "where"])
    def keep(x: Float[Tensor, "n"], extra: int = 0) -> tuple[Float[Tensor, "m"], Int64[Tensor, "2 m"]]:
        (i,) = (x > 0).nonzero(as_tuple=True)
        return x[i], torch.stack([i, i])

    body = """
int keep(const sl_context* ctx, const DLTensor* x, DLTensor* kept, DLTensor* where, int64_t extra, int64_t* m) {
  const double* in = x->data; double* out = kept->data; int64_t* w = where->data; int64_t count = 0, n = x->shape[0];
  if (kept->shape[0] != n || where->shape[1] != n || *m != 0) return SL_INTERNAL;
  for (int64_t i = 0; i < n; ++i)
    if (in[i] > 0) { out[count] = in[i]; w[count] = w[n + count] = i; ++count; }
  *m = count + extra;
  return SL_OK;
}"""
    keep.kernel("cpu", sl.cabi(compile_c(folder, "keep", {"keep": keep}, body), "keep"))
    return keep


def test_outputs_are_cut_to_what_the_kernel_filled(keep):
    for n in (0, 1, 5, 100):
        for sign in (1, -1, 0):
            x = torch.randn(n).double() if not sign else torch.full((n,), sign).double()
            got, want = keep(x), keep.reference(x)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
                assert a.is_contiguous()
    x = torch.full((1000,), -1.0).double()
    x[0] = 1
    assert keep(x)[0].untyped_storage().nbytes() < 100, "the memory of the bound is not held by a small result"


@pytest.mark.parametrize("extra", [1, -6])
def test_an_extent_beyond_its_bound(keep, extra):
    x = torch.ones(5).double()
    with fails("SL302", where="cabi_test::keep, kernel keep", got=f"m = {5 + extra}", expected="m <= n = 5"):
        keep(x, extra)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), fails("SL302"):
        torch.compile(lambda x: keep(x, extra)[0] + 1, backend="aot_eager", fullgraph=True)(x)
    torch_private.reset_compiler()


@pytest.fixture(scope="module")
def bump(folder):
    @sl.op("cabi_test::bump_", mutates=["table"])
    def bump_(table: D, mask: Bool[Tensor, "n"], fail: bool = False) -> None:
        table[mask] += 1

    body = """
int bump(const sl_context* ctx, DLTensor* table, const DLTensor* mask, int32_t fail) {
  double* t = table->data; const unsigned char* m = mask->data;
  for (int64_t i = 0; i < table->shape[0]; ++i)
    for (int64_t j = 0; j < table->shape[1]; ++j)
      if (m[i]) t[i * table->strides[0] + j * table->strides[1]] += 1;
  return fail ? SL_INTERNAL : SL_OK;
}"""
    return bump_, compile_c(folder, "bump", {"bump": bump_}, body)


@pytest.mark.parametrize("strided", [(), ("table",)])
@pytest.mark.parametrize("compiled", [False, True])
def test_mutated_tensors_are_written_back_whatever_their_layout(bump, strided, compiled, fresh_compiler):
    op, library = bump
    op.kernel("cpu", sl.cabi(library, "bump", strided=strided))
    f = torch.compile(lambda t, m: op(t, m), backend="aot_eager", fullgraph=True) if compiled else op
    mask = torch.tensor([True, False, True])
    for view in (lambda t: t[:3, :4], lambda t: t.T[:3, 1:4], lambda t: t[1:7:2, ::3], lambda t: t[:3].contiguous()):
        base, want = torch.zeros(8, 8).double(), torch.zeros(8, 8).double()
        target, expected = view(base), view(want)
        f(target, mask)
        op.reference(expected, mask)
        assert torch.equal(target, expected)
        assert torch.equal(base, want), "and nothing beside it"


def test_a_failed_kernel_writes_nothing_back(bump):
    op, library = bump
    op.kernel("cpu", sl.cabi(library, "bump"))
    base = torch.zeros(4, 3).double()
    with fails("SL305", got="status 3"):
        op(base.T, torch.ones(3, dtype=torch.bool), True)
    assert not base.any()


def test_declarations_without_a_c_form(ns):
    kernel = sl.cabi("nowhere.so", "f")
    for annotation, got in (
        (list[Float[Tensor, "n"]], "a list of tensors"),
        (list[bool], "list[bool]"),
        (int | None, "int | None"),
        (list[int] | None, "list[int] | None"),
    ):

        def fn(x: Float[Tensor, "n"], a) -> Float[Tensor, "n"]: ...

        fn.__annotations__["a"] = annotation
        op = sl.op(f"{ns}::f")(fn)
        with fails("SL404", where=f"{ns}::f, argument 'a'", got=got):
            op.kernel("cpu", kernel)


def test_symbols_are_c_names():
    for symbol in ("a b", "x;", "é", ""):
        with fails("SL402", got=symbol or "an empty name", expected="the name of a C function"):
            sl.cabi("lib.so", symbol)
        with fails("SL402", where=f"sl.source(..., {symbol!r})"):
            sl.source(symbol=symbol, code="int f;", language="c")


def test_structures_have_the_layout_of_the_header(folder):
    from shiplap.audit.c_child_process import CContext, DLTensorStruct
    from shiplap.kernels.c.call_frame import CONTEXT, TENSOR

    @sl.op("cabi_test::sizes")
    def sizes(x: Float[Tensor, "n"]) -> Int64[Tensor, "12"]: ...

    fields = ["workspace", "workspace_size", "error", "error_size", "stream", "num_threads"]
    tensor = ["shape", "strides", "byte_offset", "ndim"]
    lines = [f"o[{i}] = offsetof(sl_context, {f});" for i, f in enumerate(fields)]
    lines += [f"o[{i + 6}] = offsetof(DLTensor, {f});" for i, f in enumerate(tensor)]
    body = f"""
int sizes(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  int64_t* o = out->data; {" ".join(lines)} o[10] = sizeof(sl_context); o[11] = sizeof(DLTensor);
  return SL_OK;
}}"""
    sizes.kernel("cpu", sl.cabi(compile_c(folder, "sizes", {"sizes": sizes}, body), "sizes"))
    want = [getattr(CContext, f).offset for f in fields] + [getattr(DLTensorStruct, f).offset for f in tensor]
    assert sizes(torch.zeros(1)).tolist() == [*want, ctypes.sizeof(CContext), ctypes.sizeof(DLTensorStruct)]
    assert [struct.calcsize(CONTEXT), struct.calcsize(TENSOR)] == [
        ctypes.sizeof(CContext),
        ctypes.sizeof(DLTensorStruct),
    ]
