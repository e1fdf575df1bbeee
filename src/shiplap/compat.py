"""The only module that touches private torch: one function per capability, with the versions it is known to work on.

Verified means run in our own test suite. An unknown torch is not refused: the capability says so in ``shiplap env``,
and its caller falls back to the public path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.library import Library

__all__ = ["CAPABILITIES", "Capability"]

VERIFIED = ("2.11", "2.13", "2.15")


@dataclass(frozen=True)
class Capability:
    """What is used, since which torch, and on which versions it was run."""

    name: str
    uses: str
    verified: tuple[str, ...] = VERIFIED

    @property
    def known(self) -> bool:
        return ".".join(torch.__version__.split(".")[:2]) in self.verified


CAPABILITIES = (
    Capability("autocast rules", "torch._C._ExcludeDispatchKeyGuard, Autocast dispatch keys"),
    Capability("redeclaring an op", "torch.library.Library._destroy"),
    Capability("cache key", "torch.compiler.config.cache_key_tag (public)"),
    Capability("symbolic fakes", "torch._subclasses.fake_tensor.FakeTensorMode"),
    Capability("compile counters", "torch._dynamo.utils.counters, torch._dynamo.utils.compile_times"),
    Capability("dynamic dims", "torch._dynamo.mark_dynamic"),
)


def destroy_library(lib: Library) -> None:
    """Forget every registration of ``lib``, so that its ops can be declared again."""
    lib._destroy()


def register_autocast_rule(lib: Library, opname: str, overload: Any, cast: Callable[..., tuple[Any, ...]]) -> None:
    """Under ``torch.autocast`` call ``overload`` with ``cast(device_type, args)``."""
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        lib.impl(opname, _autocast_kernel(overload, device_type, getattr(torch._C.DispatchKey, key), cast), key)


def _autocast_kernel(
    overload: Any, device_type: str, key: Any, cast: Callable[..., tuple[Any, ...]]
) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*cast(device_type, args), **kwargs)

    return kernel


def salt_compile_caches(old: str, new: str) -> None:
    """Make ``new`` part of every Inductor and AOTAutograd cache key, in place of ``old``; the user's own tag stays."""
    from torch.compiler import config

    tag = config.cache_key_tag
    config.cache_key_tag = tag.replace(old, new) if old and old in tag else tag + new


@contextmanager
def fake_mode(symbolic: bool) -> Iterator[Any]:
    """A FakeTensorMode; with ``symbolic``, sizes of converted tensors become symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv() if symbolic else None, allow_non_fake_inputs=False) as mode:
        yield mode


def fakify(mode: Any, tensor: torch.Tensor, dynamic: bool) -> torch.Tensor:
    """``tensor`` as a fake of ``mode``; ``dynamic`` gives every dim a symbol."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not dynamic:
        return mode.from_tensor(tensor)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
    return mode.from_tensor(tensor, symbolic_context=context)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell Dynamo that ``tensor.shape[dim]`` varies, so that the first other size does not recompile."""
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dim)


def reset_compiler() -> None:
    """Forget compiled code and counters of this process."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


@dataclass(frozen=True)
class CompileCounts:
    """Observed since the last ``reset_compiler``."""

    graphs: int
    graph_breaks: int
    recompiles: int
    break_reasons: tuple[str, ...] = ()


def compile_counts() -> CompileCounts:
    """Graphs, graph breaks and recompiles, from Dynamo's own counters and per-compile metrics."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks = counters["graph_break"]
    attempts = [str(m.compile_id) for m in get_compilation_metrics() if m.compile_id is not None]
    forward = {i for i in attempts if "/" in i}
    first = {i.split("/")[0] for i in forward}
    return CompileCounts(
        graphs=int(counters["stats"].get("unique_graphs", 0)),
        graph_breaks=sum(breaks.values()),
        recompiles=len({i.split("_")[0] for i in forward}) - len(first),
        break_reasons=tuple(breaks),
    )
