"""Two ranks: one tunes, both run the same choice; what goes wrong on the one is an error on the other."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import BackendConfig

from shiplap.tuning import engine
from shiplap_testing.forked import WITH_VERBS, python

PROGRAM = """
import json, os, sys, warnings
import torch, torch.distributed as dist
torch.set_num_threads(1)
import shiplap as sl
from shiplap.tuning import measure
from tests.tuning import ops
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
a, b = torch.randn(16, 512), torch.randn(512, 16)
(choice,) = sl.tune(ops.mm, [(a, b)], budget=600, isolate=False)
picked = ops.mm.pick_kernel(ops.mm.bind((a, b)))
frozen = [c.label for c in sl.freeze(sys.argv[2] + f".{rank}.json")]
try:
    sl.tune(ops.pick, [{"n": 8, "c": 2, "m": 4}], isolate=False)
    failure = ""
except sl.ShiplapError as e:
    failure = f"{e.id} {e.what}"
print(json.dumps({"origin": choice.origin, "label": choice.label, "picked": f"{picked.name}({picked.config})",
                  "benchmarks": measure.benchmarks, "frozen": frozen, "failure": failure}))
dist.destroy_process_group()
"""


def test_one_rank_tunes_and_the_other_receives(tmp_path: Path) -> None:
    def told(rank: int) -> dict[str, Any]:
        env = {**os.environ, "SHIPLAP_CACHE_DIR": str(tmp_path / f"cache{rank}")}
        done = python("-c", PROGRAM, rank, tmp_path / "rendezvous", env=env, timeout=300, imported=WITH_VERBS)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(told, range(2))
    assert (first["origin"], second["origin"]) == ("measured", "received")
    assert first["label"] == second["label"] == first["picked"] == second["picked"] == "right(WAIT=300)"
    assert first["benchmarks"] > 0
    assert second["benchmarks"] == 0
    assert first["frozen"] == second["frozen"] == ["right(WAIT=300)"]
    assert first["failure"] == "SL606 the op has no valid inputs to tune on"
    assert second["failure"] == "SL611 rank 0 could not tune"


@pytest.mark.parametrize(
    ("backend", "where"),
    [
        ("gloo", "cpu"),
        ("mpi", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("nccl", "cuda:3"),
        ("cuda:nccl", "cuda:3"),
        ("xpu:xccl", "xpu:3"),
    ],
)
def test_what_is_sent_lies_where_the_group_can_send_it(backend, where, monkeypatch):
    """Torch's own words for each backend; no GPU is needed to say on which one a tensor would lie."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: repr(BackendConfig(backend)))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 3))
    assert engine.broadcast_device() == torch.device(where)


def test_a_group_whose_backend_serves_another_device_gets_tensors_there(monkeypatch):
    """The broadcasts themselves, on a device without memory: each tensor lies where the backend is."""
    sent = []
    monkeypatch.setattr(engine, "broadcast_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: sent.append((tensor.device.type, src)))
    with pytest.raises(NotImplementedError, match="meta"):
        engine._broadcast_json({"result": 1})
    assert sent == [("meta", 0), ("meta", 0)]
