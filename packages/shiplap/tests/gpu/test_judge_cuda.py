"""The judge on a GPU: memory is shared with a locked process, and calls are timed behind a gate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shiplap as sl
from shiplap.judge import index_bounds
from shiplap.judge.index_bounds import to_host
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.call_batch import CallBatch, release_block
from shiplap.sandbox.candidate import CandidateError, TargetProcess
from shiplap.sandbox.device_clock import CallsNotQueued
from shiplap.sandbox.device_memory import GRAIN, DeviceError, device_driver
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.supervisor import SandboxLauncher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
REFERENCE = """import torch
def reference(x):
    return torch.sigmoid(x) * x
def get_inputs():
    return [torch.randn(512, 768)]
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[SandboxLauncher]:
    with SandboxLauncher() as made:
        yield made


def process_with(launcher: SandboxLauncher, folder: Path, source: str) -> TargetProcess:
    """Return a locked process with the function ``candidate`` of a source."""
    (folder / "it.py").write_text(f"import torch\n{source}")
    made = TargetProcess(launcher.start([str(folder)], device=True))
    made.check_device("cuda")
    made.load(LoadTarget(str(folder / "it.py"), ["candidate"], "function", [], 1), ArgumentArena())
    return made


def test_a_block_holds_nothing_but_itself() -> None:
    """The other process maps the whole allocation, so that none of the judge's other memory may lie in it."""
    driver = device_driver()
    block = driver.make_block(1000)
    try:
        assert block.size == GRAIN
        assert driver.allocation_of(block.address) == (block.address, GRAIN)
        with pytest.raises(DeviceError):
            block.bytes_at(GRAIN - 4, 8)
    finally:
        block.close()


def test_a_handle_of_nothing_is_refused() -> None:
    with pytest.raises(DeviceError):
        device_driver().open_allocation(bytes(range(64)))


def test_calls_of_a_locked_process_are_queued_and_timed(launcher, tmp_path) -> None:
    witness = process_with(launcher, tmp_path, "def candidate(x):\n    return x * 2\n")
    assert not witness.prisoner.missing or not any(witness.prisoner.missing.values())
    sets = [[torch.randn(1 << 22, device="cuda")] for _ in range(16)]
    for queued in (False, True):
        with CallBatch(witness, 0, sets, blank=True, queued=queued) as batch:
            batch.fill(sets)
            took = batch.run_calls().took.wall
    assert 0 < took < 16 * 200e-6
    witness.prisoner.kill()


def test_calls_that_wait_for_the_device_cannot_be_queued(launcher, tmp_path) -> None:
    source = "def candidate(x):\n    torch.cuda.synchronize()\n    return x * 2\n"
    witness = process_with(launcher, tmp_path, source)
    sets = [[torch.randn(1024, device="cuda")] for _ in range(2)]
    with CallBatch(witness, 0, sets, blank=True, queued=True) as batch:
        batch.fill(sets)
        with pytest.raises(CallsNotQueued):
            batch.run_calls()
        batch.queued = False
        assert 0 < batch.run_calls().took.wall < math.inf
    witness.prisoner.kill()


def test_a_candidate_that_crashes_the_device_is_a_fault(launcher, tmp_path) -> None:
    source = "def candidate(x):\n    return x[torch.full((4,), 1 << 40, device='cuda')]\n"
    witness = process_with(launcher, tmp_path, source)
    with pytest.raises(CandidateError):
        witness.call([torch.randn(1024, device="cuda")])
    witness.prisoner.kill()
    assert torch.ones(2, device="cuda").sum().item() == 2  # the judge goes on


@pytest.mark.parametrize(
    ("body", "verdict"),
    [("x / (1 + torch.exp(-x))", "accepted"), ("x / (1 + torch.exp(-x)) + (x > 4.2) * 1e-3", "refused")],
    ids=["right", "wrong far from zero"],
)
def test_verdicts(launcher, tmp_path, body: str, verdict: str) -> None:
    reference, it = tmp_path / "ref.py", tmp_path / "candidate" / "it.py"
    it.parent.mkdir()
    reference.write_text(REFERENCE)
    it.write_text(f"import torch\ndef candidate(x):\n    return {body}\n")
    result = sl.judge(reference, it, device="cuda", seconds=40, launcher=launcher)
    assert result.verdict == verdict, (result.reasons, result.missing)
    if verdict == "accepted":
        assert all(t.queued and t.resolution < 0.2 * t.candidate + 5e-6 for t in result.timings), result.timings


TABLE = """import torch
def reference(table, ids):
    return table[ids] * 2
def get_inputs():
    return [torch.randn(500, 64), torch.randint(0, 500, (300,))]
"""
NORM = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(1024) + 0.5)
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * self.w
def get_inputs():
    return [torch.randn(2048, 1024)]
"""
OTHER_NORM = """import torch
class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(1024) + 0.5)
    def forward(self, x):
        return x / ((x * x).sum(1, keepdim=True) / x.shape[1] + 1e-6).sqrt() * self.w
"""


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (
            TABLE,
            "import torch\ndef candidate(table, ids):\n    return torch.index_select(table, 0, ids) + table[ids]\n",
        ),
        (NORM, OTHER_NORM),
    ],
    ids=["indices", "a module with parameters"],
)
def test_honest_candidates_leave_the_device_usable(launcher, tmp_path, reference: str, candidate: str) -> None:
    """An index out of range in the reference, for another size of the table, would end all use of the device."""
    home, it = tmp_path / "ref.py", tmp_path / "candidate" / "it.py"
    it.parent.mkdir()
    home.write_text(reference)
    it.write_text(candidate)
    result = sl.judge(home, it, device="cuda", seconds=60, launcher=launcher)
    assert result.verdict == "accepted", (result.reasons, result.missing)
    assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.parametrize("on_default", [True, False])
def test_a_kernel_on_the_default_stream_is_noticed(launcher, tmp_path, on_default: bool) -> None:
    """As one that is launched without a stream. Where another one is current, it reads what is not there yet."""
    inner = "    with torch.cuda.stream(torch.cuda.default_stream()):\n    " if on_default else ""
    home, it = tmp_path / "ref.py", tmp_path / "candidate" / "it.py"
    it.parent.mkdir()
    home.write_text(REFERENCE)
    it.write_text(f"import torch\ndef candidate(x):\n{inner}    return torch.nn.functional.silu(x)\n")
    result = sl.judge(home, it, device="cuda", seconds=60, launcher=launcher)
    assert not result.reasons
    assert ("stream" in dict(result.missing)) == on_default, result.missing


def test_copies_to_look_for_indices_lie_in_memory_that_is_used_again(monkeypatch) -> None:
    t = torch.arange(64, device="cuda").reshape(8, 8).t()
    copies = [to_host(t) for _ in range(2)]
    assert all(copy.is_pinned() and torch.equal(copy, t.cpu()) for copy in copies)
    assert copies[0].data_ptr() != copies[1].data_ptr()
    monkeypatch.setattr(index_bounds, "MOST_LOCKED", 8)
    assert not to_host(t).is_pinned()


def test_a_block_serves_several_batches(launcher, tmp_path) -> None:
    witness = process_with(launcher, tmp_path, "def candidate(x):\n    return x * 2\n")
    blocks = []
    for count, queued in ((8, False), (8, True), (4, True)):  # the first one loads the kernel, for which it may wait
        sets = [[torch.randn(1 << 20, device="cuda")] for _ in range(count)]
        with CallBatch(witness, 0, sets, blank=True, queued=queued) as batch:
            batch.fill(sets)
            batch.run_calls()
        blocks.append(witness.block)
    assert len({id(block) for block in blocks}) == 1
    release_block(witness)
    witness.prisoner.kill()
