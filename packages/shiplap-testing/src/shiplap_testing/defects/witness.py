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
    """Return a tensor of the shape ``shape`` and the dtype ``dtype`` with random numbers from the standard normal
    distribution. Calls with equal ``seed`` and shape return equal numbers.
    """
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uniform(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of the shape ``shape`` and the dtype ``dtype`` with random numbers distributed uniformly from 0
    to 1. Calls with equal ``seed`` and shape return equal numbers.
    """
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of the shape ``shape`` and the dtype ``dtype`` with random integers from ``low`` to ``high - 1``.
    Calls with equal arguments return equal numbers.
    """
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Tensor) -> Tensor:
    """Return ``x`` converted to the dtype for sums, which is float64 for float64 and float32 for all other dtypes."""
    return x.double() if x.dtype == torch.float64 else x.float()


def close(got: Any, want: Any, rtol: float | None = None) -> bool:
    """Return whether ``got`` and ``want`` agree in shape, dtype and values. Tuples and lists are compared element by
    element, and None agrees only with None.

    Integers and booleans must be equal. Floats must agree to the relative tolerance ``rtol``. If it is None, it is 1e-9
    for float64, 1e-4 for float32 and 2e-2 for narrower dtypes. NaN must be at the same positions.
    """
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(close(g, w, rtol) for g, w in zip(got, want, strict=True))
    if want is None or got is None:
        return want is got
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.is_floating_point():
        return bool(torch.equal(got, want))
    if rtol is None:
        # Kernels may add in another order, and narrow dtypes round each result.
        rtol = {torch.float64: 1e-9, torch.float32: 1e-4}.get(want.dtype, 2e-2)
    return torch.allclose(got.double(), want.double(), rtol=rtol, atol=0.1 * rtol, equal_nan=True)


def flat(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in ``args`` as a list, in order. The elements of a list or tuple in ``args`` are searched as
    well.
    """
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    return [t for several in lists for t in several if isinstance(t, Tensor)]


def _copies(args: Sequence[Any]) -> list[Any]:
    """Return a list of the arguments ``args``, in which each tensor is replaced by a copy. Lists and tuples become
    lists, with copies of the tensors in them.
    """
    return [
        a.clone() if isinstance(a, Tensor) else [*map(_copy, a)] if isinstance(a, (list, tuple)) else a for a in args
    ]


def _copy(value: Any) -> Any:
    """Return a copy of ``value`` if it is a tensor, and ``value`` itself otherwise."""
    return value.clone() if isinstance(value, Tensor) else value


def same(make: Arguments, rtol: float | None = None) -> Right:
    """Return a function that takes an op and returns whether its results for the arguments ``make()`` agree with those
    of its reference.

    Floats must agree to the relative tolerance ``rtol``, or if it is None to a tolerance of their dtype. The arguments
    must also have the same contents after both calls. If the op raises an exception, the returned function returns
    False.
    """

    def right(op: sl.Op) -> bool:
        """Return whether ``op`` agrees with its reference on ``make()`` (argument of ``same``) in its results and in
        the contents of the arguments afterwards.
        """
        args = make()
        # The reference gets copies, since an op may write to its arguments.
        ours, theirs = [*args], _copies(args)
        want = op.reference(*theirs)
        try:
            got = op(*ours)
        except Exception:
            return False
        return close(got, want, rtol) and close(flat(ours), flat(theirs), rtol)

    return right


def same_grad(make: Arguments, rtol: float | None = None, wide_reference: bool = False) -> Right:
    """Return a function that takes an op and returns whether its gradients for the arguments ``make()`` are right.

    They are compared with those that torch derives from the op's reference. The relative tolerance is ``rtol``, or if
    it is None a tolerance of the dtype. If ``wide_reference`` is true, the reference is differentiated in float64, and
    otherwise in the dtypes of the arguments. If the op raises an exception, the returned function returns False.
    """

    def right(op: sl.Op) -> bool:
        """Return whether ``op`` and its reference have equal gradients for ``make()`` (argument of ``same_grad``)."""
        want = _gradients(op.reference, [_wider(a) if wide_reference else a for a in _copies(make())])
        try:
            # Fresh arguments: those of the reference have gradients by now.
            got = _gradients(op, make())
        except Exception:
            return False
        return close(
            got, [w if w is None or g is None else w.to(g.dtype) for g, w in zip(got, want, strict=True)], rtol
        )

    return right


def _wider(value: Any) -> Any:
    """Return ``value`` in float64 if it is a tensor of floats, and unchanged otherwise."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _gradients(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of the floating-point results of ``fn(*args)`` for the floating-point tensors among
    ``args``, as a list. An element is None if no result depends on its tensor. The incoming gradients come from
    ``_cotangent``. The tensors are set to require gradients.
    """
    tensors = [t for t in flat(args) if t.is_floating_point()]
    leaves = [t.requires_grad_() for t in tensors]
    outs = fn(*args)
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.is_floating_point()]
    cotangents = [_cotangent(o) for o in outs]
    return list(torch.autograd.grad(outs, leaves, cotangents, allow_unused=True))


def _cotangent(out: Tensor) -> Tensor:
    """Return an incoming gradient for ``out``, a tensor that a call returned. Its elements rise evenly from 0.5 to 1.5,
    and it has the shape and dtype of ``out``.
    """
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
    """Yield a mapping from the name of each global setting of torch and Python to its present value, and restore all of
    them when the context ends. They are the default dtype, the number of threads, the states of the random number
    generators and others.
    """
    before = {name: read() for name, (read, _) in _STATE.items()}
    try:
        yield before
    finally:
        for name, (_, write) in _STATE.items():
            write(before[name])


def keeps_state(make: Arguments) -> Right:
    """Return a function that takes an op and returns whether a call of it leaves the settings of ``_STATE`` unchanged.

    These are global settings of torch and Python, and the states of their random number generators. The arguments of
    the call are ``make()``.
    """

    def right(op: sl.Op) -> bool:
        """Return whether a call of ``op`` on ``make()`` (argument of ``keeps_state``) leaves the settings of ``_STATE``
        unchanged. They are restored in any case.
        """
        args = make()
        with restored() as before:
            op(*args)
            after = {name: read() for name, (read, _) in _STATE.items()}
        return all(_equal(before[name], after[name]) for name in _STATE)

    return right


def _equal(a: Any, b: Any) -> bool:
    """Return whether ``a`` and ``b``, two values of a setting, are equal. Tensors are compared by their contents."""
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def in_thread(fn: Callable[[], Any]) -> Any:
    """Run ``fn`` in a new thread, wait for it, and return its result. If ``fn`` raises an exception, raise it in the
    calling thread.
    """
    results: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        """Append the result of ``fn`` (argument of ``in_thread``) to the list ``results``, or its exception to the list
        ``failed``. ``in_thread`` reads both afterwards.
        """
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
