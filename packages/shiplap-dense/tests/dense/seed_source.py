"""The seed's example as Inductor writes it for an H100 or H200: prints the one kernel of ``relu(mm(a, b))``.

    python packages/shiplap-dense/tests/dense/seed_source.py > docs/assets/relu_mm.txt

Nothing is run: at these sizes Triton's interpreter would take minutes. The same template is run, small, in
``triton_cases.py``; here the candidate is taken unproven, as the trials of a measurement take it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton

from shiplap.declare.config import Config
from shiplap.inductor import Explanation, explain
from shiplap.inductor.select_candidate import force_candidate
from shiplap_dense import cuda, ops
from shiplap_testing import interpreted


def compiled() -> Explanation:
    """``relu(a @ b)`` with a ``[128, 9216]`` and b ``[9216, 4096]`` in float16, with the template's default config."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    interpreted._Kernel.run = nothing  # type: ignore[method-assign]
    ops.mm.templates["cpu"] = []
    cuda.attach_templates("cpu")
    template = next(t for t in ops.mm.templates["cpu"] if t.name == "mm")
    config = Config.of(template.candidates({"m": 128, "n": 4096, "k": 9216})[0])
    a, b = torch.empty(128, 9216, dtype=torch.float16), torch.empty(9216, 4096, dtype=torch.float16)
    with force_candidate("dense::mm", f"mm({config})"):
        return explain(lambda a, b: torch.relu(ops.mm(a, b)), a, b, fullgraph=True)


def kernel_text(source: str) -> str:
    """The function, without the imports and the launch metadata around it."""
    _, _, rest = source.partition("@triton.jit\n")
    body, _, _ = rest.partition("''', device_str=")
    lines = [line.rstrip() for line in body.rstrip().splitlines()]
    return "@triton.jit\n" + "\n".join(a for a, b in zip(lines, ["x", *lines], strict=False) if a or b) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        import os

        os.environ["SHIPLAP_CACHE_DIR"] = home
        outputs = compiled()
    (kernel,) = outputs.kernels
    print(
        f"# {kernel.name}: {', '.join(kernel.operators)} in one kernel; torch {torch.__version__.partition('+')[0]}, "
        f"Triton {triton.__version__}"
    )
    print(kernel_text(outputs.source[0]), end="")


if __name__ == "__main__":
    main()
