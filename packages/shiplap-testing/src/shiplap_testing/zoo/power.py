"""Defects that small plain samples do not show, each with its sound twin: sizes, values, scalars, dtypes, kernels.

A defect is a kernel; the twin is the same op with the kernel as it should be. ``Pair.flagged_by`` names a check that
has to fail on the defect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int8, Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.dispatch import Op

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Pair:
    """A pair of an op with a defect, ``bad``, and an op without it, ``twin``, which are otherwise equal. ``flagged_by``
    is the name of the audit's check that must fail on ``bad`` and not on ``twin``.
    """

    name: str
    bad: Op
    twin: Op
    flagged_by: str

    def __str__(self) -> str:
        """Return the name of the pair."""
        return self.name


PAIRS: list[Pair] = []


def pair(name: str, reference: Kernel, bad: Kernel, twin: Kernel, check: str, **declaration: Any) -> None:
    """Declare an op with the defective kernel ``bad``, and an op with the sound kernel ``twin``. Add them as a
    :class:`Pair` named ``name`` to ``PAIRS``. ``reference`` is the reference of both ops.

    A function marked by :func:`dress` gets the op in place of arguments and binds kernels itself. The check ``check``
    of the audit must fail on the first op and not on the second.
    """
    ops = []
    # The two are alike but for the kernel, so that only the defect can make a check fail.
    for kind, kernel in (("bad", bad), ("twin", twin)):
        op = sl.op(f"zoo_power_{kind}::{name.replace(' ', '_').replace('-', '_')}", **declaration)(reference)
        if getattr(kernel, "dresses", False):
            kernel(op)
        else:
            op.kernel("cpu", kernel)
        ops.append(op)
    PAIRS.append(Pair(name, ops[0], ops[1], check))


def dress(fn: Kernel) -> Kernel:
    """Mark ``fn`` as a function that takes an op and binds kernels to it, and return ``fn``. :func:`pair` takes
    functions without this mark for kernels.
    """
    fn.dresses = True  # type: ignore[attr-defined]
    return fn


def double(x: V) -> V:
    """Return ``2 * x``, as the reference of ops in ``PAIRS``. Defective and sound kernels are compared with it."""
    return x * 2


def total(x: M) -> V:
    """Return the sum of each row of ``x``, as the reference of ops in ``PAIRS``. Their defective and sound kernels are
    compared with it.
    """
    return x.sum(1)


def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Return the matrix product ``a @ b``, as the reference of ops in ``PAIRS``. Their defective and sound kernels are
    compared with it.
    """
    return a @ b


def softmax(x: M) -> M:
    """Return the softmax of each row of ``x``, as the reference of ops in ``PAIRS``. Their defective and sound kernels
    are compared with it.
    """
    return torch.softmax(x, -1)


def relu(x: M) -> M:
    """Return ``x`` with negative numbers replaced by zero, as the reference of ops in ``PAIRS``. Their defective and
    sound kernels are compared with it.
    """
    return torch.relu(x)


def right(reference: Kernel) -> Kernel:
    """Return a sound kernel with the parameters of ``reference``. The kernel returns a copy of the result of
    ``reference``, which may be an argument or a view of one.
    """

    @functools.wraps(reference)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Return a copy of the result of ``reference``, the argument of the enclosing function, for these arguments."""
        # The reference may return a view or an argument, which a kernel must not.
        return reference(*args, **kwargs).clone()

    return kernel


def of_any_strides(kernel: Kernel) -> Kernel:
    """Return a function that takes an op and binds ``kernel``, which gets tensors with any strides. Without it, the
    tensors of a kernel are contiguous.
    """

    @dress
    def attach(op: Op) -> None:
        """Bind ``kernel``, the argument of the enclosing function, to ``op`` for tensors with any strides."""
        op.kernel("cpu", kernel, strided=True)

    return attach


# Sizes


def first_256(x):
    """Return ``2 * x``. This function has a defect on purpose. Elements from index 256 on are zero."""
    out = x * 2
    out[256:] = 0
    return out


def blocks_of_128(x):
    """Return the sum of each row of ``x``. This function has a defect on purpose. It leaves out the columns after the
    last whole block of 128, if there is a whole block.
    """
    out = torch.zeros(len(x), dtype=x.dtype)
    for start in range(0, max(x.shape[1] // 128 * 128, min(x.shape[1], 128)), 128):
        out += x[:, start : start + 128].sum(1)
    return out


def noisy_above_512(x):
    """Return ``2 * x``. This function has a defect on purpose. If there are more than 512 elements, random numbers up
    to 0.001 are added.
    """
    return x * 2 + (torch.rand_like(x) * 1e-3 if len(x) > 512 else 0)


def forgets_the_rest(x):
    """Return ``2 * x``. This function has a defect on purpose. Above 4000 elements, each of torch's threads gets an
    equal share, and the elements that remain are not doubled.
    """
    step = len(x) // torch.get_num_threads()
    out = x.clone()
    # Short inputs are right: only long ones are divided among threads.
    whole = step * torch.get_num_threads() if len(x) > 4000 else len(x)
    out[:whole] *= 2
    return out


pair("columns past 256", double, first_256, right(double), "sizes")
pair("tail of a split sum", total, blocks_of_128, right(total), "sizes")
pair("k cut at 64", product, lambda a, b: a[:, :64] @ b[:64], right(product), "sizes")
pair("noise above 512", double, noisy_above_512, right(double), "sizes")
pair("remainder lost among threads", double, forgets_the_rest, right(double), "threads")
pair("fails at exactly 1000", double, lambda x: x * (3 if len(x) == 1000 else 2), right(double), "sizes")
pair("wrong beyond the grain", double, lambda x: x * (3 if len(x) > 65536 else 2), right(double), "sizes")


@dress
def hidden_kernel(op):
    """Register two kernels with ``op``, whose reference is ``double``. The second is for 3000 elements and more. This
    function has a defect on purpose. The second kernel returns ``3 * x``.
    """
    op.kernel("cpu", lambda x: x * 2, name="plain")
    op.kernel("cpu", lambda x: x * 3, name="long", supports=lambda x: len(x) >= 3000 or "short")


@dress
def hidden_twin(op):
    """Register two sound kernels with ``op`` (reference ``double``). The second is for 3000 elements and more."""
    op.kernel("cpu", lambda x: x * 2, name="plain")
    op.kernel("cpu", lambda x: x * 2, name="long", supports=lambda x: len(x) >= 3000 or "short")


@dress
def shadowed(op):
    """Register two kernels with ``op``, whose reference is ``double``. This function has a defect on purpose. The first
    kernel returns ``3 * x``. No call shows it, since the second kernel is called instead.
    """
    op.kernel("cpu", lambda x: x * 3, name="old")
    op.kernel("cpu", lambda x: x * 2, name="new")


@dress
def shadowed_twin(op):
    """Register two sound kernels with ``op``, whose reference is ``double``."""
    op.kernel("cpu", lambda x: x * 2, name="old")
    op.kernel("cpu", lambda x: x * 2, name="new")


def configured(x, *, BLOCK=8):
    """Return ``2 * x``, computed in blocks of ``BLOCK`` elements. This function has a defect on purpose. If ``BLOCK``
    is 32 or more, the elements after the last whole block are not doubled.
    """
    return x * 2 if BLOCK < 32 else torch.cat([x[: len(x) // BLOCK * BLOCK] * 2, x[len(x) // BLOCK * BLOCK :]])


@dress
def bad_config(op):
    """Register a kernel with two configs with ``op``, whose reference is ``double``. A config is a value of the
    kernel's constant ``BLOCK``, here 8 or 32. This function has a defect on purpose. The kernel is wrong for 32.
    """
    op.kernel("cpu", configured, configs=[{"BLOCK": 8}, {"BLOCK": 32}])


@dress
def good_config(op):
    """Register a kernel with two configs with ``op``, whose reference is ``double``. A config is a value of the
    kernel's constant ``BLOCK``, here 8 or 16. The kernel is right for both.
    """
    op.kernel("cpu", configured, configs=[{"BLOCK": 8}, {"BLOCK": 16}])


pair("kernel behind supports", double, hidden_kernel, hidden_twin, "sizes")
pair("kernel that is not dispatched", double, shadowed, shadowed_twin, "kernels")
pair("config that is not chosen", double, bad_config, good_config, "kernels")

# Values


def naive_softmax(x):
    """Return the softmax of each row of ``x``. This function has a defect on purpose. No maximum is subtracted, so that
    the exponential of large numbers overflows.
    """
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def variance(x: M) -> V:
    """Return the variance of each row of ``x``, without Bessel's correction, as the reference of ops in ``PAIRS``.
    Their defective and sound kernels are compared with it.
    """
    return x.var(1, correction=0)


def in_half(x):
    """Return ``2 * x``. This function has a defect on purpose. It rounds ``x`` to float16 first."""
    return (x.half() * 2).to(x.dtype)


def bf16_sum(x):
    """Return the sum of each row of ``x``. This function has a defect on purpose. The sum is accumulated in the dtype
    of ``x``, which is too narrow if that has 16 bits.
    """
    acc = torch.zeros(len(x), dtype=x.dtype)
    for i in range(x.shape[1]):
        acc = acc + x[:, i]
    return acc


pair("NaN becomes 0", relu, lambda x: torch.where(x > 0, x, 0.0).to(x.dtype), right(relu), "special")
pair("softmax overflows", softmax, naive_softmax, right(softmax), "special")
pair("variance of squares", variance, lambda x: (x * x).mean(1) - x.mean(1) ** 2, right(variance), "special")
pair(
    "subnormals flushed", double, lambda x: torch.where(x.abs() < 2e-38, 0, x * 2).to(x.dtype), right(double), "special"
)
pair("infinity clamped", double, lambda x: (x * 2).clamp(-3e38, 3e38).to(x.dtype), right(double), "special")


def sign_of(x: V) -> V:
    """Return 1 or -1 with the sign of each element of ``x``, where negative zero gives -1. It is the reference of ops
    in ``PAIRS``, whose defective and sound kernels are compared with it.
    """
    return torch.copysign(torch.ones_like(x), x)


pair("negative zero", sign_of, lambda x: torch.where(x < 0, -1.0, 1.0).to(x.dtype), right(sign_of), "special")


def wide_sum(x: Int8[Tensor, "n c"]) -> Int64[Tensor, "n"]:
    """Return the sum of each row of int8 numbers in int64, as the reference of ops in ``PAIRS``. Their defective and
    sound kernels are compared with it.
    """
    return x.sum(1)


def halve(x: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
    """Return ``x / 2`` rounded down, as the reference of ops in ``PAIRS``. Their defective and sound kernels are
    compared with it.
    """
    return x // 2


def gather(x: M, index: Int64[Tensor, "k"]) -> Float[Tensor, "k c"]:
    """Return the rows of ``x`` at ``index``."""
    return x.index_select(0, index)


def count(index: Int64[Tensor, "k"], x: V) -> V:
    """Return ``x`` with 1 added at each of ``index``, as often as an index occurs. It is the reference of ops in
    ``PAIRS``, whose defective and sound kernels are compared with it.
    """
    return x.index_add(0, index, torch.ones(len(index), dtype=x.dtype))


def scatter_once(index, x):
    """Return ``x`` with 1 added at each of ``index``. This function has a defect on purpose. An index that occurs
    repeatedly counts once.
    """
    out = x.clone()
    out[index] = out[index] + 1
    return out


pair("int8 sum wraps", wide_sum, lambda x: x.sum(1, dtype=torch.int8).long(), right(wide_sum), "special")
pair("rounds toward zero", halve, lambda x: torch.div(x, 2, rounding_mode="trunc"), right(halve), "special")
pair("repeated indices", count, scatter_once, right(count), "numerics")
pair("sum in 16 bits", total, bf16_sum, right(total), "sizes")

# Scalars


def leaky(x: V, slope: float = 0.1) -> V:
    """Return ``x`` where it is positive, and ``slope * x`` elsewhere. It is the reference of ops in ``PAIRS``, whose
    defective and sound kernels are compared with it.
    """
    return torch.where(x > 0, x, x * slope)


def pool(x: V, mode: str = "sum") -> Float[Tensor, "1"]:
    """Return the sum, the mean or the maximum of ``x`` if ``mode`` is ``sum``, ``mean`` or ``max``, as a tensor of one
    element. It is the reference of ops in ``PAIRS``, whose defective and sound kernels are compared with it.
    """
    return {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[mode](x, 0, keepdim=True)


def shift(x: V, by: int = 1) -> V:
    """Return ``x`` rolled by ``by`` positions, as the reference of ops in ``PAIRS``. Their defective and sound kernels
    are compared with it.
    """
    return torch.roll(x, by, 0) if len(x) else x.clone()


def pool_without_max(x, mode):
    """Return the sum or the mean of ``x``, as ``mode`` says, as a tensor of one element. This function has a defect on
    purpose. It returns the sum if ``mode`` is ``max``.
    """
    return x.mean(0, keepdim=True) if mode == "mean" else x.sum(0, keepdim=True)


def shift_wrong(x, by):
    """Return ``x`` rolled by ``by`` positions. This function has a defect on purpose. It ignores the sign of ``by``."""
    return torch.roll(x, abs(by), 0) if len(x) else x.clone()


def threshold(x: V, at: float = 0.5) -> V:
    """Return ``x``, or a quarter of it if ``at`` is at least 20. It is the reference of ops in ``PAIRS``, whose
    defective and sound kernels are compared with it.
    """
    return x * (0.25 if at >= 20.0 else 1.0)


pair("negative slope", leaky, lambda x, slope: torch.maximum(x, x * slope), right(leaky), "special")
pair("a mode left out", pool, pool_without_max, right(pool), "special", requires=("n >= 1",))
pair("negative shift", shift, shift_wrong, right(shift), "special")
pair("scalar beyond a literal", threshold, lambda x, at: x * 1.0, right(threshold), "special")


def concat(xs: list[V]) -> V:
    """Return the sum of the tensors ``xs``, as the reference of ops in ``PAIRS``. Their defective and sound kernels are
    compared with it.
    """
    return torch.stack(xs).sum(0)


pair("list of three", concat, lambda xs: xs[0] + xs[-1] if len(xs) > 1 else xs[0] * 1, right(concat), "special")

# The process


def reseeds(x):
    """Return ``2 * x``. This function has a defect on purpose. It seeds torch's random numbers in each call."""
    torch.manual_seed(0)
    return x * 2


def set_threads(x):
    """Return ``2 * x``. This function has a defect on purpose. It changes the number of torch's threads."""
    # Another number than before, whatever that was.
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    return x * 2


def default_dtype(x):
    """Return ``2 * x``. This function has a defect on purpose. It changes torch's default dtype."""
    # Another dtype than before, whatever that was.
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)
    return x * 2


_KEPT: list[Tensor] = []


def leaks(x):
    """Return ``2 * x``. This function has a defect on purpose. It keeps each result in a list of the module, so that
    memory is never released.
    """
    _KEPT.append(x * 2)
    return x * 2


def writes_for_a_moment(a, b):
    """Return ``a + b``. This function has a defect on purpose. It sets ``a`` to zero during the addition, which changes
    ``b`` if the two share memory.
    """
    kept = a.clone()
    a.zero_()
    out = kept + b
    a.copy_(kept)
    return out


def add(a: M, b: M) -> M:
    """Return ``a + b``, as the reference of ops in ``PAIRS``. Defective and sound kernels are compared with it."""
    return a + b


pair("reseeds", double, reseeds, right(double), "process")
pair("changes the number of threads", double, set_threads, right(double), "process")
pair("changes the default dtype", double, default_dtype, right(double), "process")
pair("leaks", double, leaks, right(double), "process")
pair("writes an input for a moment", add, writes_for_a_moment, right(add), "aliases")
