"""Try installed distributions as a user meets them first: ``try_installed.py DISTRIBUTION ...``.

Each one is imported, an op is declared and called, and every C kernel of a family has to be served by a native binding
of its package, so that no compiler is needed. Nothing but what is installed is used: run it with ``python -I``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@sl.op("tried::scaled_add")
def scaled_add(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"], scale: float = 1.0) -> Float[Tensor, "n c"]:
    return x + scale * y


@scaled_add.kernel("cpu")
def _(x: Tensor, y: Tensor, scale: float, *, out: Tensor) -> None:
    torch.add(x, y, alpha=scale, out=out)


def try_op() -> None:
    """Call an op rightly and wrongly."""
    x = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(scaled_add(x, x, 2.0), 3 * x)
    refused = ""
    try:
        scaled_add(x, torch.zeros(2, 4))
    except sl.ShiplapError as e:
        refused = e.id
    assert refused == "SL202", f"sizes that disagree: {refused or 'accepted'}"


def unbound() -> list[str]:
    """The ops whose binding would have to be compiled here, and the families without any native binding.

    The cache is empty, so a native binding is one of the package.
    """
    command = [sys.executable, "-I", "-m", "shiplap.cli", "env", "--json"]
    with tempfile.TemporaryDirectory(prefix="shiplap-try-") as cache:
        env = {**os.environ, "SHIPLAP_CACHE_DIR": cache}
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)
    bindings = found["bindings"]
    missing = [f"{b['op']}: {b['why']}" for b in bindings if b["why"].startswith("built ")]
    bound = {b["op"].partition("::")[0] for b in bindings if b["binding"] == "native"}
    families = {library["family"].removeprefix("shiplap_") for library in found["libraries"]}
    return missing + [f"{family}: no op has a native binding" for family in sorted(families - bound)]


def main(names: list[str]) -> int:
    """Try every distribution; 1 where an op has no native binding."""
    for name in names:
        module = importlib.import_module(name.replace("-", "_"))
        print(f"{name} {importlib.metadata.version(name)}: {module.__file__}")
    try_op()
    missing = unbound()
    print(*missing, sep="\n", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
