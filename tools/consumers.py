"""Real networks on the facades: eager, one graph, plain ``torch.compile``, one training step; a table of what happened.

Usage: ``consumers.py FOLDER ...``. Each folder is a checkout with a file ``consumer.py`` beside its code, which has
``networks() -> dict[str, tuple[Module, list[tuple]]]``: a network, and the arguments of some calls (scenes of several
sizes). The networks import ``spconv`` or ``flex_gemm`` as they always do. Exit status 1 if one of them failed.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shiplap import compat
from shiplap_sparse3d.drop_in import drop_in

Calls = list[tuple[Any, ...]]


def tensors(value: Any) -> list[torch.Tensor]:
    """Those of a result: of sparse tensors their features, of containers all."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "features"):
        return [value.features]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in items for t in tensors(item)]


def compiled(net: torch.nn.Module, calls: Calls, **options: Any) -> str:
    compat.reset_compiler()
    run = torch.compile(net, **options)
    with torch.no_grad():
        for arguments in calls:
            torch.testing.assert_close(tensors(run(*arguments)), tensors(net(*arguments)), rtol=1e-3, atol=1e-3)
    counts = compat.compile_counts()
    return f"{counts.graphs} graphs, {counts.graph_breaks} breaks, {counts.recompiles} recompiles"


def eager(net: torch.nn.Module, calls: Calls) -> str:
    with torch.no_grad():
        return f"{sum(t.numel() for arguments in calls for t in tensors(net(*arguments)))} values"


def trained(net: torch.nn.Module, calls: Calls) -> str:
    net.train()
    sum(t.square().mean() for t in tensors(net(*calls[0])) if t.is_floating_point()).backward()
    given = [p.grad for p in net.parameters() if p.requires_grad]
    net.eval()
    return f"{sum(g is not None for g in given)} of {len(given)} gradients"


STAGES: dict[str, Callable[[torch.nn.Module, Calls], str]] = {
    "eager": eager,
    "one graph": lambda net, calls: compiled(net, calls, fullgraph=True),
    "plain": lambda net, calls: compiled(net, calls),
    "trained": trained,
}


def main(folders: list[str]) -> int:
    failed = 0
    for folder in folders:
        sys.path.insert(0, folder)
        with drop_in():
            networks = runpy.run_path(str(Path(folder) / "consumer.py"))["networks"]()
            for name, (net, calls) in networks.items():
                net.eval()
                for stage, run in STAGES.items():
                    start = time.perf_counter()
                    try:
                        outcome = run(net, calls)
                    except Exception as e:  # whatever a network of others raises is an outcome
                        outcome, failed = f"{type(e).__name__}: {str(e).splitlines()[0][:120]}", failed + 1
                    print(
                        f"{Path(folder).name:20} {name:24} {stage:10} {time.perf_counter() - start:7.1f} s  {outcome}"
                    )
        sys.path.remove(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
