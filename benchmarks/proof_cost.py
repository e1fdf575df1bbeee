"""What the proofs of the shipped rewrites cost a process: seconds of CPU time, with an empty cache and with its own.

    python benchmarks/proof_cost.py [--json]

Each row is one process. Torch's compiler is loaded before the clock starts, as by the trace of any function up to the
place where rewrites run: every process that compiles loads it.
A process proves only the rewrites whose calls a graph has; here all of them are proven.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

__all__ = ["measured"]


def prove_all() -> dict[str, Any]:
    """Prove each shipped rewrite in this process: its seconds of CPU time, and the findings that are not fine."""
    import torch

    from shiplap.rewrite.prove import prove_rewrite
    from shiplap.rewrite.shipped import everything
    from shiplap.torch_private.inductor_passes import capture_graph

    for dynamic in (False, True):
        capture_graph(lambda x: x.sin() * 2, [torch.ones(3, 5)], "pre-grad", dynamic=dynamic)
    seconds, faults = {}, []
    for rewrite in everything:
        start = time.process_time()
        findings = prove_rewrite(rewrite)
        seconds[rewrite.name] = time.process_time() - start
        faults += [f"{rewrite.name}: {f.evidence}" for f in findings if f.verdict == "fail"]
    return {"seconds": seconds, "faults": faults}


def measured() -> dict[str, dict[str, Any]]:
    """Two processes after each other with one new cache: what :func:`prove_all` says in each, and the proofs kept."""
    with tempfile.TemporaryDirectory() as cache:
        results = {}
        for name in ("cold", "cached"):
            env = {**os.environ, "SHIPLAP_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--one"]
            output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
            results[name] = json.loads(output.splitlines()[-1])
            proofs = os.path.join(cache, "proofs")
            results[name]["kept"] = sorted(f for _, _, files in os.walk(proofs) for f in files if f.endswith(".json"))
    return results


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(prove_all()))
        return
    results = measured()
    if "--json" in sys.argv:
        print(json.dumps(results))
        return
    for name, seen in results.items():
        each = ", ".join(f"{rewrite} {s:.2f}" for rewrite, s in seen["seconds"].items())
        print(f"{name}: {sum(seen['seconds'].values()):.2f} s of CPU time ({each})")


if __name__ == "__main__":
    main()
