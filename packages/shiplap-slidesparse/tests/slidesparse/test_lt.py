"""The vendors' libraries behind the C ABI, on doubles that count calls and compute in host memory."""

from __future__ import annotations

import ctypes
import random
import re
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap.sampling.symbols import read_library_state
from shiplap_slidesparse.lt import libraries, native
from shiplap_slidesparse.lt.kernels import SPARSE, WORKSPACE
from shiplap_testing.effort import sampled
from tests.slidesparse.lt_calls import Call, packed, problem_of, two_of_four

INVALID, UNSUPPORTED, INTERNAL = 1, 2, 3
FP8 = torch.float8_e4m3fn
# What a call may do to the libraries once its plan is there.
RUN = {"cublasLtMatmul", "cusparseLtMatmul", "cublasLtMatmulDescSetAttribute"}
FUNCTIONS = (
    "cublasLtCreate",
    "cublasLtMatmulDescInit_internal",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatrixLayoutInit_internal",
    "cublasLtMatmulPreferenceInit_internal",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmul",
    "cusparseLtInit",
    "cusparseLtStructuredDescriptorInit",
    "cusparseLtDenseDescriptorInit",
    "cusparseLtMatmulDescriptorInit",
    "cusparseLtMatmulDescSetAttribute",
    "cusparseLtMatmulAlgSelectionInit",
    "cusparseLtMatmulAlgGetAttribute",
    "cusparseLtMatmulAlgSetAttribute",
    "cusparseLtMatmulPlanInit",
    "cusparseLtMatmulGetWorkspace",
    "cusparseLtSpMMACompressedSize2",
    "cusparseLtMatmul",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
)


def counts(vendor: ctypes.CDLL) -> dict[str, int]:
    return {name: vendor.double_count(name.encode()) for name in FUNCTIONS}


def since(vendor: ctypes.CDLL, before: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in counts(vendor).items() if n != before[name]}


def operands(dtype: torch.dtype, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(-127, 128, (m, k)).to(dtype) if dtype == torch.int8 else torch.randn(m, k).to(dtype)
    return x, two_of_four(n, k, dtype)


def dense_int8(call: Call, m: int = 16, n: int = 32, k: int = 64) -> int:
    x, weight = operands(torch.int8, m, n, k)
    out = torch.full((m, n), 7, dtype=torch.int32)
    status = call("mm_int8", (x, weight, out))
    if status == 0:
        assert torch.equal(out, (x.double() @ weight.double().t()).int())
    return status


def dense_fp8(call: Call, m: int = 16, n: int = 32, k: int = 64) -> int:
    x, weight = operands(FP8, m, n, k)
    rows, columns = torch.rand(m) + 0.5, torch.rand(n) + 0.5
    out = torch.full((m, n), 7, dtype=torch.bfloat16)
    status = call("mm_fp8", (x, weight, rows, columns, out))
    if status == 0:
        want = x.double() @ weight.double().t() * rows.double()[:, None] * columns.double()
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)
    return status


def sparse(call: Call, dtype: torch.dtype = torch.int8, m: int = 16, n: int = 32, k: int = 64) -> int:
    x, weight = operands(dtype, m, n, k)
    name = {torch.int8: "int8", FP8: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    out = torch.full((m, n), 7, dtype=native.RESULT[dtype])
    status = call(f"sparse_mm_{name}", (x, packed(weight), out), (n, 1))
    if status == 0:
        want = x.double() @ weight.double().t()
        torch.testing.assert_close(out.double(), want.double(), rtol=2**-8 if dtype != torch.int8 else 0, atol=1e-3)
    return status


KINDS: dict[str, Callable[..., int]] = {
    "dense int8": dense_int8,
    "dense fp8": dense_fp8,
    "sparse int8": sparse,
    "sparse fp8": partial(sparse, dtype=FP8),
    "sparse bf16": partial(sparse, dtype=torch.bfloat16),
    "sparse fp16": partial(sparse, dtype=torch.float16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_layout_that_the_descriptors_say(opened, kind):
    assert KINDS[kind](Call()) == 0
    m, n, k = 16 * random.randrange(1, 4), 32 * random.randrange(1, 4), 32 * random.randrange(1, 6)
    function = {"dense int8": dense_int8, "dense fp8": dense_fp8, "sparse int8": sparse}.get(kind)
    assert function is None or function(Call(), m=m, n=n, k=k) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_does_nothing_but_the_product(opened, kind):
    assert KINDS[kind](Call()) == 0
    made, before = native.count_plans(), counts(opened)
    opened.double_capture(1)  # nothing that a capture forbids, either
    assert KINDS[kind](Call(stream=0x51)) == 0
    done = since(opened, before)
    assert set(done) <= RUN
    assert done.pop("cublasLtMatmulDescSetAttribute", 0) == (2 if kind == "dense fp8" else 0)
    assert list(done.values()) == [1]
    assert native.count_plans() == made
    assert opened.double_stream() == 0x51


def test_scales_are_those_of_the_call_and_not_of_the_plan(opened):
    x, weight = operands(FP8, 16, 32, 64)
    plain = x.double() @ weight.double().t()
    for factor in (1.0, 3.0):  # other memory, other values
        rows, columns, out = torch.full((16,), factor), torch.ones(32), torch.empty(16, 32, dtype=torch.bfloat16)
        assert Call()("mm_fp8", (x, weight, rows, columns, out)) == 0
        torch.testing.assert_close(out.double(), plain * factor, rtol=2**-8, atol=1e-6)
    assert native.count_plans() == 1


def test_the_library_scales_the_rows_of_integers_only(opened):
    for dtype in (torch.int8, FP8):
        weight = two_of_four(32, 64, dtype)
        problem = problem_of(16, weight).with_fields(result=torch.bfloat16, scaling=native.PER_ROW)
        if dtype == torch.int8:
            assert native.prepare_plan(problem, True).algorithms == 5
            continue
        with pytest.raises(
            native.LibraryRefusal, match=r"cusparseLtMatmulDescSetAttribute: not supported \(status 10\)"
        ):
            native.prepare_plan(problem, True)
        native.prepare_plan(problem.with_fields(scaling=native.UNSCALED), True)
    assert native.count_plans() == 2


def test_an_invalid_value_is_a_refusal_of_one_plan(opened):
    """As cuSPARSELt has it for a split of k that is for other devices: "either 1 or -1" on Hopper."""
    opened.double_hopper(1)
    call = Call(config=(2, 4, 0))
    assert sparse(call) == UNSUPPORTED
    assert call.message == "cusparseLtMatmulAlgSetAttribute: invalid value (status 3)"
    assert sparse(Call(config=(2, -1, 0))) == 0
    assert native.count_plans() == 1


def test_there_is_a_plan_for_each_problem_and_handles_for_each_device(opened):
    for changed in ({}, {"m": 32}, {"n": 64}, {"k": 32}):
        assert sparse(Call(), **changed) == 0
        assert dense_int8(Call(), **changed) == 0
    assert native.count_plans() == 8
    for config, ran in (((2, 0, 0), 201), ((2, 4, 0), 204), ((3, 0, 0), 301)):
        assert sparse(Call(config=config)) == 0
        assert opened.double_ran() == ran
    assert native.count_plans() == 11
    assert sparse(Call(device=3)) == 0
    assert native.count_plans() == 12
    assert opened.double_count(b"cusparseLtInit") == 2
    assert opened.double_count(b"cublasLtCreate") == 1
    call = Call(device=64)
    assert sparse(call) == INVALID
    assert call.message == "no device 64"


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_begins_with_no_library_and_says_what_is_missing(opened, kind):
    opened.double_capture(1)
    before, call = counts(opened), Call()
    assert KINDS[kind](call) == INVALID
    assert "no plan for m=16 n=32 k=64" in call.message
    assert "before a CUDA graph is captured" in call.message
    assert "prepare" in call.message
    done = since(opened, before)
    assert done == {"cuStreamIsCapturing": 1}
    assert native.count_plans() == 0
    opened.double_capture(0)
    assert KINDS[kind](Call()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_makes_plans_beside_the_graph(opened, kind):
    assert KINDS[kind](Call()) == 0
    opened.double_capture(1)
    before = counts(opened)
    assert KINDS[kind](Call(), m=48) == 0
    assert since(opened, before)["cuThreadExchangeStreamCaptureMode"] == 2
    assert opened.double_mode() == 0, "the mode of the thread is what it was"
    assert native.count_plans() == 2
    opened.double_fail(b"cuThreadExchangeStreamCaptureMode", 1)
    call = Call()
    assert KINDS[kind](call, m=64) == INTERNAL
    assert call.message == "cuThreadExchangeStreamCaptureMode: status 1"
    assert native.count_plans() == 2


def test_prepared_plans_serve_a_capture(opened):
    weight = two_of_four(32, 64, torch.int8)
    plan = native.prepare_plan(problem_of(48, weight), True)
    assert (plan.workspace, plan.algorithms, plan.compressed) == (64, 5, 32 * 64 * 5 // 8)
    opened.double_capture(1)
    assert sparse(Call(), m=48) == 0


def test_an_unknown_state_of_the_stream_counts_as_capturing(opened):
    opened.double_fail(b"cuStreamIsCapturing", 906)  # what the driver says of the default stream during a capture
    call = Call()
    assert dense_int8(call) == INVALID
    assert "captured" in call.message
    assert native.count_plans() == 0
    for status in (3, 201):  # of a process, or a thread, without a context
        opened.double_fail(b"cuStreamIsCapturing", status)
        assert dense_int8(call) == INVALID
        assert call.message == "CUDA has not begun in this process: put a tensor on the device first"


@pytest.mark.parametrize(
    "name", [f for f in FUNCTIONS if not f.startswith("cu") or f.startswith(("cublas", "cusparse"))]
)
def test_whatever_fails_is_told_and_nothing_stays_behind(opened, name):
    dense = name.startswith("cublas")
    call = Call(config=(1,) if dense else (1, 2, 0))

    def run() -> int:
        if dense or name != "cusparseLtMatmulDescSetAttribute":
            return dense_fp8(call) if dense else sparse(call, FP8)
        problem = problem_of(16, two_of_four(32, 64, torch.int8)).with_fields(scaling=native.PER_ROW)
        native.prepare_plan(problem, True)
        return 0

    opened.double_fail(name.encode(), 7)
    before = native.count_plans()
    try:
        status, messages = run(), call.message
    except native.LibraryRefusal as e:
        status, messages = UNSUPPORTED, str(e)
    except ShiplapError as e:  # the weight could not even be compressed
        status, messages = INTERNAL, str(e)
    assert status in (INTERNAL, UNSUPPORTED)
    assert name in messages or "cuBLASLt" in messages
    assert native.count_plans() == before or name in RUN
    opened.double_fail(name.encode(), 0)
    assert run() == 0


def test_old_versions_are_refused_and_new_ones_taken(vendor, vendor_file):
    for version in ((0, 8, 0), (0, 7, 9), (0, 8, 1), (0, 10, 0), (1, 0, 0)):
        native.destroy_plans()
        vendor.double_version(*version)
        text = ".".join(map(str, version))
        if version >= libraries.OLDEST:
            native.open_libraries(*[str(vendor_file)] * 3, libraries.OLDEST)
            assert native.library_versions()[1] == text
            continue
        with pytest.raises(native.LibraryRefusal, match=re.escape(f"cuSPARSELt {text} is older than 0.8.1")):
            native.open_libraries(*[str(vendor_file)] * 3, libraries.OLDEST)
        assert native.library_versions()[1] == ""
        with pytest.raises(native.LibraryRefusal, match="cuSPARSELt is not open"):
            native.prepare_plan(problem_of(16, two_of_four(32, 64, torch.int8)), True)
        assert dense_int8(Call()) == 0  # the dense product asks for less


def test_another_version_than_the_measured_one_chooses_itself(opened):
    assert sparse(Call(config=(4, 2, 10_000))) == 0  # measured with 0.10.0
    assert sparse(Call(config=(-1, 0, 0))) == 0
    assert native.count_plans() == 1
    assert sparse(Call(config=(4, 2, 8001))) == 0
    assert native.count_plans() == 2
    call = Call(config=(5, 0, 8001))
    assert sparse(call) == UNSUPPORTED
    assert "has 5 algorithms for m=16 n=32 k=64, not number 5" in call.message
    call = Call(config=(3,))
    assert dense_int8(call) == UNSUPPORTED
    assert "lists 3 algorithms" in call.message


def test_libraries_that_are_not_there_or_are_something_else(vendor, vendor_file, tmp_path):
    with pytest.raises(native.LibraryRefusal, match=r"nowhere\.so: cannot open"):
        native.open_libraries("", str(tmp_path / "nowhere.so"), str(vendor_file), libraries.OLDEST)
    call = Call()
    assert dense_int8(call) in (UNSUPPORTED, INTERNAL)
    absent = "this process has loaded neither libcublasLt.so.13 nor libcublasLt.so.12"
    assert call.message.startswith("cublasLtCreate: " if torch.version.cuda else absent)
    native.destroy_plans()
    other = next(Path(torch.__file__).parent.glob("lib/libshm.so"))
    with pytest.raises(native.LibraryRefusal, match="no function cublasLtCreate"):
        native.open_libraries(str(other), "", str(vendor_file), libraries.OLDEST)
    native.open_libraries(*[str(vendor_file)] * 3, libraries.OLDEST)
    native.open_libraries(*[str(tmp_path / "ignored.so")] * 3, libraries.OLDEST)  # open already
    assert native.library_versions() == ("13.1.2", "0.8.1")


def test_workspaces(opened):
    call = Call(workspace=63)
    assert dense_int8(call) == INTERNAL
    assert call.message == "workspace of 63 bytes, needs 64"
    assert sparse(call) == INTERNAL
    assert call.message == "workspace of 63 bytes, needs 64"
    opened.double_want(ctypes.c_size_t(WORKSPACE + 1))
    assert dense_int8(call, m=32) == UNSUPPORTED
    assert "cuBLASLt lists 3 algorithms for m=32 n=32 k=64, not number 0" in call.message


def test_workspaces_of_sparse_plans_grow_with_the_weight(opened):
    m, n, k = 32, 32, 64
    most = WORKSPACE + n * k // 4
    call = Call()
    for op in SPARSE:
        bound = next(kernel for kernel in op.kernels["cuda"] if kernel.name == "lt")
        assert bound.workspace({"m": m, "n": n, "k": k}) == most
    opened.double_want(ctypes.c_size_t(most + 1))
    assert sparse(call, m=m, n=n, k=k) == UNSUPPORTED
    assert call.message == f"algorithm -1 with split-k 0 wants {most + 1} bytes of workspace, more than {most}"
    assert native.count_plans() == 0
    opened.double_want(ctypes.c_size_t(most))
    assert native.prepare_plan(problem_of(m, two_of_four(n, k, torch.int8)), True).workspace == most


def test_a_choice_of_the_library_that_wants_too_much_is_replaced(opened):
    opened.double_want(ctypes.c_size_t(1 << 40))
    opened.double_frugal(3)
    assert sparse(Call()) == 0
    assert opened.double_ran() == 301
    call = Call(config=(2, 0, 0))  # what is asked for is not replaced
    assert sparse(call) == UNSUPPORTED
    assert call.message.startswith(f"algorithm 2 with split-k 0 wants {1 << 40} bytes")
    assert native.count_plans() == 1


def test_arguments_are_refused_before_any_library_sees_them(opened):
    call = Call()
    x, weight = operands(torch.int8, 16, 32, 64)
    out, blob = torch.full((16, 32), 7, dtype=torch.int32), packed(weight)
    before = counts(opened)
    shifted = torch.empty(16 * 64 + 1, dtype=torch.int8)[1:].view(16, 64)
    assert call("mm_int8", (shifted, weight, out)) == INVALID
    assert call.message == "q starts at an address that is no multiple of 16: pass .clone()"
    assert call("sparse_mm_int8", (x, blob, out), (32, 0)) == UNSUPPORTED
    assert "portable layout" in call.message
    assert call("mm_int8", (x, None, out)) == INVALID
    assert call.message == "weight is missing"
    elsewhere = Call(kind=1)
    assert elsewhere("mm_int8", (x, weight, out)) == UNSUPPORTED
    assert elsewhere.message == "q is not on a GPU"
    assert since(opened, before) == {}
    assert call("sparse_mm_int8", (x, blob[:-1], out), (32, 1)) == INVALID
    assert call.message == "packed has 1279 bytes, a weight of 32 rows of 64 takes 1280"
    assert (out == 7).all()


def test_empty_products(opened):
    before = counts(opened)
    for m, n, k in ((0, 32, 64), (16, 0, 64), (16, 32, 0)):
        out = torch.full((m, n), 7, dtype=torch.int32)
        x, weight = torch.empty(m, k, dtype=torch.int8), torch.empty(n, k, dtype=torch.int8)
        assert Call()("mm_int8", (x, weight, out)) == 0
        assert not out.any()
    assert since(opened, before) == {}


@pytest.mark.parametrize("size", [0, 1, 12])
def test_messages_stay_within_the_callers_buffer(opened, size):
    call = Call(workspace=0, error_size=size)
    assert dense_int8(call) == INTERNAL
    assert call.message == "workspace of 0 bytes, needs 64"[: max(0, size - 1)]


@pytest.mark.long
def test_threads_share_plans(opened):
    sizes = [16 * i for i in range(1, 9)]
    start, wrong = threading.Barrier(8), []

    def work(seed: int) -> None:
        start.wait()
        for m in sizes[seed:] + sizes[:seed]:
            for product in (dense_int8, dense_fp8, sparse):
                status = product(Call(), m=m)
                if status:
                    wrong.append(status)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert native.count_plans() == 3 * len(sizes)
    assert opened.double_count(b"cusparseLtInit") == opened.double_count(b"cublasLtCreate") == 1


@pytest.mark.parametrize("dtype", sampled([torch.int8, FP8, torch.bfloat16], 1), ids=str)
def test_threads_share_one_plan(opened, dtype):
    start, wrong = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        for _ in range(10):
            try:
                wrong.extend([status] if (status := sparse(Call(), dtype)) else [])
            except AssertionError as e:  # the product of another thread
                wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert native.count_plans() == 1


def test_many_plans_are_found_again_and_refused_calls_leave_nothing(opened):
    weight = two_of_four(32, 64, torch.int8)
    for m in range(16, 16 * 300, 16):
        native.prepare_plan(problem_of(m, weight), True)
    assert native.count_plans() == 299
    assert sparse(Call(), m=16) == 0
    assert native.count_plans() == 299
    call, x = Call(config=(99, 0, 0)), operands(torch.int8, 16, 32, 64)[0]
    out, blob = torch.empty(16, 32, dtype=torch.int32), packed(weight)

    def refused(times: int) -> int:
        for _ in range(times):
            assert call("sparse_mm_int8", (x, blob, out), (32, 1)) == UNSUPPORTED
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first = refused(500)
    assert refused(6_000) - first < 6 << 10  # KiB; 6,000 leaked plans would be 14 MiB
    assert native.count_plans() == 299


def test_the_library_keeps_one_thing(opened):
    state = read_library_state(native.LIBRARY)
    assert state.symbols == ()
    (kept,) = state.declared
    assert kept.startswith("slidesparse_lt_registry (plans by problem and handles by device, added, never")
    assert not [size for section, size in state.nameless if section.startswith((".tbss", ".tdata"))]
