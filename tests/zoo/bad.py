"""Broken ops. The first eleven are those of which ten pass ``torch.library.opcheck`` on a plausible sample.

Ops in the namespace ``zoo`` are written as an outsider would, with raw torch.library, and adopted; those in ``zoo_sl``
are declared with ``sl.op`` and have a broken kernel. Every one works on the sample that its author tried.
"""

import ctypes
import random
import time

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import shiplap as sl
from tests.zoo.specimen import Specimen, register

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]
SPECIMENS: list[Specimen] = []


def bad(name, op, *checks, note=""):
    SPECIMENS.append(Specimen(name, op, frozenset(checks), note))


def adopt(name, **declaration):
    return sl.adopt(name, **{"autocast": None, **declaration})


# --- the eleven ------------------------------------------------------------------------------------------------------


@adopt(register("wrong_numerics(Tensor x) -> Tensor", lambda x: x.exp() * 1.0001, torch.empty_like))
def wrong_numerics(x: M) -> M:
    return x.exp()


bad("wrong numerics", wrong_numerics, "numerics", note="one part in ten thousand: a wrong constant, not rounding")


def _save_x(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


@adopt(
    register(
        "wrong_gradient(Tensor x) -> Tensor",
        lambda x: x * x,
        torch.empty_like,
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        _save_x,
    )
)
def wrong_gradient(x: M) -> M:
    return x * x


bad("wrong gradient", wrong_gradient, "gradient", note="the factor 2 is missing")


def _at_most_four(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(max=4), dtype=torch.int64)


@adopt(
    register("wrong_bound(Tensor x) -> Tensor", lambda x: (x == x).nonzero()[:, 0], _at_most_four), bounds={"m": "n"}
)
def wrong_bound(x: V) -> Int64[Tensor, "m"]:
    return (x == x).nonzero()[:, 0]


bad("wrong bound", wrong_bound, "bound", note="the fake promises at most 4 rows, 10 come")


@adopt(register("keeps_strides(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape)))
def keeps_strides(x: M) -> M:
    return x * 2


bad("stride bug for a transposed input", keeps_strides, "fake", "compile")

_cache: dict[object, Tensor] = {}


def _cached(x):
    key = (x.shape, x.dtype)
    if key not in _cache:
        _cache[key] = torch.empty(x.shape, dtype=x.dtype)
    return _cache[key].copy_(x).mul_(2)


@adopt(register("cached_buffer(Tensor x) -> Tensor", _cached, lambda x: x.new_empty(x.shape)))
def cached_buffer(x: M) -> M:
    return x * 2


bad("cached buffer", cached_buffer, "fresh", note="f(a) + f(b) is 2 f(b)")


def _median(x):
    if not bool((x[1:] >= x[:-1]).all()):
        x.copy_(x.sort().values)
    return x * 2


@adopt(register("hidden_mutation(Tensor x) -> Tensor", _median, lambda x: x.new_empty(x.shape)))
def hidden_mutation(x: V) -> V:
    return x.sort().values * 2


bad("hidden mutation when unsorted", hidden_mutation, "schema", note="a sorted sample does not show it")


def _linear(x, w):
    if x.dtype != w.dtype:
        raise RuntimeError("expected x and w of one dtype")
    return x @ w


@adopt(
    register("no_autocast(Tensor x, Tensor w) -> Tensor", _linear, lambda x, w: x.new_empty(x.shape[0], w.shape[1])),
    autocast="widest",
)
def no_autocast(x: Float[Tensor, "n ci"], w: Float[Tensor, "ci co"]) -> Float[Tensor, "n co"]:
    return x @ w


bad("missing autocast rule", no_autocast, "autocast")


@adopt(register("zero_rows(Tensor x) -> Tensor", lambda x: x - x.max(), lambda x: x.new_empty(x.shape)))
def zero_rows(x: V) -> V:
    return x - x.max() if x.numel() else x.clone()


bad("crash on zero rows", zero_rows, "edges", note="an empty scene")


def _last_bit(x):
    return torch.nextafter(x * 2, torch.full_like(x, random.choice([-9e9, 9e9])))


@adopt(register("nondeterministic(Tensor x) -> Tensor", _last_bit, torch.empty_like))
def nondeterministic(x: M) -> M:
    return x * 2


bad("nondeterministic in the last bit", nondeterministic, "determinism", note="atol=rtol=0 means default to opcheck")

_calls = [0]


def _counting(x):
    _calls[0] += 1
    return x * 2 + (_calls[0] % 7 == 0)


@adopt(register("counter(Tensor x) -> Tensor", _counting, torch.empty_like))
def counter(x: M) -> M:
    return x * 2


bad("hidden Python counter", counter, "determinism", note="every seventh call is different")


@adopt(register("looks_at_grad(Tensor x) -> Tensor", lambda x: x * (2 if x.requires_grad else 3), torch.empty_like))
def looks_at_grad(x: M) -> M:
    return x * 3


bad("branch on requires_grad", looks_at_grad, "requires_grad")

# --- more of the outsider's ------------------------------------------------------------------------------------------


@adopt(register("fake_dtype(Tensor x) -> Tensor", lambda x: x.float().sum(1), lambda x: x.new_empty(x.shape[0])))
def fake_dtype(x: M) -> Float32[Tensor, "n"]:
    return x.float().sum(1)


bad("fake with another dtype", fake_dtype, "fake", note="right for float32, wrong for bfloat16")


@adopt(register("fake_device(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x, device="meta")))
def fake_device(x: M) -> M:
    return x * 2


bad("fake on another device", fake_device, "fake", "compile")


@adopt(
    register(
        "odd_sizes(Tensor x) -> Tensor",
        lambda x: torch.nn.functional.pad(x, (0, x.shape[0] % 2)).view(-1, 2).sum(1),
        lambda x: x.new_empty(x.shape[0] // 2),
    ),
    dims={"m": "cdiv(n, 2)"},
)
def odd_sizes(x: V) -> Float[Tensor, "m"]:
    return torch.nn.functional.pad(x, (0, x.shape[0] % 2)).view(-1, 2).sum(1)


bad("fake wrong for odd sizes", odd_sizes, "fake", note="n // 2 for cdiv(n, 2)")


def _slide(x, L):
    """SlideSparse activation lifting: K padded to groups of L, each becoming 2(L-2) lanes; then padded to 32."""
    k = x.shape[1]
    j = torch.arange(-(-k // L) * 2 * (L - 2))
    r = j % (2 * (L - 2))
    source = j // (2 * (L - 2)) * L + 2 * (r // 4) + r % 4
    lifted = torch.where(source < k, x[:, source.clamp(max=k - 1)] if k else x.new_zeros(len(x), len(j)), 0)
    return torch.nn.functional.pad(lifted, (0, -len(j) % 32))


def _slide_fake(x, L):
    return x.new_empty(x.shape[0], (x.shape[1] * 2 * (L - 2) // L + 31) // 32 * 32)


@adopt(
    register("slide(Tensor x, SymInt L=12) -> Tensor", lambda x, L=12: _slide(x, L), lambda x, L=12: _slide_fake(x, L)),
    dims={"kp": "cdiv(cdiv(k, L) * 2 * (L - 2), 32) * 32"},
    requires=("L >= 4", "L % 2 == 0"),
)
def slide(x: Float[Tensor, "n k"], L: int = 12) -> Float[Tensor, "n kp"]:
    return _slide(x, L)


bad("SlideSparse's fake and real sizes", slide, "fake", note="K*2*(L-2)//L for ceil(K/L)*2*(L-2); needs no GPU")

_scratch = torch.empty(1 << 16, dtype=torch.float64)


def _shared_scratch(x):
    mine = _scratch[: x.numel()].view(x.shape)
    mine.copy_(x)
    time.sleep(5e-4)  # a kernel that takes its time
    return (mine * 2).to(x.dtype)


@adopt(register("scratch(Tensor x) -> Tensor", _shared_scratch, lambda x: x.new_empty(x.shape)))
def scratch(x: M) -> M:
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
    return x * 2


bad("ignores the storage offset", no_offset, "edges")


def _flat(x):
    rows = torch.empty(x.shape).stride()
    return x.as_strided(x.shape, rows, x.storage_offset()).mul(2)


@adopt(register("no_strides(Tensor x) -> Tensor", _flat, lambda x: x.new_empty(x.shape)))
def no_strides(x: M) -> M:
    return x * 2


bad("reads any input as contiguous", no_strides, "edges")


def _int32_offsets(x):
    n, c = x.shape
    if not x.numel():
        return x * 2
    row, column = x.stride()
    span = (n - 1) * row + (c - 1) * column + 1
    offsets = torch.arange(n, dtype=torch.int32) * ctypes.c_int32(row).value
    index = offsets[:, None].long() + torch.arange(c) * column
    return x.as_strided((span,), (1,))[index % span] * 2


@adopt(register("int32_offsets(Tensor x) -> Tensor", _int32_offsets, lambda x: x.new_empty(x.shape)))
def int32_offsets(x: M) -> M:
    return x * 2


bad("offsets in 32 bits", int32_offsets, "large", note="row * stride beyond 2^31")


def _flat_gradient(ctx, grad):
    return grad.as_strided(grad.shape, torch.empty(grad.shape).stride(), grad.storage_offset()) * 2


@adopt(
    register(
        "flat_gradient(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x), _flat_gradient, _save_x
    )
)
def flat_gradient(x: M) -> M:
    return x * 2


bad("backward reads any gradient as contiguous", flat_gradient, "gradient", note="y.T.backward() or y.sum().backward()")


@adopt(register("specialises(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty([int(s) for s in x.shape])))
def specialises(x: M) -> M:
    return x * 2


bad("recompiles for each size", specialises, "fake", "compile", note="int() of a size in the fake")


@adopt(register("no_fake(Tensor x) -> Tensor", lambda x: x.clone().mul_(2), key="CPU"))
def no_fake(x: M) -> M:
    return x * 2


bad("no fake at all", no_fake, "fake", "compile", "opcheck", note="a graph break")


@adopt(
    register(
        "unchecked(Tensor x, Tensor b) -> Tensor", lambda x, b: x + b[: x.shape[0]], lambda x, b: x.new_empty(x.shape)
    )
)
def unchecked(x: V, b: V) -> V:
    return x + b


bad("takes sizes that disagree", unchecked, "arguments")

_seen: dict[int, Tensor] = {}


def _by_address(x):
    key = x.data_ptr()
    if key not in _seen or _seen[key].shape != x.shape:
        _seen[key] = x * 2
    return _seen[key].clone()


@adopt(register("stale(Tensor x) -> Tensor", _by_address, lambda x: x.new_empty(x.shape)))
def stale(x: M) -> M:
    return x * 2


bad("result cached by address", stale, "fresh", note="weights updated in place keep their old result")

# --- with sl.op: what is left to get wrong when schema, fake, autocast and layouts are derived ------------------------


def declare(name, **declaration):
    def register_reference(fn):
        return sl.op(f"zoo_sl::{name}", **declaration)(fn)

    return register_reference


@declare("numerics")
def sl_numerics(x: M, eps: float = 1e-5) -> M:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)


@sl_numerics.kernel("cpu")
def _(x, eps, *, out):
    torch.mul(x, torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5), out=out)


bad("kernel that ignores a scalar", sl_numerics, "numerics", note="right for the default")


@declare("gradient")
def sl_gradient(x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"]) -> Float[Tensor, "n co"]:
    return x @ w.T


@sl_gradient.backward
def _(grad, saved, needs):
    both = needs.x and needs.w
    return {
        "x": grad @ saved.w if needs.x else None,
        "w": grad.T @ saved.x * (1 if both else 2) if needs.w else None,
    }


bad("gradient wrong when asked for alone", sl_gradient, "gradient", note="both at once are right")


@declare("bound", bounds={"m": "n // 2 + 1"})
def sl_bound(x: V) -> Int64[Tensor, "m"]:
    return (x > 0).nonzero()[:, 0]


bad("declared bound too small", sl_bound, "bound", note="half of the rows, usually")


@declare("cached")
def sl_cached(x: M) -> M:
    return x * 2


sl_cached.kernel("cpu", _cached, name="cached")
bad("kernel that returns a cached buffer", sl_cached, "fresh")


@declare("mutation")
def sl_mutation(x: V) -> V:
    return x.sort().values * 2


sl_mutation.kernel("cpu", _median, name="median")
bad("kernel with a hidden mutation", sl_mutation, "schema")


@declare("empty")
def sl_empty(x: M) -> Float[Tensor, "c"]:
    return x.amax(0) if len(x) else x.new_zeros(x.shape[1])


@sl_empty.kernel("cpu")
def _(x, *, out):
    torch.amax(x, 0, out=out)


bad("kernel that crashes on zero rows", sl_empty, "edges")


@declare("nondeterministic")
def sl_nondeterministic(x: M) -> M:
    return x * 2


sl_nondeterministic.kernel("cpu", _last_bit, name="atomics")
bad("nondeterministic kernel", sl_nondeterministic, "determinism")


@declare("counter")
def sl_counter(x: M) -> M:
    return x * 2


sl_counter.kernel("cpu", _counting, name="counting")
bad("kernel that counts its calls", sl_counter, "determinism")


@declare("looks_at_grad")
def sl_looks_at_grad(x: M) -> M:
    return x * 3


sl_looks_at_grad.backward(saves=[])(lambda grad, saved, needs: {"x": grad * 3})
sl_looks_at_grad.kernel("cpu", lambda x: x * (2 if x.requires_grad else 3), name="looking")
bad("kernel that branches on requires_grad", sl_looks_at_grad, "requires_grad")


@declare("workspace")
def sl_workspace(x: M) -> Float[Tensor, "c"]:
    return x.sum(0)


@sl_workspace.kernel("cpu", workspace="4 * c")
def _(x, *, out, workspace):
    partial = workspace.view(torch.float32)  # "it is always zero"
    partial += x.float().sum(0)
    out.copy_(partial)


bad("workspace read before it is written", sl_workspace, "workspace")


@declare("unwritten")
def sl_unwritten(x: M) -> M:
    return x.clamp(min=0)


@sl_unwritten.kernel("cpu")
def _(x, *, out):
    out[x > 0] = x[x > 0]


bad("output not written everywhere", sl_unwritten, "workspace", note="fresh pages are often zero")


@declare("outside", mutates=["table"])
def sl_outside(table: M) -> None:
    table += 1


@sl_outside.kernel("cpu")
def _(table):
    torch.empty(0, dtype=table.dtype).set_(table.untyped_storage()).add_(1)


bad("writes beside the view it was given", sl_outside, "schema", note="a column slice of a larger table")


@declare("optional")
def sl_optional(x: M, bias: Float[Tensor, "c"] | None = None) -> M:
    return x * 2 if bias is None else x * 2 + bias


@sl_optional.kernel("cpu")
def _(x, bias, *, out):
    torch.add(x * 2, bias, out=out)


bad("kernel that needs its optional argument", sl_optional, "numerics")


@declare("wasteful")
def sl_gradient_wasteful(x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"]) -> Float[Tensor, "n co"]:
    """Right, but each gradient is computed whether it is needed or not: noted, not failed, so no specimen."""
    return x @ w.T


sl_gradient_wasteful.backward(lambda grad, saved, needs: {"x": grad @ saved.w, "w": grad.T @ saved.x})
