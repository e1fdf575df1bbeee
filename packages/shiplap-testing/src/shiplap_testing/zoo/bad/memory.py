"""Broken memory: buffers kept between calls, writes beside the output, strides and offsets that are not looked at."""

import ctypes
import time

import torch
from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, V, adopt, bad, declare
from shiplap_testing.zoo.specimen import register

_cache: dict[object, Tensor] = {}


def _cached(x):
    """Return ``2 * x``. This function has a defect on purpose. The result is a buffer that is kept for each shape and
    dtype, and the next call overwrites it.
    """
    key = (x.shape, x.dtype)
    if key not in _cache:
        _cache[key] = torch.empty(x.shape, dtype=x.dtype)
    return _cache[key].copy_(x).mul_(2)


@adopt(register("cached_buffer(Tensor x) -> Tensor", _cached, lambda x: x.new_empty(x.shape)))
def cached_buffer(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::cached_buffer``. The operator's result is a buffer
    that its next call overwrites.
    """
    return x * 2


bad("cached buffer", cached_buffer, "fresh", note="f(a) + f(b) is 2 f(b)")


def _median(x):
    """Return twice the numbers of ``x`` in ascending order. This function has a defect on purpose. It sorts an unsorted
    ``x`` in place, which the schema does not declare.
    """
    if not bool((x[1:] >= x[:-1]).all()):
        x.copy_(x.sort().values)
    return x * 2


@adopt(register("hidden_mutation(Tensor x) -> Tensor", _median, lambda x: x.new_empty(x.shape)))
def hidden_mutation(x: V) -> V:
    """Return twice the numbers of ``x`` in ascending order, the reference of the broken operator
    ``zoo::hidden_mutation``. The operator sorts ``x`` in place, which its schema does not declare.
    """
    return x.sort().values * 2


bad("hidden mutation when unsorted", hidden_mutation, "schema", note="a sorted sample does not show it")


_scratch = torch.empty(1 << 16, dtype=torch.float64)


def _shared_scratch(x):
    """Return ``2 * x``. This function has a defect on purpose. The result passes through a buffer of the module, which
    all threads share.
    """
    mine = _scratch[: x.numel()].view(x.shape)
    mine.copy_(x)
    time.sleep(5e-4)  # a kernel that takes its time
    return (mine * 2).to(x.dtype)


@adopt(register("scratch(Tensor x) -> Tensor", _shared_scratch, lambda x: x.new_empty(x.shape)))
def scratch(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::scratch``. The operator's result passes through a
    buffer that all threads share.
    """
    return x * 2


bad("module-global scratch", scratch, "threads", note="two threads share it")


@adopt(
    register(
        "aliases(Tensor x, float a=1.0) -> Tensor",
        lambda x, a=1.0: x if a == 1 else x * a,
        lambda x, a=1.0: x.new_empty(x.shape),
    )
)
def aliases(x: M, a: float = 1.0) -> M:
    """Return ``x * a``, the reference of the broken operator ``zoo::aliases``. The operator returns ``x`` itself if
    ``a`` is 1.
    """
    return x * a


bad("output is the input", aliases, "fresh", note="a shortcut for a == 1")


@adopt(
    register(
        "no_offset(Tensor x) -> Tensor",
        lambda x: x.as_strided(x.shape, x.stride(), 0).mul(2).contiguous(),
        lambda x: x.new_empty(x.shape),
    )
)
def no_offset(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::no_offset``. The operator ignores the storage
    offset of ``x`` and reads from the start of its storage.
    """
    return x * 2


bad("ignores the storage offset", no_offset, "edges")


def _flat(x):
    """Return ``2 * x``. This function has a defect on purpose. If ``x`` is not contiguous, its memory is read without
    regard to its strides.
    """
    rows = torch.empty(x.shape).stride()
    return x.as_strided(x.shape, rows, x.storage_offset()).mul(2)


@adopt(register("no_strides(Tensor x) -> Tensor", _flat, lambda x: x.new_empty(x.shape)))
def no_strides(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::no_strides``. If ``x`` is not contiguous, the
    operator reads its memory without regard to its strides.
    """
    return x * 2


bad("reads any input as contiguous", no_strides, "edges")


def _int32_offsets(x):
    """Return ``2 * x``. This function has a defect on purpose. The offsets of rows wrap at 32 bits if ``x`` is large
    and strided.
    """
    n, c = x.shape
    if not x.numel():
        return x * 2
    row, column = x.stride()
    span = (n - 1) * row + (c - 1) * column + 1
    # torch wraps in int32 as a kernel would.
    offsets = torch.arange(n, dtype=torch.int32) * ctypes.c_int32(row).value
    index = offsets[:, None].long() + torch.arange(c) * column
    # A wrapped index stays inside of the memory: the result is wrong, and the process lives.
    return x.as_strided((span,), (1,))[index % span] * 2


@adopt(register("int32_offsets(Tensor x) -> Tensor", _int32_offsets, lambda x: x.new_empty(x.shape)))
def int32_offsets(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::int32_offsets``. The operator's offsets of rows
    wrap at 32 bits if ``x`` is large and strided.
    """
    return x * 2


bad("offsets in 32 bits", int32_offsets, "large", note="row * stride beyond 2^31")


_seen: dict[int, Tensor] = {}


def _by_address(x):
    """Return ``2 * x``. This function has a defect on purpose. Results are cached by the address and the shape of
    ``x``, and returned again after ``x`` was changed in place.
    """
    key = x.data_ptr()
    if key not in _seen or _seen[key].shape != x.shape:
        _seen[key] = x * 2
    return _seen[key].clone()


@adopt(register("stale(Tensor x) -> Tensor", _by_address, lambda x: x.new_empty(x.shape)))
def stale(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::stale``. The operator returns a cached result after
    ``x`` was changed in place.
    """
    return x * 2


bad("result cached by address", stale, "fresh", note="weights updated in place keep their old result")


@declare("cached")
def sl_cached(x: M) -> M:
    """Return ``2 * x``, the reference of the broken op ``zoo_sl::cached``. The op's kernel returns a buffer that the
    next call overwrites.
    """
    return x * 2


sl_cached.kernel("cpu", _cached, name="cached")

bad("kernel that returns a cached buffer", sl_cached, "fresh")


@declare("mutation")
def sl_mutation(x: V) -> V:
    """Return twice the numbers of ``x`` in ascending order, the reference of the broken op ``zoo_sl::mutation``. The
    op's kernel sorts ``x`` in place, which is not declared.
    """
    return x.sort().values * 2


sl_mutation.kernel("cpu", _median, name="median")

bad("kernel with a hidden mutation", sl_mutation, "schema")


@declare("workspace")
def sl_workspace(x: M) -> Float[Tensor, "c"]:
    """Return the sum of each column of ``x``, the reference of the broken op ``zoo_sl::workspace``. The op's kernel
    assumes that its workspace holds zeros.
    """
    return x.sum(0)


@sl_workspace.kernel("cpu", workspace="4 * c")
def _(x, *, out, workspace):
    """Write the sum of each column of ``x`` to ``out``. This function has a defect on purpose. It adds the sums to
    ``workspace`` without setting it to zero first.
    """
    partial = workspace.view(torch.float32)  # "it is always zero"
    partial += x.float().sum(0)
    out.copy_(partial)


bad("workspace read before it is written", sl_workspace, "workspace")


@declare("unwritten")
def sl_unwritten(x: M) -> M:
    """Return ``x`` with negative numbers replaced by zero, the reference of the broken op ``zoo_sl::unwritten``. The
    op's kernel writes only the positive numbers.
    """
    return x.clamp(min=0)


@sl_unwritten.kernel("cpu")
def _(x, *, out):
    """Write the positive elements of ``x`` to ``out``. This function has a defect on purpose. It does not write the
    other elements of ``out``, which should be zero.
    """
    out[x > 0] = x[x > 0]


bad("output not written everywhere", sl_unwritten, "workspace", note="fresh pages are often zero")


@declare("outside", mutates=["table"])
def sl_outside(table: M) -> None:
    """Add 1 to ``table`` in place, as the reference of the broken op ``zoo_sl::outside``. If ``table`` is a view, the
    op's kernel also writes to memory outside of it.
    """
    table += 1


@sl_outside.kernel("cpu")
def _(table):
    """Add 1 to ``table`` in place. This function has a defect on purpose. If ``table`` is a view, 1 is added to its
    whole storage.
    """
    # The whole storage, of which the table may be a part.
    torch.empty(0, dtype=table.dtype).set_(table.untyped_storage()).add_(1)


bad("writes beside the view it was given", sl_outside, "schema", note="a column slice of a larger table")
