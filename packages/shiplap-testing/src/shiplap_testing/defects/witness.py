"""Whether an op is right on one input: how the defects of this folder are shown to be defects."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import shiplap as sl

Arguments = Callable[[], tuple[Any, ...]]
Right = Callable[[sl.Op], bool]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uniform(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that sums are kept in."""
    return x.double() if x.dtype == torch.float64 else x.float()


def close(got: Any, want: Any, rtol: float | None = None) -> bool:
    """Whether two results agree: NaN where NaN is, and to a few roundings elsewhere."""
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(close(g, w, rtol) for g, w in zip(got, want, strict=True))
    if want is None or got is None:
        return want is got
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.is_floating_point():
        return bool(torch.equal(got, want))
    if rtol is None:
        rtol = {torch.float64: 1e-9, torch.float32: 1e-4}.get(want.dtype, 2e-2)
    return torch.allclose(got.double(), want.double(), rtol=rtol, atol=0.1 * rtol, equal_nan=True)


def flat(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, those of lists included."""
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    return [t for several in lists for t in several if isinstance(t, Tensor)]


def _copies(args: Sequence[Any]) -> list[Any]:
    """Arguments of the same values that share nothing with the given ones."""
    return [
        a.clone() if isinstance(a, Tensor) else [*map(_copy, a)] if isinstance(a, (list, tuple)) else a for a in args
    ]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def same(make: Arguments, rtol: float | None = None) -> Right:
    """The op computes what its reference does on ``make()``, and writes to what the reference writes to."""

    def right(op: sl.Op) -> bool:
        args = make()
        ours, theirs = [*args], _copies(args)
        want = op.reference(*theirs)
        try:
            got = op(*ours)
        except Exception:
            return False
        return close(got, want, rtol) and close(flat(ours), flat(theirs), rtol)

    return right


def same_grad(make: Arguments, rtol: float | None = None, wide_reference: bool = False) -> Right:
    """The op's gradients on ``make()`` are those that torch derives from its reference.

    ``wide_reference``: the reference is differentiated in float64.
    """

    def right(op: sl.Op) -> bool:
        want = _gradients(op.reference, [_wider(a) if wide_reference else a for a in _copies(make())])
        try:
            got = _gradients(op, make())
        except Exception:
            return False
        return close(
            got, [w if w is None or g is None else w.to(g.dtype) for g, w in zip(got, want, strict=True)], rtol
        )

    return right


def _wider(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _gradients(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor | None]:
    tensors = [t for t in flat(args) if t.is_floating_point()]
    leaves = [t.requires_grad_() for t in tensors]
    outs = fn(*args)
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.is_floating_point()]
    cotangents = [_cotangent(o) for o in outs]
    return list(torch.autograd.grad(outs, leaves, cotangents, allow_unused=True))


def _cotangent(out: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, max(out.numel(), 1))[: out.numel()].reshape(out.shape).to(out.dtype)


_STATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients on": (torch.is_grad_enabled, torch.set_grad_enabled),
    "random numbers": (torch.get_rng_state, torch.set_rng_state),
    "Python's random numbers": (random.getstate, random.setstate),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "denormals": (lambda: bool(torch.tensor([1e-40]).mul(1.0) == 0), torch.set_flush_denormal),
}


@contextmanager
def restored() -> Iterator[dict[str, Any]]:
    """Yield the state of the process, and restore it afterwards."""
    before = {name: read() for name, (read, _) in _STATE.items()}
    try:
        yield before
    finally:
        for name, (_, write) in _STATE.items():
            write(before[name])


def keeps_state(make: Arguments) -> Right:
    """A call leaves the settings and random numbers of the process as they were."""

    def right(op: sl.Op) -> bool:
        args = make()
        with restored() as before:
            op(*args)
            after = {name: read() for name, (read, _) in _STATE.items()}
        return all(_equal(before[name], after[name]) for name in _STATE)

    return right


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def in_thread(fn: Callable[[], Any]) -> Any:
    """Return the result of ``fn``, run in a thread of its own; its exceptions are raised here."""
    results: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            results.append(fn())
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]
