"""The native binding against the Python binding: values, errors, life cycle; and the cache against accidents."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap import errors, torch_private
from shiplap.codegen.native import native_source
from shiplap.dispatch.launch import poisoned_workspace
from shiplap.errors import ArgumentError
from shiplap.kernels.native import binding
from shiplap.kernels.native.build import LIBRARY, is_sealed_folder
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.kernels.native.build_plan import compiler_command, make_plan
from shiplap_testing.build import compile_c
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

BODY = """
int mix(const sl_context* ctx, const DLTensor* x, const DLTensor* bias, DLTensor* y, DLTensor* info,
        int64_t k, int32_t flag, const int64_t* ks, int64_t ks_len, const double* ps, int64_t ps_len, double p,
        const char* mode) {
  if (ctx->abi_version != SL_ABI_VERSION || ctx->num_threads < 1 || ctx->stream) return SL_INTERNAL;
  if (k == 13) { snprintf(ctx->error, ctx->error_size, "k is unlucky"); return SL_INVALID_ARGUMENT; }
  if (k == 14) return 77;
  double shift = 0;
  for (int64_t i = 0; i < ks_len; ++i) shift += ks[i];
  for (int64_t i = 0; i < ps_len; ++i) shift += ps[i];
  const int wide = x->dtype.bits == 64;
  for (int64_t i = 0; i < x->shape[0]; ++i)
    for (int64_t j = 0; j < x->shape[1]; ++j) {
      int64_t a = i * x->strides[0] + j * x->strides[1], o = i * y->strides[0] + j;
      double in = wide ? ((const double*)x->data)[a] : ((const float*)x->data)[a];
      double b = !bias ? 0 : wide ? ((const double*)bias->data)[j] : ((const float*)bias->data)[j];
      double v = in * (k * p) + shift + b;
      if (wide) ((double*)y->data)[o] = flag ? v : -v; else ((float*)y->data)[o] = (float)(flag ? v : -v);
    }
  int64_t* n = info->data;
  n[0] = strlen(mode); n[1] = ks_len; n[2] = (int64_t)ctx->workspace_size;
  n[3] = ctx->workspace_size ? ((unsigned char*)ctx->workspace)[0] : -1;
  return SL_OK;
}
int keep(const sl_context* ctx, const DLTensor* x, DLTensor* kept, int64_t extra, int64_t* m) {
  const float* in = x->data; float* out = kept->data; int64_t count = 0;
  for (int64_t i = 0; i < x->shape[0]; ++i) if (in[i] > 0) out[count++] = in[i];
  *m = count + extra;
  return SL_OK;
}
int bump(const sl_context* ctx, DLTensor* table, const DLTensor* by) {
  for (int64_t i = 0; i < table->shape[0]; ++i) ((float*)table->data)[i] += ((const float*)by->data)[i];
  return SL_OK;
}
int total(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  *(float*)out->data = *(const float*)x->data + 1;
  return SL_OK;
}
"""


class Ops:
    """The ops of one compiled library."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder))
        patch.setenv("SHIPLAP_NATIVE", "1")
        yield folder


def declare_mix():
    @sl.op("native_test::mix", outputs=["y", "info"], requires=["k != 99", "len(ks) <= 3"])
    def mix(
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
        return (y if flag else -y), torch.tensor([len(mode), len(ks), 0, -1])

    return mix


def declare_keep():
    @sl.op("native_test::keep", bounds={"m": "n"})
    def keep(x: Float[Tensor, "n"], extra: int = 0) -> Float[Tensor, "m"]:
        return x[x > 0]

    return keep


def declare_bump():
    @sl.op("native_test::bump_", mutates=["table"])
    def bump_(table: Float[Tensor, "n"], by: Float[Tensor, "n"]) -> None:
        table += by

    return bump_


def declare_total():
    @sl.op("native_test::total")
    def total(x: Float[Tensor, ""]) -> Float[Tensor, ""]:
        return x + 1

    return total


@pytest.fixture(scope="module")
def ops(cache, tmp_path_factory):
    ops = Ops()
    ops.mix, ops.keep, ops.bump, ops.total = declare_mix(), declare_keep(), declare_bump(), declare_total()
    folder = tmp_path_factory.mktemp("native")
    ops.library = compile_c(folder, "native", {name: getattr(ops, name) for name in SYMBOLS}, BODY)
    bind(ops)
    return ops


SYMBOLS = ("mix", "keep", "bump", "total")


def bind(ops):
    """(Re)bind the kernels and build the native library: all four ops at once."""
    floats = ("float32", "float64")
    ops.mix.kernel("cpu", sl.cabi(ops.library, "mix", strided=["x"]), workspace="n * c * itemsize", dtypes=floats)
    ops.keep.kernel("cpu", sl.cabi(ops.library, "keep"), dtypes="float32")
    ops.bump.kernel("cpu", sl.cabi(ops.library, "bump"), dtypes="float32")
    ops.total.kernel("cpu", sl.cabi(ops.library, "total"), dtypes="float32")
    return binding.build(ops.mix)


@pytest.fixture(autouse=True)
def _attached(request):
    if "ops" in request.fixturenames:
        ops = request.getfixturevalue("ops")
        if any(getattr(ops, name).native is None for name in SYMBOLS):
            bind(ops)


@pytest.fixture
def counted(monkeypatch, ops):
    """How often Python's ``execute`` ran: never, where native code serves."""
    calls = []
    original = sl.Op.pick_kernel
    monkeypatch.setattr(
        sl.Op, "pick_kernel", lambda self, call: (calls.append(self.spec.opname), original(self, call))[1]
    )
    return calls


def same(op, *args, **kwargs):
    got, want = op(*args, **kwargs), op.reference(*args, **kwargs)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1][:2], want[1][:2])
    assert got[1][2] == args[0].numel() * args[0].itemsize, "the workspace that was declared"
    assert got[0].is_contiguous()


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_over_layouts_and_sizes(ops, counted, dtype):
    base = torch.arange(64.0).reshape(8, 8).to(dtype)
    bias = torch.arange(16.0).to(dtype)[::2]
    for x in (base, base.T, base[::2, ::2], base[3:, 2:], base[:1].expand(5, 8), base[:0], base[:, :0], base[:0, :0]):
        same(ops.mix, x, None, 2)
        same(ops.mix, x, bias[: x.shape[1]], -3, False, [1, 2, 3], [0.5], p=0.25, mode="größe"[:2])
        with torch.inference_mode():
            same(ops.mix, x, None, 2**40 if dtype == torch.float64 else 4, True, [], [], mode="")
    assert not counted


def test_a_tensor_without_dims(ops, counted):
    assert ops.total(torch.tensor(2.0)) == 3
    assert not counted


def test_data_dependent_sizes(ops, counted):
    for n in (0, 1, 5, 100):
        for x in (torch.randn(n), torch.ones(n), -torch.ones(n), torch.randn(2 * n)[::2]):
            got = ops.keep(x)
            assert torch.equal(got, ops.keep.reference(x))
            assert got.is_contiguous()
    x = -torch.ones(1000)
    x[0] = 1
    assert ops.keep(x).untyped_storage().nbytes() < 100, "the memory of the bound is not held by a small result"
    assert not counted


def test_mutated_tensors(ops, counted):
    table = torch.zeros(4)
    with torch.no_grad():
        ops.bump(table, torch.ones(8)[::2])
    gaps = torch.zeros(8)
    with torch.no_grad():
        ops.bump(gaps[::2], torch.ones(4))
    assert not counted
    ops.bump(table, torch.ones(4))  # with gradients enabled Python has to look
    assert counted == ["bump_"]
    assert table.tolist() == [2.0] * 4
    assert gaps.tolist() == [1.0, 0.0] * 4
    with fails("SL304", got="a tensor that requires grad"):
        ops.bump(torch.zeros(4, requires_grad=True), torch.ones(4))
    with torch.no_grad(), fails("SL210", got="memory of argument 'by'", where="native_test::bump_, argument 'table'"):
        ops.bump(table, table)
    with torch.no_grad(), fails("SL210", got="shape (4), strides (0,)"):
        ops.bump(torch.zeros(1).expand(4), torch.ones(4))


def test_a_dtype_that_the_kernel_does_not_take_runs_the_reference(ops, counted):
    x = torch.randn(3, 4).bfloat16()
    assert torch.equal(ops.mix(x, None, 2)[0], ops.mix.reference(x, None, 2)[0])
    assert counted == ["mix"]


@pytest.mark.parametrize(
    ("wrapped", "after"),
    [
        pytest.param(False, lambda y: y, id="Python"),  # no loops are generated around the call: no C++ is compiled
        pytest.param(True, torch.sin, id="C++", marks=pytest.mark.long),
    ],
)
def test_gradients_and_compiled_code_use_it(ops, counted, fresh_compiler, wrapped, after):
    f = torch.compile(lambda x: after(ops.mix(x.T, None, 2, mode="z")[0]), fullgraph=True)
    x = torch.randn(3, 4)
    with torch._inductor.config.patch(cpp_wrapper=wrapped):
        torch.testing.assert_close(f(x), after(x.T * 2))
    ops.mix(x.requires_grad_(), None, 2)
    assert not counted


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_python_binding(ops):
    x, b = torch.randn(3, 4), torch.randn(4)
    calls = [
        (x[0], None, 1),
        (x, b[:3], 1),
        (x, b.double(), 1),
        (x.long(), None, 1),
        (x, b, 99),
        (x, b, 1, True, [1] * 4),
        (x, b, 13),
        (x, b, 14),
        (x, b, "k"),
        (None, b, 1),
        (x.to_sparse(), b, 1),
    ]

    def refusals():
        refused = []
        for call in calls:
            with pytest.raises(sl.ShiplapError) as caught:
                ops.mix(*call)
            refused.append((type(caught.value), str(caught.value)))
        with pytest.raises(sl.ShiplapError) as caught:
            ops.keep(torch.ones(5), 1)
        return [*refused, (type(caught.value), str(caught.value))]

    assert ops.mix.native is not None
    by_native = refusals()
    ops.mix.drop_native()
    ops.keep.drop_native()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_NATIVE", "0")
        assert by_native == refusals()
    ids = [text[:5] for _, text in by_native]
    assert ids == [
        "SL201",
        "SL202",
        "SL205",
        "SL204",
        "SL208",
        "SL208",
        "SL211",
        "SL305",
        "SL209",
        "SL209",
        "SL207",
        "SL302",
    ]


def test_torch_ops_say_it_in_the_words_of_the_catalogue(ops):
    with pytest.raises(
        ArgumentError, match=r"SL202: sizes disagree\n  where    native_test::mix, argument 'bias', dim"
    ):
        torch.ops.native_test.mix(torch.randn(3, 4), torch.randn(3), 1)


# --- life cycle -------------------------------------------------------------------------------------------------------


def test_threads(ops, counted):
    wrong = []

    def work(seed):
        x = torch.full((50, 20), float(seed))
        wrong.extend(seed for _ in range(200) if not torch.equal(ops.mix(x, None, 2)[0], x * 2))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
    assert not counted


def test_poison_reaches_native_workspaces(ops, counted):
    x = torch.ones(2, 3)
    for byte in (0xA5, 0x00, 0x7F):
        with poisoned_workspace(byte):
            assert ops.mix(x, None, 1)[1][3] == byte
            with poisoned_workspace(1):
                assert ops.mix(x, None, 1)[1][3] == 1
            assert ops.mix(x, None, 1)[1][3] == byte
    assert not counted


def test_redeclaring_an_op_drops_the_native_code_and_attaches_again(ops, counted):
    x = torch.ones(2)
    path = ops.keep.native.library
    for _ in range(3):
        compiled = torch.compile(lambda x: ops.total(x) + 1, backend="aot_eager")
        compiled(x[0])
        ops.keep, ops.total = declare_keep(), declare_total()
        assert ops.keep.native is None
        assert torch.equal(ops.keep(x), x), "the reference"
        assert compiled(x[0]) == 3
        ops.keep.kernel("cpu", sl.cabi(ops.library, "keep"), dtypes="float32")
        ops.total.kernel("cpu", sl.cabi(ops.library, "total"), dtypes="float32")
        assert binding.build(ops.keep) == path
        assert ops.keep.native is not None
        counted.clear()
        assert torch.equal(ops.keep(x), x)
        assert ops.total(x[0]) == 2
        assert not counted
    torch_private.reset_compiler()


def test_what_is_generated_for_a_kernel_is_described_once_and_again_for_other_facts(ops):
    first = {e.op.spec.name: e.native for e in make_plan(ops.mix).entries.values()}
    renewed = {e.op.spec.name: e.native for e in make_plan(ops.keep).entries.values()}
    assert first.keys() == renewed.keys()
    assert all(renewed[name] is kept for name, kept in first.items())
    assert native_source(list(first.values())) == native_source([replace(kept) for kept in first.values()])
    ops.bump.kernel("cpu", sl.cabi(ops.library, "bump"), dtypes=("float32", "float64"))
    changed = {e.op.spec.name: e.native for e in make_plan(ops.mix).entries.values()}
    assert changed[ops.bump.spec.name].dtypes == ("float32", "float64")
    assert changed[ops.mix.spec.name] is first[ops.mix.spec.name]
    bind(ops)


def test_a_second_kernel_or_a_gradient_drops_the_native_code(ops, counted):
    x = torch.ones(2, 3)
    assert ops.mix.native is not None
    ops.mix.backward(lambda grad, saved, needs: {"x": grad[0] * saved.k})
    assert ops.mix.native is None
    ops.mix(x, None, 2)
    assert ops.mix.native is not None, "attached at the next call, from the cache"
    counted.clear()
    y = x.clone().requires_grad_()
    ops.mix(y, None, 2)[0].sum().backward()
    assert torch.equal(y.grad, x * 2)
    assert not counted
    ops.mix.kernel("cpu", lambda **named: ops.mix.reference(**named), name="second")
    assert ops.mix.native is None
    assert torch.equal(ops.mix(x, None, 2)[0], x * 2)
    assert counted == ["mix"]
    with fails("SL404", "bind 'second' before the C kernels", "kernel 'second' on cpu, a Python function"):
        binding.build(ops.mix)
    ops.mix.kernels["cpu"] = [k for k in ops.mix.kernels["cpu"] if k.name != "second"]


def test_shapes_of_any_rank_stay_with_python(ops, cache, tmp_path, ns):
    @sl.op(f"{ns}::any")
    def any_rank(x: Shaped[Tensor, "*b"]) -> Int64[Tensor, "1"]: ...

    body = "int any_rank(const sl_context* ctx, const DLTensor* x, DLTensor* out) { return SL_OK; }"
    any_rank.kernel("cpu", sl.cabi(compile_c(tmp_path, "any", {"any_rank": any_rank}, body), "any_rank"))
    with fails("SL404", got='Shaped[Tensor, "*b"], whose rank is not fixed'):
        binding.build(any_rank)
    errors.base._announced.discard(f"native {binding.state(any_rank)[1]}")
    with pytest.warns(sl.ShiplapNotice, match=r"Python binding: SL404: generated C\+\+ cannot check"):
        any_rank(torch.ones(2))
    assert binding.state(any_rank) == ("python", binding.state(any_rank)[1])


def test_the_fix_of_an_op_without_a_native_kernel_is_an_action_that_works(cache, tmp_path, ns):
    """Each case has its own: no kernel at all, one of Python, and a C function that asks ``supports=``."""

    def declared(name):
        def fn(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
            return x + 1

        return sl.op(f"{ns}::{name}")(fn)

    code = "int step(const sl_context*, const DLTensor* x, DLTensor* out) { %s return SL_OK; }"
    loop = "for (int64_t i = 0; i < x->shape[0]; i++) ((float*)out->data)[i] = ((float*)x->data)[i] + 1;"
    kernel = sl.source(symbol="step", code=code % loop, language="c++")
    bare, python, asking = map(declared, ("bare", "python", "asking"))
    python.kernel("cpu", lambda x: x + 1, name="mine")
    asking.kernel("cpu", kernel, supports=lambda x: True)
    for op, got, fix in (
        (bare, "no kernel on the CPU or on CUDA", 'bind a C function: fn.kernel("cpu", sl.cabi(...)), or sl.source('),
        (python, "'mine' on cpu, a Python function", "bind a C function after it: fn.kernel"),
        (asking, "'step' on cpu, which asks supports=", "bind the kernel without supports=, and name the dtypes"),
    ):
        with fails("SL404", got, fix.replace("fn", op.spec.opname)):
            op.build()
        op.kernel("cpu", kernel, dtypes=["float32"] if op is asking else ())
        op.build()
        library = op.native.library
        op.drop_native()
        assert binding.state(op) == ("native", f"{library}, attached at the first call")
        assert op(torch.ones(2)).tolist() == [2.0, 2.0]
        assert op.native is not None


# --- from the first call to native code, without being asked ----------------------------------------------------------


def test_no_compiler_is_started_unasked_and_a_notice_says_how_to_build(ops, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SHIPLAP_BACKGROUND_BUILD", raising=False)
    monkeypatch.setattr(binding, "build_detached", lambda *order: pytest.fail("a compiler was started"))
    for name in SYMBOLS:
        getattr(ops, name).drop_native()
    errors.base._announced.discard(f"native {ops.keep.spec.name}")
    x = torch.ones(1)
    for _ in range(binding.HOT_CALLS - 1):
        ops.keep(x)
    with pytest.warns(sl.ShiplapNotice, match=rf"{binding.SLOWER} times(.|\n)*op.build\(\)(.|\n)*shiplap build"):
        ops.keep(x)
    for _ in range(binding.HOT_CALLS):
        assert torch.equal(ops.keep(x), x)
    assert binding.state(ops.keep) == ("python", binding.UNBUILT)
    monkeypatch.undo()
    assert binding.build(ops.keep) == ops.keep.native.library
    assert binding.state(ops.keep) == ("native", str(ops.keep.native.library))


def test_a_hot_op_gets_native_code_in_the_background_where_that_is_asked_for(ops, counted, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHIPLAP_BACKGROUND_BUILD", "1")
    for name in SYMBOLS:
        getattr(ops, name).drop_native()
    x = torch.ones(1)
    for _ in range(binding.HOT_CALLS - 1):
        ops.keep(x)
    assert not list((tmp_path / "cache" / "native").glob("*")), "no compiler for a few calls"
    ops.keep(x)
    deadline = time.monotonic() + 300
    while ops.keep.native is None and time.monotonic() < deadline:
        ops.keep(x)
        time.sleep(0.05)
    assert ops.keep.native is not None
    assert ops.mix.native is not None, "the ops of one library come together"
    counted.clear()
    assert torch.equal(ops.keep(x), x)
    assert not counted
    assert binding.state(ops.keep) == ("native", str(ops.keep.native.library))


def test_native_can_be_switched_off(ops, monkeypatch):
    monkeypatch.setenv("SHIPLAP_NATIVE", "False")
    ops.keep.drop_native()
    ops.keep(torch.ones(1))
    assert ops.keep.native is None
    assert binding.state(ops.keep) == ("python", "SHIPLAP_NATIVE=0")


@pytest.mark.parametrize("compiler", sampled(["false", "/no/such/compiler"], 1))
def test_without_a_compiler_python_serves_and_one_notice_says_so(ops, tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("SHIPLAP_BACKGROUND_BUILD", "1")
    errors.base._announced.clear()
    ops.keep.drop_native()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and ops.keep.kernels["cpu"][0].native.counting:
            assert torch.equal(ops.keep(torch.ones(2)), torch.ones(2))
            time.sleep(0.01)
        ops.keep(torch.ones(2))
    messages = [str(w.message) for w in caught if issubclass(w.category, sl.ShiplapNotice)]
    assert len(messages) == 1
    assert "native_test::keep stays with the Python binding: SL405: the native binding cannot be used" in messages[0]
    assert "status 1" in messages[0] if compiler == "false" else "no /no/such/compiler on the PATH" in messages[0]
    with fails("SL405"):
        binding.build(ops.keep)
    ops.keep.kernel("cpu", sl.cabi(ops.library, "keep"), dtypes="float32")


def test_a_directory_that_others_can_write_is_refused(ops, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / "native").mkdir(parents=True)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "native"):
        for other in (tmp_path / "cache", tmp_path / "cache" / "native"):
            other.chmod(0o777 if other == folder else 0o700)
        with fails("SL406", f"{folder}: it can be written by others (mode 777)"):
            binding.build(ops.mix)
    assert not list((tmp_path / "cache" / "native").iterdir())
    native_dir = tmp_path / "own" / "native"
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("CXX", "false")
    with fails("SL405"):  # what would have been built, has a folder now
        binding.build(ops.mix)
    assert native_dir.stat().st_mode & 0o777 == 0o700


# --- the cache --------------------------------------------------------------------------------------------------------

SOURCE = 'extern "C" int answer() { return 42; }\n'


def compiler_that(folder: Path, before: str) -> list[str]:
    """A compiler call that writes a line into ``log`` and runs ``before`` first."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    script = folder / "cxx"
    script.write_text(f'#!/bin/sh\necho run >> "{folder}/log"\n{before}\nexec c++ "$@"\n')
    # Not executed itself: a process that is forked meanwhile may still hold the file open for writing.
    return ["sh", str(script), "-shared", "-fPIC"]


BUILD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.build_once(pathlib.Path(sys.argv[2]), "abc", sys.argv[3], sys.argv[4:]))
"""


def builder(folder: Path, command: list[str]) -> subprocess.Popen:
    """``build_once`` in a process that imports neither torch nor shiplap."""
    file = Path(binding.__file__).with_name("build.py")
    call = [sys.executable, "-c", BUILD, str(file), str(folder), SOURCE, *command]
    return subprocess.Popen(call, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_eight_processes_build_once(tmp_path):
    command = compiler_that(tmp_path, "sleep 0.3")
    builders = [builder(tmp_path, command) for _ in range(8)]
    assert [p.communicate()[0].strip() for p in builders] == [""] * 8
    assert (tmp_path / "log").read_text() == "run\n"
    assert is_sealed_folder(tmp_path / "abc")
    assert not list(tmp_path.glob(".abc-*"))


def test_a_builder_that_is_killed_leaves_nothing_broken(tmp_path):
    slow = builder(tmp_path, compiler_that(tmp_path, "sleep 600"))
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".abc-*/binding.cpp")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(slow.pid, signal.SIGKILL)
    slow.wait()
    assert list(tmp_path.glob(".abc-*"))
    assert not is_sealed_folder(tmp_path / "abc")
    assert compile_into(tmp_path, "abc", SOURCE, compiler_that(tmp_path, "")) == ""
    assert is_sealed_folder(tmp_path / "abc")
    assert not list(tmp_path.glob(".abc-*")), "what it left is gone"


@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing", "seal"])
def test_a_damaged_library_is_rebuilt(tmp_path, damage):
    command = compiler_that(tmp_path, "")
    assert compile_into(tmp_path, "abc", SOURCE, command) == ""
    library, seal = tmp_path / "abc" / LIBRARY, tmp_path / "abc" / "seal"
    whole = library.read_bytes()
    if damage == "truncated":
        library.write_bytes(whole[:-100])
    elif damage == "foreign":  # whole, sealed, and of another declaration
        assert compile_into(tmp_path, "def", SOURCE.replace("42", "43"), command) == ""
        library.write_bytes((tmp_path / "def" / LIBRARY).read_bytes())
        seal.write_text((tmp_path / "def" / "seal").read_text())
    elif damage == "missing":
        library.unlink()
    else:
        seal.write_bytes(b"\xff\xfe")
    assert not is_sealed_folder(tmp_path / "abc")
    assert compile_into(tmp_path, "abc", SOURCE, command) == ""
    assert is_sealed_folder(tmp_path / "abc")
    assert library.read_bytes() == whole


def test_a_compiler_may_be_two_words(ops, tmp_path, monkeypatch):
    """``CXX="ccache g++"``: the first one runs the second."""
    script = tmp_path / "ccache"
    script.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/log"\nexec "$@"\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", "ccache c++")
    words = compiler_command(ops.keep.spec.name)
    assert [Path(word).name for word in words] == ["ccache", "c++"]
    (tmp_path / "native").mkdir(mode=0o700)
    assert compile_into(tmp_path / "native", "abc", SOURCE, [*words, "-shared", "-fPIC"]) == ""
    assert is_sealed_folder(tmp_path / "native" / "abc")
    assert (tmp_path / "log").read_text().splitlines() == [words[1]]
