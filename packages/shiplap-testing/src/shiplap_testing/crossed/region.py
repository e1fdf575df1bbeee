"""What torch can do in a region that it compiles once."""

from __future__ import annotations

import torch
from torch import Tensor


def region_may_write() -> bool:
    """Whether the installed torch compiles a nested region that calls an op of torch's own library which writes to an
    argument.
    """
    if not hasattr(torch.ops.crossed_plain, "write"):
        torch.library.define("crossed_plain::write", "(Tensor(a!) x) -> ()")
        torch.library.impl("crossed_plain::write", "CompositeExplicitAutograd", _write)
        torch.library.register_fake("crossed_plain::write", _write)
    torch.compiler.reset()
    region = torch.compiler.nested_compile_region(lambda x: torch.ops.crossed_plain.write(x))
    try:
        torch.compile(lambda x: region(x), backend="aot_eager", fullgraph=True)(torch.zeros(1))
    except Exception:
        return False
    return True


def _write(x: Tensor) -> None:
    """Add 1 to ``x`` in place: the implementation and the fake of the op."""
    x.add_(1)
