"""Two versions of a kernel from Hugging Face's hub, side by side, declared and audited.

Run: python examples/hub_kernels.py
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl

HUB = Path(__file__).parent / "hub"


def load(folder: Path) -> ModuleType:
    """Load a folder as the package ``kernels`` does, or without it the same module."""
    try:
        from kernels import get_local_kernel
    except ImportError:
        path = folder / "build" / "torch-cpu" / "__init__.py"
        name = folder.name.replace("-", "_")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    kernel: ModuleType = get_local_kernel(folder)
    return kernel


# --8<-- [start:declare]
def declare(version: int) -> sl.Op:
    kernel = load(HUB / f"squash-v{version}")
    source = kernel._ops.add_op_namespace_prefix("squash")

    @sl.adopt(source, into=f"squash_v{version}::squash")
    def squash(x: Float32[Tensor, "n"], scale: float = 1.0) -> Float32[Tensor, "n"]:
        """Squash x into the interval from -scale to scale."""
        return torch.tanh(x / scale) * scale

    return squash


first, second = declare(1), declare(2)
# --8<-- [end:declare]


def main() -> None:
    x = torch.randn(9)
    for op in (first, second):
        # The published op has no fake implementation: the declaration gives it one.
        compiled = torch.compile(
            lambda x, op=op: op(x, 2.0) + 1, fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(x), op.reference(x, 2.0) + 1)
        print(op.adoption)
        report = sl.audit(op, checks=["numerics", "special", "fake"], seed=0)
        print(f"{op.spec.name}: {report.verdict}")
        for finding in report:
            if finding.verdict == "fail":
                print(f"  {finding.check}: {finding.evidence}")


if __name__ == "__main__":
    main()
