"""Out-variants: outputs and workspace of the caller, under the native and the Python binding."""

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.errors import ArgumentError
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

BODY = """
int scale(const sl_context* ctx, const DLTensor* x, DLTensor* y, DLTensor* info, int64_t k) {
  if (k == 13) { snprintf(ctx->error, ctx->error_size, "k is unlucky"); return SL_INVALID_ARGUMENT; }
  for (int64_t i = 0; i < x->shape[0] * x->shape[1]; ++i) ((float*)y->data)[i] = ((float*)x->data)[i] * k;
  int64_t* n = info->data;
  n[0] = (int64_t)ctx->workspace_size;
  n[1] = (int64_t)(uintptr_t)ctx->workspace;
  if (ctx->workspace_size) ((unsigned char*)ctx->workspace)[0] = 42;
  return SL_OK;
}
"""


@pytest.fixture(scope="module")
def op(tmp_path_factory):
    @sl.op("out_test::scale", outputs=["y", "info"])
    def scale(x: Float[Tensor, "n c"], k: int = 2) -> tuple[Float[Tensor, "n c"], Int64[Tensor, "2"]]:
        return x * k, torch.zeros(2, dtype=torch.int64)

    folder = tmp_path_factory.mktemp("out")
    library = compile_c(folder, "scale", {"scale": scale}, BODY)
    scale.kernel("cpu", sl.cabi(library, "scale"), workspace="n * itemsize", dtypes="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder / "cache"))
        binding.build(scale)
        yield scale


@pytest.fixture(params=["native", "python"])
def scale(op, request, monkeypatch):
    """The op under one of the bindings, and what Python's ``execute`` was asked."""
    if request.param == "python":
        monkeypatch.setenv("SHIPLAP_NATIVE", "0")
        op.drop_native()
    elif op.native is None:
        binding.build(op)
    assert (op.native is not None) == (request.param == "native")
    return op


def outputs(n=3, c=4):
    return torch.full((n, c), -1.0), torch.full((2,), -1)


def test_values_and_workspace_go_where_the_caller_says(scale, monkeypatch):
    picked = []
    original = sl.Op.pick_kernel
    monkeypatch.setattr(sl.Op, "pick_kernel", lambda self, call: (picked.append(1), original(self, call))[1])
    x = torch.randn(3, 4)
    need = scale.workspace_bytes(x, k=3)
    assert need == 12
    picked.clear()
    scratch = torch.zeros(need + 5, dtype=torch.uint8)
    y, info = outputs()
    with torch.no_grad():
        assert scale.out(x, 3, out=(y, info), workspace=scratch)[0] is y
        assert torch.equal(y, x * 3)
        assert info.tolist() == [need + 5, scratch.data_ptr()], "the kernel saw the caller's workspace"
        assert scratch[0] == 42
        scale.out(x.T.contiguous().T, k=2, out=[y, info])  # any strides in, keywords too
        assert torch.equal(y, x * 2)
        assert info[0] == need, "without one, a workspace is allocated"
    assert bool(picked) == (scale.native is None), "native code asks no Python"
    picked.clear()
    scale.out(x, out=(y, info))  # with gradients on and none requested
    assert torch.equal(y, x * 2)
    assert bool(picked) == (scale.native is None)
    assert torch.is_grad_enabled()


def test_nothing_is_allocated(scale):
    x, (y, info) = torch.randn(64, 64), outputs(64, 64)
    scratch = torch.empty(scale.workspace_bytes(x), dtype=torch.uint8)

    def events(call):
        with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
            call()
        return [e.name() for e in profile.profiler.kineto_results.events() if e.name() in ("[memory]", "aten::empty")]

    assert events(lambda: scale(x))
    assert not events(lambda: scale.out(x, out=(y, info), workspace=scratch))


def wrong(x):
    y, info = outputs()
    scratch = torch.empty(64, dtype=torch.uint8)
    yield {"out": y}, "SL212", "1 tensors in out="
    yield {"out": (y[:2], info)}, "SL212", "shape (2, 4)"
    yield {"out": (y[0], info)}, "SL212", "shape (4,)"
    yield {"out": (y.double(), info)}, "SL212", "torch.float64 on cpu"
    yield {"out": (y.to("meta"), info)}, "SL212", "torch.float32 on meta"
    yield {"out": (torch.zeros(4, 3).T, info)}, "SL212", "strides (1, 3)"
    yield {"out": (None, info)}, "SL212", "NoneType"
    yield {"out": (x, info)}, "SL210", "memory of 'x'"
    yield {"out": (x.view(-1)[:12].view(3, 4), info)}, "SL210", "memory of 'x'"
    yield {"out": (y, y.view(-1).view(torch.int64)[:2])}, "SL210", "memory of 'y'"
    yield {"out": (y, info), "workspace": y.view(-1).view(torch.uint8)}, "SL210", "memory of 'y'"
    yield {"out": (y, info), "workspace": scratch[:11]}, "SL213", "11 bytes"
    yield {"out": (y, info), "workspace": torch.empty(64)}, "SL213", "torch.float32 on cpu, (64,) by (1,)"
    yield {"out": (y, info), "workspace": scratch[::2]}, "SL213", "torch.uint8 on cpu, (32,) by (2,)"
    yield {"out": (y, info), "workspace": scratch[1:]}, "SL213", "an address that is 1 modulo 64"
    yield {"out": (y, info), "workspace": scratch.to("meta")}, "SL213", "torch.uint8 on meta, (64,) by (1,)"
    yield {"out": (y, info), "k": 13}, "SL211", "k is unlucky"
    yield {"out": (y, info), "k": "3"}, "SL209", "str"


def test_what_does_not_fit_is_refused_in_the_same_words(scale):
    x = torch.randn(3, 4)
    for grad in (True, False):
        for keywords, id, got in wrong(x):
            before = [t.clone() for t in keywords["out"] if isinstance(t, Tensor) and not t.is_meta]
            with torch.set_grad_enabled(grad), fails(id, got=got):
                scale.out(x, **keywords)
            after = [t for t in keywords["out"] if isinstance(t, Tensor) and not t.is_meta]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "refused before it was written"
    with fails("SL201", got="1 dims, shape (4)"):
        scale.out(x[0], out=outputs())


def test_gradients_are_refused(scale):
    x = torch.randn(3, 4)
    with fails("SL304", got="a tensor that requires grad"):
        scale.out(x.clone().requires_grad_(), out=outputs())
    y, info = outputs()
    with fails("SL304"):
        scale.out(x, out=(y.requires_grad_(), info))
    with torch.no_grad():
        scale.out(x.requires_grad_(), out=(y, info))
    assert torch.equal(y.detach(), (x * 2).detach())


def test_torch_ops_say_what_is_wrong(op):
    if op.native is None:
        binding.build(op)
    x, (y, info) = torch.randn(3, 4), outputs()
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=r"SL213: the given workspace does not fit\n.*\n.*11 bytes"),
    ):
        torch.ops.out_test.scale__out(x, y=y, info=info, workspace=torch.empty(11, dtype=torch.uint8))
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=r"SL212.*\n  where    out_test::scale, output 'y'\n.*\(2"),
    ):
        torch.ops.out_test.scale__out(x, y=y[:2], info=info)


@pytest.mark.parametrize("dynamic", sampled((False, True), long=["False"]))
@pytest.mark.parametrize("scale", sampled(("native", "python"), long=["python"]), indirect=True)
def test_compiled(scale, fresh_compiler, dynamic):
    def f(x, y, info):
        scale.out(x.sin(), 3, out=(y, info))
        return y + 1

    x, (y, info) = torch.randn(3, 4), outputs()
    with torch.no_grad():
        got = torch.compile(f, fullgraph=True, dynamic=dynamic)(x, y, info)
    torch.testing.assert_close(got, x.sin() * 3 + 1)
    torch.testing.assert_close(y, x.sin() * 3)
    torch.library.opcheck(scale.variant.overload, (x,), {"y": y, "info": info})


def test_a_dtype_that_the_kernel_does_not_take_runs_the_reference(scale):
    x = torch.randn(3, 4).double()
    y, info = torch.empty(3, 4).double(), outputs()[1]
    with torch.no_grad():
        scale.out(x, out=(y, info))
    assert torch.equal(y, x * 2)


def test_python_kernels_of_both_styles(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"], *, workspace_k: int = 1) -> Float[Tensor, "n"]:
        return x + workspace_k

    y = torch.zeros(4)
    seen = []

    @f.kernel("cpu", workspace="8 * n")
    def filled(x, *, workspace_k, out, workspace):
        seen.append((out.data_ptr(), workspace.data_ptr(), workspace.numel()))
        torch.add(x, workspace_k, out=out)

    scratch = torch.empty(f.workspace_bytes(y), dtype=torch.uint8)
    f.out(torch.ones(4), workspace_k=2, out=y, workspace=scratch)
    assert y.tolist() == [3.0] * 4
    assert seen == [(y.data_ptr(), scratch.data_ptr(), 32)]

    @f.kernel("cpu", name="filled")
    def functional(x, *, workspace_k):
        return x * 10

    f.out(torch.ones(4), out=y)
    assert y.tolist() == [10.0] * 4
    assert f.workspace_bytes(y) == 0


def test_what_has_none_says_so(ns):
    @sl.op(f"{ns}::keep", bounds={"m": "n"})
    def keep(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        return x[x > 0]

    with pytest.raises(TypeError, match="has no out-variant"):
        keep.out(torch.ones(3), out=torch.ones(3))
    assert not hasattr(getattr(torch.ops, ns), "keep__out")


def test_an_argument_may_be_called_workspace(ns):
    @sl.op(f"{ns}::f")
    def f(workspace: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return workspace + 1

    y = torch.zeros(2)
    f.out(torch.ones(2), out=y)
    assert y.tolist() == [2.0, 2.0]
    assert "workspace_=None" in str(f.variant.overload._schema)


@pytest.mark.parametrize("scale", sampled(("native", "python"), long=["python"]), indirect=True)
def test_gradients_in_compiled_code(scale, fresh_compiler):
    """With gradients on, a call that loses none is part of the graph, and one that loses a gradient is refused."""

    def f(x, w, y, info):
        scale.out(x, 3, out=(y, info))
        return (y * w).sum()

    x, w, (y, info) = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True), outputs()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    compiled(x, w, y, info).backward()
    torch.testing.assert_close(w.grad, x * 3)
    for _ in range(2):
        with pytest.raises(Exception, match="SL304"):
            torch.compile(f, backend="aot_eager")(x.clone().requires_grad_(), w, *outputs())
