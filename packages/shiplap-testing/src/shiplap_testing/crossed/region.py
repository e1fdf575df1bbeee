"""What torch can do in a region that it compiles once."""

from __future__ import annotations

import torch
from torch import Tensor


def region_may_write() -> bool:
    """Whether torch compiles a region that calls an op of its own library, which writes to an argument."""
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
    x.add_(1)


def _nested(calls: Calls, fn: Function) -> str:
    torch.compiler.reset()
    region = torch.compiler.nested_compile_region(function_of(fn))

    def called(*args: Any, **kwargs: Any) -> Any:
        result = region(*args, **kwargs)
        return result if calls.case.mutates else (result, region(*args, **kwargs))[1]

    return calls.compare(torch.compile(called, backend="aot_eager", fullgraph=True))
