"""Native code of ops that return what they write to: the op that writes is native, and is not the one that returns."""

import pytest
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.kernels.native import binding
from shiplap.kernels.native.deploy import DEPLOYED_LIBRARY_NAME, deploy
from shiplap_testing import forked
from shiplap_testing.build import compile_c
from shiplap_testing.effort import sampled

X, Y = Float32[Tensor, "n"], Float32[Tensor, "m"]
BODY = """
static void add(DLTensor* x, float by) { for (int64_t i = 0; i < x->shape[0]; ++i) ((float*)x->data)[i] += by; }
int grown(const sl_context* ctx, DLTensor* x) { add(x, 1); return SL_OK; }
int both(const sl_context* ctx, DLTensor* x, const DLTensor* y, DLTensor* out, double by) {
  add(x, (float)by);
  for (int64_t i = 0; i < y->shape[0]; ++i) ((float*)out->data)[i] = 2 * ((const float*)y->data)[i];
  return SL_OK;
}
int turned(const sl_context* ctx, DLTensor* x, DLTensor* y) { add(x, 1); add(y, 2); return SL_OK; }
int positive(const sl_context* ctx, DLTensor* x, DLTensor* out, int64_t* k) {
  int64_t count = 0;
  add(x, -2);
  const float* in = x->data;
  for (int64_t i = 0; i < x->shape[0]; ++i) if (in[i] > 0) ((float*)out->data)[count++] = in[i];
  *k = count;
  return SL_OK;
}
int maybe(const sl_context* ctx, DLTensor* x, const DLTensor* y) {
  add(x, y ? ((const float*)y->data)[0] : 1);
  return SL_OK;
}
int counted(const sl_context* ctx, DLTensor* x) {
  for (int64_t i = 0; i < x->shape[0]; ++i) ((int64_t*)x->data)[i] += 1;
  return SL_OK;
}
"""


def declare():
    @sl.op("returned_test::grown", mutates="x", aliases="x")
    def grown(x: X) -> X:
        return x.add_(1)

    @sl.op("returned_test::both", mutates="x", aliases=(None, "x"))
    def both(x: X, y: Y, *, by: float = 3.0) -> tuple[Y, X]:
        return 2 * y, x.add_(by)

    @sl.op("returned_test::turned.pair", mutates=("x", "y"), aliases=("y", "x", "y"))
    def turned(x: X, y: Y) -> tuple[Y, X, Y]:
        return y.add_(2), x.add_(1), y

    @sl.op("returned_test::positive", mutates="x", aliases=("x", None), bounds={"k": "n"})
    def positive(x: X) -> tuple[X, Float32[Tensor, "k"]]:
        x.sub_(2)
        return x, x[x > 0]

    @sl.op("returned_test::maybe", mutates="x", aliases="x")
    def maybe(x: X, y: Y | None = None) -> X:
        return x.add_(1 if y is None else y[0])

    @sl.op("returned_test::counted", mutates="x", aliases="x")
    def counted(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return x.add_(1)

    return {"grown": grown, "both": both, "turned": turned, "positive": positive, "maybe": maybe, "counted": counted}


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("returned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder / "cache"))
        patch.setenv("SHIPLAP_NATIVE", "1")
        ops = declare()
        library = compile_c(folder, "returned", ops, BODY)
        for name, op in ops.items():
            op.kernel("cpu", sl.cabi(library, name))
        binding.build(ops["grown"])
        yield ops


def arguments(name):
    x, y = torch.arange(1.0, 5), torch.arange(1.0, 4)
    return {"both": (x, y), "turned": (x, y), "maybe": (x, y), "counted": (torch.arange(4),)}.get(name, (x,))


def flat(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", sampled(["grown", "both", "turned", "positive", "maybe", "counted"], 3))
def test_native_code_returns_the_arguments_that_it_wrote_to(ops, name, mode, fresh_compiler):
    op = ops[name]
    assert op.native is not None
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    with mode():
        for call in (op, op.overload, op, *([compiled] if mode is torch.enable_grad else [])):
            for empty in (False, True):
                given = tuple(a[:1] if empty else a.clone() for a in arguments(name))
                expected = tuple(a.clone() for a in given)
                wanted, got = flat(op.reference(*expected)), flat(call(*given))
                torch.testing.assert_close(got, wanted)
                torch.testing.assert_close(given, expected)
                for declared, value in zip(op.spec.returns, got, strict=True):
                    if declared.alias:
                        assert value is given[[a.name for a in op.spec.args].index(declared.alias)]


def test_native_code_returns_a_strided_argument(ops):
    x = torch.ones(4, 2)
    assert ops["grown"](x[:, 1]) is not None
    assert x[:, 1].eq(2).all()
    assert x[:, 0].eq(1).all()


WITHOUT_SHIPLAP = """
import sys, torch
torch.ops.load_library(sys.argv[1])
ops = torch.ops.returned_test
with torch.no_grad():
    x, y = torch.ones(4), torch.ones(3)
    assert ops.grown(x).data_ptr() == x.data_ptr() and x.eq(2).all()
    made, same = ops.both(x, y, by=1.0)
    assert made.eq(2).all() and same.data_ptr() == x.data_ptr() and x.eq(3).all()
    a, b, c = ops.turned(x, y)
    assert a.data_ptr() == c.data_ptr() == y.data_ptr() and b.data_ptr() == x.data_ptr() and y.eq(3).all()
    x, kept = ops.positive(x)
    assert x.eq(2).all() and kept.shape == (4,)
    assert ops.maybe(x).eq(3).all() and ops.counted(torch.zeros(2, dtype=torch.int64)).eq(1).all()
    x = torch.ones(4, 2)
    assert ops.grown(x[:, 1]).eq(2).all() and x[:, 1].eq(2).all() and x[:, 0].eq(1).all()
    try:
        ops.grown(x[:1, 0].expand(4))
    except RuntimeError as e:
        assert "SL210" in str(e), e
    else:
        raise AssertionError
try:
    ops.grown(x[:, 1])
except RuntimeError as e:
    assert "SL409" in str(e) and "gradients are enabled: argument 'x'" in str(e) and "torch.no_grad()" in str(e), e
else:
    raise AssertionError
assert "shiplap" not in sys.modules
"""


def test_a_library_without_shiplap_has_the_ops_that_return(ops, tmp_path):
    deploy(list(ops.values()), tmp_path / "made")
    (tmp_path / "alone.py").write_text(WITHOUT_SHIPLAP)
    done = forked.python(tmp_path / "alone.py", tmp_path / "made" / DEPLOYED_LIBRARY_NAME)
    assert done.returncode == 0, done.stderr
