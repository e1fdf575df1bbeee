"""Real networks on the facades: eager, one graph, plain ``torch.compile``, a training step; a table of what happened.

Usage: ``consumers.py [--stages eager,trained] FOLDER ...``. Each folder is a checkout with ``consumer.py`` beside its
code, which has a function ``networks() -> dict[str, tuple[Module, list[tuple]]]``: networks, and the arguments of some
calls of each (scenes of several sizes). The networks import ``spconv`` or ``flex_gemm`` as they always do. Where PyPI's
``spconv`` is installed, a process of its own runs the same networks on it, and ``peer`` compares results and gradients.
Exit status 1 if a network failed. ``nox -s consumers -- FOLDER ...`` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Calls = list[tuple[Any, ...]]
Networks = dict[str, tuple[torch.nn.Module, Calls]]


def tensors(value: Any) -> list[torch.Tensor]:
    """Those of a result: of sparse tensors their features, of containers all."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "features"):
        return [value.features]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in items for t in tensors(item)]


def networks_of(folder: str) -> Networks:
    """Those of a checkout, with the same weights and scenes in each process."""
    sys.path.insert(0, folder)
    torch.manual_seed(0)
    # A module that can be found by its name: Dynamo imports it for the globals of a function that it traces into.
    name = re.sub(r"\W", "_", f"consumer of {Path(folder).resolve()}")
    spec = spec_from_file_location(name, Path(folder) / "consumer.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Networks = module.networks()
    sys.path.remove(folder)
    return made


def compiled(net: torch.nn.Module, calls: Calls, **options: Any) -> str:
    from shiplap import torch_private

    torch_private.reset_compiler()
    run = torch.compile(net, **options)
    with torch.no_grad():
        for arguments in calls:
            torch.manual_seed(0)
            got = tensors(run(*arguments))
            torch.manual_seed(0)
            torch.testing.assert_close(got, tensors(net(*arguments)), rtol=1e-3, atol=1e-3)
    counts = torch_private.compile_counts()
    return f"{counts.graphs} graphs, {counts.graph_breaks} breaks, {counts.recompiles} recompiles"


def eager(net: torch.nn.Module, calls: Calls) -> str:
    with torch.no_grad():
        return f"{sum(t.numel() for arguments in calls for t in tensors(net(*arguments)))} values"


def step(net: torch.nn.Module, calls: Calls) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Results and gradients of one training step from a copy of the buffers."""
    before = {name: b.clone() for name, b in net.named_buffers()}
    net.train()
    torch.manual_seed(0)
    got = tensors(net(*calls[0]))
    sum(t.square().mean() for t in got if t.is_floating_point()).backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    net.eval()
    for name, buffer in net.named_buffers():
        buffer.copy_(before[name])
    return [t.detach() for t in got], gradients


def trained(net: torch.nn.Module, calls: Calls) -> str:
    wanted = sum(p.requires_grad for p in net.parameters())
    return f"{len(step(net, calls)[1])} of {wanted} gradients"


STAGES: dict[str, Callable[[torch.nn.Module, Calls], str]] = {
    "eager": eager,
    "one graph": lambda net, calls: compiled(net, calls, fullgraph=True, backend="eager"),
    "plain": lambda net, calls: compiled(net, calls),
    "trained": trained,
}


# --- the peer ---------------------------------------------------------------------------------------------------------


def run_as_peer(folder: str, out: str) -> None:
    """In a process of its own: the networks on the installed spconv, and what they gave."""
    if not torch.cuda.is_available():  # spconv's CPU kernels ask for a stream before each backward
        torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]
    given: dict[str, Any] = {}
    for name, (net, calls) in networks_of(folder).items():
        state = {key: value.clone() for key, value in net.state_dict().items()}
        try:
            results, gradients = step(net, calls)
            given[name] = {"state": state, "results": results, "gradients": gradients}
        except Exception as e:  # what the peer cannot do is no fault of ours
            given[name] = {"why": f"{type(e).__name__}: {str(e)[:120]}"}
        torch.save(given, out)


def of_peer(folder: str) -> dict[str, Any]:
    """What the networks of a checkout give on PyPI's spconv; nothing where it is not installed, or ends the process."""
    if find_spec("spconv") is None:
        return {}
    with tempfile.TemporaryDirectory() as home:
        out = str(Path(home) / "peer.pt")
        # With more threads than one its CPU kernels give other results in each run.
        subprocess.run([sys.executable, __file__, "--peer", out, folder], env={**os.environ, "OMP_NUM_THREADS": "1"})
        given: dict[str, Any] = torch.load(out, weights_only=True) if Path(out).exists() else {}
    return given


def against(net: torch.nn.Module, calls: Calls, peer: dict[str, Any]) -> str:
    """How far results and gradients are from the peer's, as relative norms. Rows may come in another order."""
    if "why" in peer:
        return f"the peer fails: {peer['why']}"
    net.load_state_dict(peer["state"])
    results, gradients = step(net, calls)
    if gradients.keys() != peer["gradients"].keys():
        return f"gradients of {len(gradients)} parameters, the peer's of {len(peer['gradients'])}"
    forward = distance([t.sort(0).values for t in results], [t.sort(0).values for t in peer["results"]])
    backward = distance([*gradients.values()], [peer["gradients"][name] for name in gradients])
    return f"results {forward:.1e}, gradients {backward:.1e}"


def distance(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    squares = [
        ((g.double() - w.double()).square().sum(), w.double().square().sum()) for g, w in zip(got, wanted, strict=True)
    ]
    return float((sum(d for d, _ in squares) / sum(w for _, w in squares)) ** 0.5)


# --- the table --------------------------------------------------------------------------------------------------------


def outcome(run: Callable[[], str]) -> tuple[str, bool]:
    """What happened, and whether it went wrong."""
    try:
        return run(), False
    except Exception as e:  # whatever a network of others raises is an outcome
        return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}", True


def table(folder: str, stages: list[str]) -> int:
    """Print the rows of one checkout: how many went wrong."""
    from shiplap_sparse3d.drop_in import drop_in

    peer, failed = of_peer(folder) if "peer" in stages else {}, 0
    with drop_in():
        for name, (net, calls) in networks_of(folder).items():
            net.eval()
            runs: dict[str, Callable[[], str]] = {
                stage: lambda run=run, net=net, calls=calls: run(net, calls)  # type: ignore[misc]
                for stage, run in STAGES.items()
                if stage in stages
            }
            if name in peer:
                runs["peer"] = lambda net=net, calls=calls, name=name: against(net, calls, peer[name])  # type: ignore[misc]
            for stage, run in runs.items():
                began = time.perf_counter()
                message, wrong = outcome(run)
                failed += wrong
                seconds = time.perf_counter() - began
                print(f"{Path(folder).name:16} {name:24} {stage:10} {seconds:7.1f} s  {message}", flush=True)
    return failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--stages", default=",".join([*STAGES, "peer"]), help="some of: %(default)s")
    parser.add_argument("--peer", metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.peer:
        with contextlib.redirect_stdout(sys.stderr):
            run_as_peer(given.folders[0], given.peer)
        return 0
    return 1 if sum(table(folder, given.stages.split(",")) for folder in given.folders) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
