"""Plain Triton functions as kernels: what the generated C++ launches, what is compiled for it, what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import shiplap as sl
from shiplap_testing.forked import interpreted, python
from shiplap_testing.support import fails

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from shiplap.kernels.native import binding  # noqa: E402
from shiplap.kernels.native.build_plan import bindable_entries, make_plan  # noqa: E402
from shiplap.kernels.native.deploy import DEPLOYED_LIBRARY_NAME, deploy  # noqa: E402
from shiplap.kernels.triton.kernel import LaunchedKernel, compile_ahead  # noqa: E402
from shiplap.packaging import model, package_model  # noqa: E402
from shiplap.plugin_api import late_launches, launch_program  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A process of its own: it has a driver without a device, and Triton believes in a Hopper."""
    home = tmp_path_factory.mktemp("launched")
    env = {**os.environ, "TRITON_CACHE_DIR": str(home / "triton"), "SHIPLAP_CACHE_DIR": str(home / "shiplap")}
    done = python("-W", "ignore", HERE / "launched_cases.py", env=env)
    if "the driver of a GPU is loaded" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_driver_gets_what_the_kernels_need(results):
    assert results["wrong"] == [], "the interpreter computed from the launches alone"
    assert results["launches"] == 17, "one for each call of affine, two for each of turned"
    assert results["threads"] == [32, 128], "num_warps of the config, of the constants, and Triton's own"
    assert results["contexts"] == 1, "a thread without a context gets the primary one"


def test_a_key_stands_for_what_tritons_binder_finds(results):
    assert results["disagreements"] == []
    assert results["keys"] == [0, 0], "the generated C++ computes the same"
    assert results["same"] == [[True], [True], [True, True]], "Triton's own launch would load the same cubins"
    assert results["loads"] == results["forms"] < results["launches"], "each form is compiled and loaded once"


def test_a_warm_call_asks_nobody(results):
    assert results["warm"] == [1, 0], "a launch, nothing loaded; an empty call launches nothing"


def test_a_backward_is_launched_like_a_forward(results):
    """Of a gradient that is an op, Python has a generated function and the call of the op, and nothing of a launch."""
    trained = results["trained"]
    assert trained["disagreements"] == []
    assert trained["right"]
    assert trained["launches"] == ["scaled", "slope"]
    assert trained["frames"] == ["backward", "__call__"]


def test_a_kernel_that_is_declared_again_is_compiled_again(results):
    """The library may be the one of before: its launches are the same, and its forms are of another kernel."""
    assert results["declared again"] == [True, 1]


def test_what_goes_wrong_is_an_error_of_the_op(results):
    assert results["uncompiled"] == "SL305 AssertionError: a warm call asks nobody", "what the compiler raises"
    assert results["grid"].endswith("a grid of 1 x 65536 x 1 programs, a device takes 2147483647 x 65535 x 65535")
    assert results["failing"] == "SL305 cuLaunchKernel failed with CUDA_ERROR_FAKE"


def test_a_program_branches_fills_sorts_and_tells_late_what_was_wrong(results):
    programs = results["programs"]
    assert programs["wrong"] == []
    for case, launches in programs["launches"].items():
        n, most = map(int, case.split())
        assert launches == ("" if n == 0 else "few" if n <= most else "keyed written"), case
    assert programs["kept"], "a bad value is reported, and the rest is right"
    told = "SL211 row 17 is negative, in an earlier call of launched::ordered"
    assert programs["told"] == [told, "nothing"], "the next call raises, once"
    assert programs["alone"] == [
        "index 12 is outside the table, in an earlier call of mylib::take",
        "code 9, row 3, in an earlier call",
        "the same word",
    ]


def test_cubins_go_along(results):
    packed = results["packed"]
    assert packed["right"]
    assert packed["loads"] == 2, "by eight threads"
    assert "no cubin for sm_90, launch 0" in packed["unknown"]
    assert "package the op with a call of this kind" in packed["unknown"]
    assert "no cubin for sm_80" in packed["other device"]


def test_the_interpreter_is_for_audits(tmp_path):
    done = interpreted("-W", "ignore", HERE / "launched_audit.py")
    assert done.returncode == 0, done.stderr[-3000:]
    findings = json.loads(done.stdout)
    for op in ("layer_norm", "momentum_"):
        assert {check: verdict for check, (verdict, _) in findings[op].items()} == {"numerics": "ok"}, op
    assert "fail" in {verdict for verdict, _ in findings["wrong"].values()}, (
        "a kernel that is wrong from the third element on"
    )


# --- declarations -----------------------------------------------------------------------------------------------------


@triton.jit
def copied(x_ptr, out, n, skip, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x_ptr + at * skip, mask=at < n), mask=at < n)


@pytest.fixture
def copy(ns):
    @sl.op(f"{ns}::copy")
    def copy(x: Float[Tensor, "n"], scale: float = 1.0) -> Float[Tensor, "n"]:
        return x * scale

    return copy


def test_every_parameter_has_a_value(copy):
    where = f"{copy.spec.name}, Triton kernel copied"
    with fails("SL618", where, "no value for 'skip'", "arguments={'skip': ...}"):
        copy.kernel("cuda", sl.triton(copied, grid="n", constants={"BLOCK": 32}))
    with fails(
        "SL618", where, "no value for 'BLOCK'", "constants={'BLOCK': ...}", "values: n, out, scale, x, numel_out"
    ):
        copy.kernel("cuda", sl.triton(copied, grid="n", arguments={"skip": 1}))
    with fails("SL618", where, 'as in arguments={"skip": "out"} for a tensor, or "n" for a size'):
        copy.kernel("cuda", sl.triton(copied, grid="n", constants={"BLOCK": 32}))
    for unbound in (copied, copied[(4,)]):  # as Triton itself launches it
        with fails(
            "SL122", 'bind a kernel of Triton by sl.triton(kernel, grid="cdiv(n, BLOCK)", arguments={"rows": "n"}'
        ):
            copy.kernel("cuda", unbound)
    with fails("SL618", where, "'rows' in grid='cdiv(rows, BLOCK)'\n", "BLOCK, n", "in place of rows, or the number"):
        copy.kernel("cuda", sl.triton(copied, grid="cdiv(rows, BLOCK)", arguments={"skip": 1}, constants={"BLOCK": 32}))
    with fails("SL618", where, "arguments={'skipp': ...}", "x_ptr, out, n, skip, BLOCK"):
        copy.kernel("cuda", sl.triton(copied, grid="n", arguments={"skipp": 1}, constants={"BLOCK": 32}))
    with fails("SL618", where, "grid=", "one to three"):
        copy.kernel("cuda", sl.triton(copied, grid=("n",) * 4, arguments={"skip": 1}, constants={"BLOCK": 32}))
    with fails("SL105", "grid='n / 2'"):
        copy.kernel("cuda", sl.triton(copied, grid="n / 2", arguments={"skip": 1}, constants={"BLOCK": 32}))
    assert not copy.kernels


def test_what_no_launch_can_pass_is_refused(copy, ns):
    with fails("SL619", "triton.runtime.autotuner.Autotuner", "configs="):
        sl.triton(triton.autotune(configs=[triton.Config({"BLOCK": 32})], key=["n"])(copied), grid="n")
    with fails("SL619", "builtins.function", "decorate the function copied with @triton.jit"):
        sl.triton(copied.fn, grid="n")
    assert sl.triton(triton.jit(copied.fn), grid="n").steps, "the fix works"
    with fails("SL619", "builtins.int", "decorate the function of the kernel"):
        sl.triton(3, grid="n")

    @sl.op(f"{ns}::some", bounds={"m": "n"})
    def some(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        return x[x > 0]

    launches = sl.triton(copied, grid="n", arguments={"skip": 1}, constants={"BLOCK": 32})
    with fails("SL619", got="an output whose size depends on data"):
        some.kernel("cuda", launches)
    with fails("SL619", "the device 'cpu'", "TRITON_INTERPRET=1"):
        copy.kernel("cpu", launches)


def test_every_name_in_a_program_stands_for_one_thing(copy):
    def bind(program):
        return lambda: copy.kernel("cuda", program)

    with fails("SL618", f"{copy.spec.name}, values['n']", "the name 'n'"):
        bind(launch_program(values={"n": "2"}).then(copied, grid="n", constants={"BLOCK": 32}))()
    launch = {"grid": "n", "arguments": {"skip": "skips"}, "constants": {"BLOCK": 32}}
    with fails("SL618", "'rows' in it, 'rows + 1'", "n"):
        bind(launch_program(values={"skips": "rows + 1"}).then(copied, **launch))()
    program = launch_program(values={"skips": "n + 1"})
    with fails("SL618", "'rows' in when, 'rows > 1'", "n, skips"):
        bind(program.then(copied, **launch, when="rows > 1"))()
    with fails("SL618", "'rows' in fill, 'rows'", "n, skips"):
        bind(program.then(copied, **launch).fill("rows", "4"))()
    with fails("SL618", "errors that skip tell late", "errors=LateErrors()"):
        bind(program.then(copied, **launch, codes={"skip": "row {row} is wrong"}))()
    bind(program.then(copied, **launch, when="skips > 1"))()
    seen = copy.identity
    bind(program.then(copied, **launch, when="skips > 2"))()
    assert copy.identity != seen


def test_a_program_in_a_module_of_its_own_is_imported_when_it_is_needed(copy, tmp_path, monkeypatch):
    folder = tmp_path / "late_programs"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "steps.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    copy.kernel("cuda", late_launches("late_programs.steps", "COPY"))
    (kernel,) = copy.native_kernels("cuda")
    assert copy.identity
    if not torch.cuda.is_available():
        assert bindable_entries(copy) == [], "a binding that is built here has no need of it"
        assert binding.state(copy, "cuda") == ("python", "its launches are generated where there is a CUDA device")
    assert "late_programs.steps" not in sys.modules
    assert "n_twice" in kernel.native.source()
    assert "late_programs.steps" in sys.modules
    copy.kernel("cuda", late_launches("late_programs.absent", "COPY"))
    with fails("SL619", "late_programs.absent.COPY", "ModuleNotFoundError"):
        copy.native_kernels("cuda")[0].native.source()
    if not torch.cuda.is_available():  # a wheel can be built where there is no Triton
        with fails("SL404"):
            make_plan(copy)


LATE = """
import triton
import triton.language as tl
from shiplap.plugin_api import launch_program

@triton.jit
def copied(x_ptr, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

COPY = launch_program(values={"twice": "2 * n"}).then(copied, grid="cdiv(twice, 2 * BLOCK)", constants={"BLOCK": 32})
"""


def test_the_digest_sees_the_launch(copy):
    seen = set()
    for arguments, constants, grid in (({"skip": 1}, 32, "n"), ({"skip": 2}, 32, "n"), ({"skip": 1}, 64, "n")):
        copy.kernel("cuda", sl.triton(copied, grid=grid, arguments=arguments, constants={"BLOCK": constants}))
        seen.add(copy.identity)
    copy.kernel("cuda", sl.triton(copied, grid=("n", 1), arguments={"skip": 1}, constants={"BLOCK": 32}))
    assert len(seen | {copy.identity}) == 4


def test_only_tensors_of_which_every_stride_is_asked_keep_theirs(ns):
    @sl.op(f"{ns}::rows")
    def rows(x: Float[Tensor, "n m"], y: Float[Tensor, "n m"], at: Int32[Tensor, "n"]) -> Float[Tensor, "n m"]:
        return x + y

    @triton.jit
    def kernel(x, y, at, out, stride_x_0, stride_x_1, stride_y_0, m):
        pass

    rows.kernel("cuda", sl.triton(kernel, grid="n"))
    (bound,) = rows.native_kernels("cuda")
    assert bound.native.strided == {"x"}


@pytest.mark.long
def test_forms_are_compiled_for_a_device_that_is_not_here(ns, tmp_path, monkeypatch):
    """By Triton's own compiler: all that a program without Python needs."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from tests.gpu import launched_ops as ops

    calls = {
        ops.softmax: (torch.randn(4, 100),),
        ops.layer_norm: (torch.randn(4, 64), torch.randn(64), None),
        ops.linear_gelu: (torch.randn(32, 16).half(), torch.randn(48, 16).half(), torch.randn(48).half()),
        ops.momentum_: (torch.randn(100), torch.randn(100), torch.randn(100), 0.1),
    }
    for op, args in calls.items():
        (kernel,) = op.native_kernels("cuda")
        call = op.bind(op.spec.complete(args))
        chosen = kernel.variant_for_call(call)
        assert isinstance(chosen, LaunchedKernel)
        (cubin,) = chosen.compile_for(call, 90)
        assert cubin.image[:4] == b"\x7fELF"
        assert cubin.architecture == 90
        assert chosen.compile_for(call, 90)[0] is cubin
        assert "image_0[] = {127,69,76,70," in chosen.native.source(packed=True)
        assert "image_0" not in chosen.native.source()


@pytest.mark.long
def test_a_deployed_library_carries_them(tmp_path, monkeypatch):
    """One file, without kernel libraries: binding, launches and cubins. On a machine without CUDA it loads, too."""
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    from tests.gpu.launched_ops import momentum_

    (kernel,) = momentum_.native_kernels("cuda")
    call = momentum_.bind((*(torch.randn(100) for _ in range(3)), 0.1, 0.9, 0.0, False))
    (cubin,) = kernel.compile_for(call, 90)
    library = deploy([momentum_], tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == [DEPLOYED_LIBRARY_NAME]
    assert cubin.image in library.read_bytes()
    load = f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.launched_gpu.momentum_.default)"
    done = python("-c", load)
    assert done.stdout.strip() == "launched_gpu.momentum_.default", done.stderr[-2000:]


def test_an_op_without_a_cubin_is_not_deployed(copy, tmp_path):
    copy.kernel("cuda", sl.triton(copied, grid="n", arguments={"skip": 1}, constants={"BLOCK": 32}))
    with fails("SL620", copy.spec.name, "no cubin", "compile_ahead"):
        deploy([copy], tmp_path / "made")
    compile_ahead(copy, [(torch.randn(32),), (torch.randn(33),)], (90,))
    (kernel,) = copy.native_kernels("cuda")
    assert len(kernel.native.cubins) == 2, "a multiple of 16, and a number that is none"
    with fails("SL620", got="no sl.triton kernel for CUDA"):
        compile_ahead(declared_without(copy), [(torch.randn(32),)], (90,))


def declared_without(copy):
    copy.kernels.clear()
    return copy


@triton.jit
def doubled(x_ptr, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


def test_a_package_carries_what_its_program_launches(ns, tmp_path, monkeypatch):
    """For a device that is not here, up to the library that carries the cubins."""

    @sl.op(f"{ns}::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    double.kernel("cuda", sl.triton(doubled, grid="cdiv(n, BLOCK)", constants={"BLOCK": 64}))

    class Model(torch.nn.Module):
        def forward(self, x):
            return double(x.sin()) + 1

    with FakeTensorMode():
        x = torch.empty(32, device="cuda")
        program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=3)}})

    def stopped(ops, where):
        raise RuntimeError("no device")

    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    with fails("SL620", "doubled"):
        package_model(program, tmp_path / "model.pt2")
    monkeypatch.setattr(model, "make_on_demand_library", stopped)
    with pytest.raises(RuntimeError, match="no device"):
        package_model(program, tmp_path / "model.pt2", architectures=[90])
    cubins = double.native_kernels("cuda")[0].native.cubins
    assert len(cubins) == 2, "for multiples of 16, and for other sizes"
    assert not double.native_kernels("cuda")[0].native.missing()
