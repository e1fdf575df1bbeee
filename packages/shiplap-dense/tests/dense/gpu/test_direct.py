"""Triton templates as kernels of their own on a GPU: values, launches, graphs, streams, offsets beyond 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import tuned_choices
from shiplap.kernels.triton import replay
from shiplap_dense import ops
from shiplap_testing.support import triton_files_entered
from tests.dense import direct_ops
from tests.dense.direct_ops import gathered
from tests.dense.gpu.eager import EAGER, TOLERANCE, error, randn, reference

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True, scope="module")
def bound() -> None:
    direct_ops.attach("cuda")


def draw(dtype: torch.dtype = torch.float32, **other: Any) -> list[Any]:
    sizes = {"m": 100, "n": 70, "k": 5, "g": 1, "ci": 12, "co": 10, "reflect": False, "scale": 1.0, "after": "nothing"}
    return list(gathered.sampler(torch.Generator().manual_seed(7), {**sizes, **other}, dtype, torch.device("cuda")))


def launched(fn: Any, *args: Any) -> list[str]:
    """Names of the kernels that a warm call starts."""
    fn(*args)
    with torch.profiler.profile() as profile:
        fn(*args)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in kernels if "Mem" not in name]


SIZES = [{}, {"m": 1, "n": 1}, {"m": 0}, {"n": 0}, {"g": 3}, {"ci": 20, "co": 30}, {"m": 5000, "n": 4000, "k": 27}]


@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gather_multiply_scatter(dtype, sizes):
    args = draw(dtype, **sizes)
    for given in (args, [*args[:3], None, None, *args[5:]], [*args[:5], True, args[6], 0.5, "relu"]):
        got = gathered(*given)
        assert error(got, reference(gathered, given)) < TOLERANCE[dtype]
    if args[2].shape[0]:
        assert launched(gathered, *args) == ["gathered"], "one kernel, and no copy"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_calls_in_half_precision_are_launched_by_cpp_from_their_second_time_on(dtype):
    op, args = ops.grouped_mm, EAGER["grouped_mm"](dtype)
    tuned_choices.forget_derived_choices()
    replay.build_replay_library(op)
    want = op(*args)
    assert all(torch.equal(op(*args), want) for _ in range(3))
    assert triton_files_entered(lambda: op(*args)) == []
    tuned_choices.forget_derived_choices()


def test_calls_in_float32_follow_the_flag_of_torch():
    op, args = ops.grouped_mm, EAGER["grouped_mm"](torch.float32)
    exact = [op(*args) for _ in range(3)][-1]
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert not torch.equal(op(*args), exact)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_views():
    feats, weight, table, order, bias = draw()[:5]
    args = (
        feats.repeat(1, 2)[:, ::2],
        weight.transpose(2, 3).contiguous().transpose(2, 3),
        table.t().contiguous().t(),
        order.repeat_interleave(2)[::2],
        bias[:1].expand(10),
    )
    assert error(gathered(*args), reference(gathered, args)) < 1e-5


@pytest.mark.parametrize(
    ("case", "template"), [("int8_mm", True), ("grouped_mm", True), ("mm", False), ("bmm", False), ("conv2d", False)]
)
def test_what_eager_calls_run(case, template):
    op, args = getattr(ops, case), EAGER[case](torch.float16)
    picked = op.pick_kernel(op.bind(args))
    assert isinstance(picked, Kernel) == template
    names = launched(op, *args)
    assert (case in names) == template, names


def test_a_new_number_of_rows_compiles_nothing():
    for m in (48, 33, 16):
        gathered(*draw(m=m, n=m + 1))
    run: Any = gathered.kernels["cuda"][0]
    before = {text: len(launcher.compiled_by_key) for text, launcher in run.jitted.items()}
    assert sum(before.values())
    for m in (96, 35, 7, 64, 3000):
        args = draw(m=m, n=m + 1)
        assert error(gathered(*args), reference(gathered, args)) < 1e-5
    assert {text: len(launcher.compiled_by_key) for text, launcher in run.jitted.items()} == before


def test_streams_and_graphs():
    args = draw()
    want = gathered(*args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        args[0].mul_(2)
        got = gathered(*args[:4])
    stream.synchronize()
    assert torch.allclose(got, 2 * (want - args[4]), rtol=1e-4, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gathered(*args)
    for _ in range(3):
        args[0].normal_()
        graph.replay()
        assert error(out, reference(gathered, args)) < 1e-5


def test_a_table_in_a_graph_stays_where_it_is():
    kernel = ops.conv2d.kernels["cuda"][0]
    x, w = randn(2, 9, 9, 16), randn(24, 3, 3, 16)
    args = (x, w, None, [1, 1], [1, 1], [1, 1])
    call = ops.conv2d.bind(args)
    serving = kernel.variant_for_call(call)
    serving.run_call(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = serving.run_call(call)
    run: Any = serving
    (table,) = run.tables.values()
    assert len(table.captured) == 1
    table.tables.clear()
    junk = [torch.full((3, 3, 2), 1000, dtype=torch.int32, device="cuda") for _ in range(100)]
    x.normal_()
    graph.replay()
    assert error(out, reference(ops.conv2d, args)) < 1e-5
    del junk
    other = ops.conv2d.bind((x, randn(24, 2, 2, 16), None, [1, 1], [1, 1], [1, 1]))
    with (
        pytest.raises(sl.ShiplapError, match="SL305: a table of the kernel is not on the device yet"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        kernel.variant_for_call(other).run_call(other)


def test_offsets_beyond_32_bits():
    rows, far = 40, 2**31 // 39 + 100  # the last row starts beyond 2^31 elements
    space = torch.empty(far * rows, dtype=torch.float16, device="cuda")
    a = space.as_strided((rows, 64), (far, 1)).normal_()
    b = randn(64, 48, dtype=torch.float16)
    for op, args in ((ops.mm, (a, b)), (ops.bmm, (a[None], b[None]))):
        call = op.bind(args)
        (got,) = op.kernels["cuda"][0].variant_for_call(call).run_call(call)
        assert error(got, reference(op, args)) < 3e-3
    feats = space.as_strided((rows, 12), (far, 1))
    args = draw(torch.float16, n=rows)
    feats.copy_(args[0])
    args[0] = feats
    assert error(gathered(*args), reference(gathered, args)) < 3e-3


@pytest.mark.whole_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_the_device_of_the_arguments_is_the_one_that_runs():
    args = [a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in draw()]
    assert torch.cuda.current_device() == 0
    assert error(gathered(*args), reference(gathered, args)) < 1e-5
    assert torch.cuda.current_device() == 0


@pytest.mark.whole_device
def test_tuning_finds_no_config_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    for op, sizes in ((ops.mm, {"m": 256, "n": 512, "k": 256}), (ops.int8_mm, {"m": 16, "n": 512, "k": 256})):
        (choice,) = sl.tune(
            op, [{**sizes, "dtype": "float16"}], device="cuda", isolate=False, progress=False, budget=60
        )
        assert [f.evidence for f in choice.findings if f.verdict == "fail" and "OutOfResources" not in f.evidence] == []
        assert choice.tried > 1
        print(choice)
