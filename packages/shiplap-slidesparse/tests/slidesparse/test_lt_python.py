"""Around the vendors' libraries: finding them, compressing and expanding weights, listing algorithms, preparing."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shiplap.errors import ShiplapError
from shiplap.tuning import CandidateRefused
from shiplap.tuning.candidate import candidate_label
from shiplap.tuning.engine import recipe_of_sizes
from shiplap.tuning.inputs import draw_inputs
from shiplap_slidesparse import layers, lt, ops
from shiplap_slidesparse.lt import kernels, libraries, native, tuning, weights
from shiplap_testing.paths import REPOSITORY
from tests.slidesparse.lt_calls import two_of_four

FP8 = torch.float8_e4m3fn


@pytest.fixture
def device(monkeypatch, opened):
    """Tensors in host memory pass for those of a GPU, whose libraries are doubles."""
    libraries._query_support.cache_clear()  # of another double, or of a real library
    monkeypatch.setattr(libraries, "require_sparse", lambda device, where: None)
    monkeypatch.setattr(libraries, "_ensure_context", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0x77))
    yield opened
    libraries._query_support.cache_clear()


@pytest.fixture
def unasked():
    """Nobody has looked for cuSPARSELt in this process."""
    libraries.open_cusparselt.cache_clear()
    yield
    libraries.open_cusparselt.cache_clear()


@pytest.mark.parametrize("dtype", [torch.int8, FP8, torch.bfloat16, torch.float16], ids=str)
def test_what_is_compressed_comes_back(device, dtype, monkeypatch):
    monkeypatch.setattr(weights, "ROWS", 48)  # several pieces of the identity, the last one smaller
    weight = two_of_four(64, 128, dtype)
    blob = lt.compress_weight(weight)
    assert torch.equal(lt.expand_weight(blob, 64, 128, dtype).float(), weight.float())
    assert torch.equal(lt.compress_weight(weight.t().contiguous().t()), blob)
    assert device.double_stream() == 0x77
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*\d+ bytes(.|\n)*pack the weight anew"):
        lt.expand_weight(blob[:-2], 64, 128, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float16], ids=str)
def test_room_for_what_either_descriptor_asks_for(device, dtype):
    """One that belongs to no product asks for more, and would write what no product reads."""
    n, k = 64, 160
    weight, x = two_of_four(n, k, dtype), torch.randint(-9, 10, (16, k)).to(dtype)
    blob, values = lt.compress_weight(weight), n * k * dtype.itemsize // 2
    assert len(blob) == values + n * (160 if dtype == torch.int8 else 192) // 8
    assert (
        native.prepare_plan(native.ProductProblem(0, 16, n, k, dtype, native.RESULT[dtype]), True).compressed
        == values + n * 20
    )
    for packed in (blob, blob[: values + n * 20]):
        got = lt.multiply_weight(x, packed, n, native.RESULT[dtype], sparse=True)
        torch.testing.assert_close(got.double(), x.double() @ weight.double().t(), rtol=2**-7, atol=1e-2)
    with pytest.raises(ShiplapError, match=r"SL211(.|\n)*pack the weight anew"):
        lt.multiply_weight(x, blob[: values + n * 20 - 1], n, native.RESULT[dtype], sparse=True)


def test_products_of_other_types(device):
    x, weight = torch.randn(16, 64).to(FP8), two_of_four(32, 64, FP8)
    want = (x.double() @ weight.double().t()).float()
    assert torch.equal(lt.multiply_weight(x, weight, 32, torch.float32, sparse=False), want)
    assert torch.equal(lt.multiply_weight(x, lt.compress_weight(weight), 32, torch.float32, sparse=True), want)
    assert lt.multiply_weight(x[:0], weight, 32, torch.float32, sparse=False).shape == (0, 32)
    half, brain = torch.randn(16, 64).bfloat16(), two_of_four(32, 64, torch.bfloat16)
    got = lt.multiply_weight(half, brain, 32, torch.float32, sparse=False)
    assert torch.equal(got, (half.double() @ brain.double().t()).float())


def test_scales_of_the_weights_rows(device):
    """Applied by the library to integers, which is asked once; by PyTorch to the rest."""
    assert libraries.supports_product(torch.device("cpu"), torch.int8, torch.bfloat16, native.PER_ROW) is True
    refused = libraries.supports_product(torch.device("cpu"), FP8, torch.bfloat16, native.PER_ROW)
    assert refused == "cuSPARSELt 0.8.1: cusparseLtMatmulDescSetAttribute: not supported (status 10)"
    asked = device.double_count(b"cusparseLtMatmulDescSetAttribute")
    for dtype in (torch.int8, FP8):
        x = torch.randint(-9, 10, (16, 64)).to(dtype)
        weight, scale = two_of_four(32, 64, dtype), torch.rand(32) + 0.5
        got = lt.scaled_product(x, lt.compress_weight(weight), scale, torch.bfloat16)
        want = (x.double() @ weight.double().t() * scale.double()).bfloat16()
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    assert device.double_count(b"cusparseLtMatmulDescSetAttribute") == asked + 1  # the plan of the integers


def test_a_type_that_the_library_refuses_is_not_available(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(libraries, "open_cusparselt", lambda: "")
    assert lt.available("cuda:0") is True
    assert lt.available("cuda:0", FP8) is True
    reason = "cuSPARSELt 0.8.1: cusparseLtMatmulDescriptorInit: not supported (status 10)"
    libraries._query_support.cache_clear()
    device.double_fail(b"cusparseLtMatmulDescriptorInit", 10)
    native.destroy_plans()
    native.open_libraries(*[str(device._name)] * 3, libraries.OLDEST)
    assert lt.available("cuda:0", FP8) == reason


def test_one_scale_for_each_operand(device):
    x, weight, scales = torch.randn(16, 64).to(FP8), two_of_four(32, 64, FP8), (torch.tensor(2.0), torch.tensor(0.25))
    want = (x.double() @ weight.double().t() / 2).float()
    assert torch.equal(lt.multiply_weight(x, weight, 32, torch.float32, sparse=False, scales=scales), want)
    with pytest.raises(ShiplapError, match=r"SL305(.|\n)*scales rows of the weight"):
        lt.multiply_weight(x, lt.compress_weight(weight), 32, torch.float32, sparse=True, scales=scales)


def test_operands_that_would_be_read_beyond_are_refused(device):
    x, weight = torch.zeros(16, 64).to(FP8), two_of_four(32, 64, FP8)
    blob = lt.compress_weight(weight)
    for got, operands in {
        r"\(15, 64\)": (x[:15], weight, 32, False),
        r"\(31, 64\).* 31 rows": (x, weight[:31], 31, False),
        r"\(32, 32\)": (x, weight[:, :32], 32, False),
        "weight .*int8": (x, weight.view(torch.int8), 32, False),
        "64 rows": (x, weight, 64, False),
        r"\(32, 64\) of .*, 32 rows": (x, weight, 32, True),
        "bytes": (x, blob[:-16], 32, True),
    }.items():
        with pytest.raises(ShiplapError, match=rf"SL211(.|\n)*{got}"):
            lt.multiply_weight(*operands[:3], torch.float32, sparse=operands[3])


def test_operands_that_begin_anywhere_and_no_depth(device):
    x, weight = torch.randn(16, 64).to(FP8), two_of_four(32, 64, FP8)
    want, odd = x.double() @ weight.double().t(), torch.zeros(16 * 64 + 1).to(FP8)[1:].view(16, 64).copy_(x)
    blob = lt.compress_weight(weight)
    far = torch.cat((blob[:3], blob))[3:]
    assert odd.data_ptr() % 16
    assert far.data_ptr() % 16
    for left, right, sparse in ((odd, weight, False), (odd, blob, True), (x, far, True)):
        torch.testing.assert_close(lt.multiply_weight(left, right, 32, torch.float32, sparse=sparse).double(), want)
    for right, sparse in ((weight[:, :0], False), (blob[:0], True)):
        assert not lt.multiply_weight(x[:, :0], right, 32, torch.float32, sparse=sparse).any()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(33, 64, dtype=torch.int8), "33 x 64"),
        (torch.zeros(32, 48, dtype=torch.int8), "32 x 48"),
        (torch.zeros(32, 64), "torch.float32"),
    ],
    ids=["rows", "depth", "dtype"],
)
def test_what_cannot_be_compressed_is_told(device, weight, reason):
    with pytest.raises(ShiplapError, match=rf"SL211(.|\n)*{reason}"):
        lt.compress_weight(weight)


def test_a_weight_without_rows_or_depth_has_no_bytes(device):
    for shape in ((0, 64), (32, 0)):
        blob = lt.compress_weight(torch.zeros(shape, dtype=torch.int8))
        assert blob.shape == (0,)
        assert lt.expand_weight(blob, *shape, torch.int8).shape == shape


def test_refusals_of_a_library_become_errors(device):
    device.double_fail(b"cusparseLtSpMMACompressedSize2", 10)
    with pytest.raises(ShiplapError, match=r"SL305(.|\n)*cusparseLtSpMMACompressedSize2: not supported \(status 10\)"):
        lt.compress_weight(two_of_four(32, 64, torch.int8))


def test_without_a_gpu_the_reason_is_given():
    assert lt.available("cpu") == "cpu has no sparse tensor cores"
    if not torch.cuda.is_available():
        assert lt.available("cuda") == "this torch sees no GPU"
        with pytest.raises(ShiplapError, match=r"SL401(.|\n)*cuSPARSELt 0\.8\.1 or later(.|\n)*dense form"):
            lt.compress_weight(two_of_four(32, 64, torch.int8))


def test_the_library_is_found_where_its_wheels_put_it(vendor, vendor_file, tmp_path, monkeypatch, unasked):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("SHIPLAP_LIBRARY_PATH", raising=False)
    assert libraries.open_cusparselt() == (
        "no libcusparseLt.so.0 on sys.path: pip install 'nvidia-cusparselt-cu13>=0.8.1'"
    )
    for number, home in enumerate(("nvidia/cusparselt/lib", "nvidia/cu13/lib")):
        libraries.open_cusparselt.cache_clear()
        (tmp_path / home).mkdir(parents=True)
        shutil.copy(vendor_file, tmp_path / home)
        paths = [p.relative_to(tmp_path).as_posix() for p in libraries.cusparselt_candidates() if p.is_file()]
        assert len(paths) == number + 1
        assert paths[0] == f"{home}/libcusparseLt.so.0"  # the newer layout comes first
    assert libraries.open_cusparselt() == ""
    assert native.library_versions()[1] == "0.8.1"
    native.destroy_plans()


def test_an_old_library_is_passed_over_and_named(vendor, vendor_file, monkeypatch, unasked):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("SHIPLAP_LIBRARY_PATH", str(vendor_file.parent))
    monkeypatch.setattr(native, "find_library", lambda path: path)
    vendor.double_version(0, 8, 0)
    reason = libraries.open_cusparselt()
    assert reason == f"{vendor_file}: cuSPARSELt 0.8.0 is older than 0.8.1"
    assert native.library_versions()[1] == ""


def test_algorithms_are_those_of_which_there_is_a_plan(device):
    problem = tuning.problem_of(ops.sparse_mm_int8, 0, 64, 32, 64)
    configs = tuning.list_algorithms(ops.sparse_mm_int8, problem)
    assert {(c["ALG"], c["SPLIT_K"]) for c in configs} == {(a, s) for a in range(5) for s in (0, *tuning.SPLITS)}
    assert {c["VERSION"] for c in configs} == {8001}
    many = problem.with_fields(m=2 * tuning.FEW_ROWS)
    assert [c["SPLIT_K"] for c in tuning.list_algorithms(ops.sparse_mm_int8, many)] == [0] * 5
    assert tuning.list_algorithms(ops.mm_fp8, tuning.problem_of(ops.mm_fp8, 0, 64, 32, 64)) == [
        {"ALG": a} for a in range(3)
    ]
    device.double_hopper(1)
    assert [c["SPLIT_K"] for c in tuning.list_algorithms(ops.sparse_mm_int8, problem.with_fields(n=128))] == [0] * 5 + [
        -1
    ] * 5
    device.double_fail(b"cusparseLtMatmulPlanInit", 10)
    assert tuning.list_algorithms(ops.sparse_mm_int8, problem.with_fields(n=96)) == []


def test_candidates_begin_with_the_reference_and_the_librarys_choice(device):
    """In the process of its own, too, where candidates are looked up by name and config."""
    drawn = draw_inputs(ops.mm_int8, recipe_of_sizes(ops.mm_int8, {"m": 16, "n": 32, "k": 64}), "cpu")
    names = [candidate_label(c) for c in tuning.ALGORITHMS.candidates(ops.mm_int8, drawn)]
    assert names == ["reference", "lt(ALG=-1)", "lt(ALG=0)", "lt(ALG=1)", "lt(ALG=2)"]
    sizes = {"m": 2048, "n": 32, "k": 64, "_": 1, "layout": 0}
    drawn = draw_inputs(ops.sparse_mm_int8, recipe_of_sizes(ops.sparse_mm_int8, sizes), "cpu")
    names = [candidate_label(c) for c in tuning.ALGORITHMS.candidates(ops.sparse_mm_int8, drawn)]
    assert names[:3] == ["reference", "lt(ALG=-1, SPLIT_K=0, VERSION=0)", "lt(ALG=0, SPLIT_K=0, VERSION=8001)"]


def test_a_candidate_without_a_plan_is_refused_and_not_wrong(device, monkeypatch):
    x, blob = torch.zeros(16, 64, dtype=torch.int8), lt.compress_weight(two_of_four(32, 64, torch.int8))
    listed = [{"ALG": a, "SPLIT_K": 0, "VERSION": 8001} for a in (5, 4)]
    monkeypatch.setattr(tuning.AlgorithmSource, "configs", lambda self, op, device, sizes: listed)
    sizes = {"m": 16, "n": 32, "k": 64, "_": 1, "layout": 0}
    drawn = draw_inputs(ops.sparse_mm_int8, recipe_of_sizes(ops.sparse_mm_int8, sizes), "cpu")
    _, absent, fine = tuning.ALGORITHMS.candidates(ops.sparse_mm_int8, drawn)
    with pytest.raises(CandidateRefused, match="has 5 algorithms"):
        absent.prepare((x, blob, 32, 1))
    assert callable(fine.prepare((x, blob, 32, 1)))


def test_rows_that_begin_anywhere_are_copied_for_the_library(monkeypatch):
    pytest.importorskip("triton")
    linear, seen = importlib.import_module("shiplap_slidesparse.cuda.linear"), []
    monkeypatch.setattr(linear, "_SPARSE", {torch.bfloat16: lambda x, *rest: seen.append(x)})
    monkeypatch.setattr(linear, "finish_product", lambda *arguments: None)
    monkeypatch.setattr(linear, "_lift_activations", lambda x, pairs: x.clone())
    held = torch.randn(16 * 32 + 8).bfloat16()
    for start in (0, 8, 1):
        x = held[start : start + 16 * 32].view(16, 32)
        linear.slide_16bit(x, held, 32, None, 2, ops.CUSPARSELT, held)
        assert torch.equal(seen[-1], x)
        assert seen[-1].data_ptr() % 16 == 0
    assert [x.data_ptr() == held.data_ptr() + at for x, at in zip(seen, (0, 16, 2), strict=True)] == [True, True, False]


def test_prepare_runs_each_number_of_rows_once(opened):
    seen = []
    lt.prepare_captures(seen.append, (1, 64, 8, 64), 32, torch.float32, "cpu")
    assert [tuple(x.shape) for x in seen] == [(64, 32), (8, 32), (1, 32)]
    assert not any(x.any() for x in seen)


def test_declared_and_kept_workspace_agree():
    text = (REPOSITORY / "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/lt/plan.h").read_text()
    assert f"kWorkspace = size_t{{{kernels.WORKSPACE >> 20}}} << 20" in text
    assert "kWorkspace + static_cast<size_t>(n) * k / 4" in text
    assert f"{kernels.WORKSPACE} + n * k // 4" == kernels.SPARSE_WORKSPACE


def test_a_layers_choices_are_those_of_its_products_and_its_own(device, monkeypatch):
    asked: list[tuple[str, list[Any]]] = []

    def chosen(op, sizes, *rest, **more):
        asked.append((op.spec.opname, list(sizes)))
        return [f"{op.spec.opname} {i}" for i in range(len(asked[-1][1]))]

    monkeypatch.setattr(tuning, "tune_product", chosen)
    monkeypatch.setattr(tuning.sl, "tune", chosen)
    monkeypatch.setattr(libraries, "available", lambda device, dtype=None: True)
    choices = tuning.tune_layer(layers.linear_int8, (1, 64), 96, 256, 4)
    assert choices == [f"{op} {i}" for op in ("mm_int8", "sparse_mm_int8", "linear_int8") for i in (0, 1)]
    assert [sizes for _, sizes in asked[:2]] == [[(16, 96, 256), (64, 96, 256)], [(16, 96, 384), (64, 96, 384)]]
