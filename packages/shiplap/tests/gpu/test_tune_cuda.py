"""Tuning on a GPU: wrong and trespassing candidates are dropped, what cannot be captured is not taken under capture."""

import sys

import pytest
import torch

import shiplap as sl
from shiplap.tuning import measure, thaw
from shiplap.tuning.measure import CudaClock, Uncapturable
from shiplap_testing.paths import REPOSITORY

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = {"m": 512, "n": 512, "k": 512, "dtype": "bfloat16"}


@pytest.fixture
def ops(tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import tune_gpu_ops

    yield tune_gpu_ops
    thaw()
    sys.modules.pop("tune_gpu_ops", None)


def test_an_illegal_access_costs_the_candidate_only(ops):
    before = measure.benchmarks
    (choice,) = sl.tune(ops.hostile, [SIZES], 120, device="cuda")
    dropped = {f.evidence.partition(":")[0].partition("(")[0]: f.evidence for f in choice.findings}
    assert set(dropped) == {"cut", "trespass"}
    assert "tolerances" in dropped["cut"]
    assert "illegal memory access" in dropped["trespass"] or "CUDA error" in dropped["trespass"]
    assert choice.kernel in ("right", "synchronises", "reference")
    assert measure.benchmarks == before
    assert torch.ones(4, device="cuda").sum().item() == 4, "this process still has its device"


def test_under_capture_what_synchronises_is_dropped(ops):
    (choice,) = sl.tune(ops.hostile, [SIZES], 120, device="cuda", capture="always")
    assert choice.kernel in ("right", "reference")
    assert [f.check for f in choice.findings if "synchronises" in f.evidence] == ["tune.measure"]


def test_a_failed_capture_leaves_the_stream_and_the_clock_usable():
    clock, x = CudaClock("cuda", "always"), torch.ones(1 << 20, device="cuda")
    stream = torch.cuda.current_stream()

    def sync():
        torch.cuda.synchronize()
        return (x + 1,)

    with pytest.raises(Uncapturable):
        clock.ready(sync)
    assert torch.cuda.current_stream() == stream
    run = clock.ready(lambda: (x + 1,))
    assert 0 < clock.sample(run, 3) < 1e-3
    assert torch.equal(run()[0], x + 1)
    assert CudaClock("cuda").ready(sync) is sync, "without having to, it is timed as it is"
