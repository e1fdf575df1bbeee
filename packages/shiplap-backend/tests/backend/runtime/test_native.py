"""What the whole metadata makes native, over layouts and edges, beside the CPU: values, geometry, counted as native.

Compiling all of it takes minutes, so this runs on request: SHIPLAP_BACKEND_FULL=1. The quick build has the same
machinery with fewer ops; `shiplap backend audit` covers PyTorch's own samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.backend.conftest import FULL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FULL, reason="compiles all of the metadata: SHIPLAP_BACKEND_FULL=1"),
]
aten = torch.ops.aten
Case = tuple[Callable[..., Any], list[torch.Tensor | None]]
NAN, INF = float("nan"), float("inf")
MEANT = {"value: NaN"}  # a maximum over NaN is the CPU's: test_extremes.py


def special(*sizes: int) -> torch.Tensor:
    """Random, with a NaN and both infinities."""
    x = torch.randn(*sizes)
    x.view(-1)[:6:2] = torch.tensor([NAN, INF, -INF])
    return x


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values stored in every way that torch knows."""
    yield x
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield torch.stack([x, x], -1)[..., 1]
    yield x[:1].expand(x.shape)
    if x.dim() == 4:
        yield x.contiguous(memory_format=torch.channels_last)


def there(x: torch.Tensor | None, device: str) -> torch.Tensor | None:
    """``x`` on the device, stored as it is here."""
    if x is None:
        return None
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device)
    return torch.as_strided(whole, x.shape, x.stride(), x.storage_offset())


def tensors(results: Any) -> list[torch.Tensor]:
    return [r for r in (results if isinstance(results, tuple | list) else [results]) if isinstance(r, torch.Tensor)]


def with_gradients(f: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """``f``, and the gradients of its first ``count`` arguments."""

    def g(*arguments: torch.Tensor) -> list[torch.Tensor]:
        leaves = [a.detach().requires_grad_() if a is not None and i < count else a for i, a in enumerate(arguments)]
        y = tensors(f(*leaves))[0]
        weights = torch.arange(y.numel(), dtype=torch.float32).cos().reshape(y.shape).to(y.device)
        return [
            y.detach(),
            *torch.autograd.grad((y * weights).sum(), [a for a in leaves if a is not None and a.requires_grad]),
        ]

    return g


def pools() -> Iterator[Case]:
    for x in [*layouts(special(2, 3, 9, 11)), torch.full((1, 1, 6, 6), -INF), torch.ones(1, 1, 6, 6)]:
        for k, s, p, d, ceil in (
            (3, 2, 1, 1, False),
            (3, 2, 1, 1, True),
            ((2, 3), (1, 2), (1, 0), 1, True),
            (3, 1, 0, 2, False),
        ):
            if d == 1 or x.size(-1) > 6:
                yield lambda x, a=(k, s, p, d, ceil): F.max_pool2d(x, *a, return_indices=True), [x]
    for x in layouts(torch.randn(2, 3, 9, 11)):
        for size in (1, (3, 4), (9, 11), (13, 12)):
            yield with_gradients(lambda x, s=size: F.adaptive_max_pool2d(x, s)), [x]
            yield with_gradients(lambda x, s=size: F.adaptive_avg_pool2d(x, s)), [x]
        for ceil, counted, divisor in product((False, True), (False, True), (None, 3)):
            yield with_gradients(lambda x, a=(3, 2, 1, ceil, counted, divisor): F.avg_pool2d(x, *a)), [x]
        yield with_gradients(lambda x: F.max_pool2d(x, 3, 2, 1)), [x]
    yield with_gradients(lambda x: F.max_pool3d(x, 3, 2, 1)), [torch.randn(2, 3, 5, 6, 7)]
    yield with_gradients(lambda x: F.avg_pool3d(x, 3, 2, 1, True, False)), [torch.randn(2, 3, 5, 6, 7)]


def windows() -> Iterator[Case]:
    modes = {"nearest": 3, "nearest-exact": 4, "linear": 3, "bilinear": 4, "bicubic": 4, "trilinear": 5}
    for (mode, rank), corners in product(modes.items(), (None, True)):
        if corners and mode.startswith("nearest"):
            continue
        x = torch.randn(2, 3, 7, 5, 4)[(..., *[0] * (5 - rank))].contiguous()
        for how in (
            {"size": (9, 3, 8)[: rank - 2]},
            {"scale_factor": 1.7},
            {"scale_factor": 0.5},
            {"size": (1, 1, 1)[: rank - 2]},
        ):
            kw: dict[str, Any] = {**how, "mode": mode, "align_corners": corners}
            yield with_gradients(lambda x, kw=kw: F.interpolate(x, **kw)), [x]
    for mode in ("reflect", "replicate"):
        for sizes, padding in (
            ((2, 3, 7), (2, 1)),
            ((2, 3, 7, 5), (2, 1, 3, 0)),
            ((2, 3, 7, 5, 4), (1, 1, 2, 0, 0, 2)),
        ):
            for x in layouts(torch.randn(*sizes)):
                yield with_gradients(lambda x, a=(padding, mode): F.pad(x, *a)), [x]
    for a in ((3, 1, 1, 1), ((2, 3), 1, 0, 2), (2, 2, 1, (1, 2))):
        for x in layouts(torch.randn(2, 3, 7, 8)):
            yield with_gradients(lambda x, a=a: F.unfold(x, *a)), [x]
        yield with_gradients(lambda y, a=a: F.fold(y, (7, 8), *a)), [F.unfold(torch.randn(2, 3, 7, 8), *a)]
    for dim, size, step in ((0, 2, 1), (1, 3, 2), (-1, 2, 3)):
        yield with_gradients(lambda x, a=(dim, size, step): x.unfold(*a)), [torch.randn(4, 5, 8)]
    for dims in ((0,), (0, 2), (-1,)):
        yield lambda x, d=dims: torch.flip(x, d), [torch.randn(3, 4, 5).int()]


def norms() -> Iterator[Case]:
    for x, affine, training in product(layouts(torch.randn(4, 3, 5, 6) * 3 + 5), (True, False), (True, False)):
        mean, variance = torch.randn(3), torch.rand(3)
        w, b = (torch.randn(3), torch.randn(3)) if affine else (None, None)

        def batch_norm(
            x: Any, w: Any, b: Any, mean: Any, variance: Any, training: bool = training
        ) -> list[torch.Tensor]:
            def f(x: Any, w: Any, b: Any) -> Any:
                return F.batch_norm(x, mean, variance, w, b, training, 0.3)

            made = (
                with_gradients(f, 3)(x, w, b) if training else [f(x, w, b)]
            )  # eval's gradients are the CPU's, counted
            return [*made, mean, variance]

        yield batch_norm, [x, w, b, mean, variance]
    for mask in product((True, False), repeat=3):  # gradients alike in sizes: which are asked for is in the key
        alike: list[torch.Tensor | None] = [torch.randn(4, 4, 3, 3) for _ in range(3)]
        rest = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

        def asked(g: Any, x: Any, w: Any, mask: tuple[bool, ...] = mask, rest: Any = rest) -> list[torch.Tensor]:
            made = aten.convolution_backward(g, x, w, *rest, mask)
            return [m for m, wanted in zip(made, mask, strict=True) if wanted]

        if any(mask):
            yield asked, alike
    for groups, x in product((1, 2, 6), layouts(torch.randn(4, 6, 5, 7))):
        yield with_gradients(lambda x, w, b, g=groups: F.group_norm(x, g, w, b), 3), [x, torch.randn(6), torch.randn(6)]


def indexing() -> Iterator[Case]:
    i, j = torch.tensor([0, 2, -1, 1]), torch.tensor([[1], [0], [-2]])
    picks: list[Callable[..., Any]] = [
        lambda x, i, j: x[i],
        lambda x, i, j: x[:, i, j],
        lambda x, i, j: x[i, :, j],
        lambda x, i, j: x[..., i, j],
        lambda x, i, j: x[j, i.int()],
    ]
    for x, pick in product(layouts(torch.randn(3, 4, 5, 6)), picks):
        yield with_gradients(lambda x, i, j, pick=pick: pick(x, i, j)), [x, i, j]
    for x in layouts(torch.randn(3, 4, 5)):
        yield (
            with_gradients(lambda x, s, i: torch.index_add(x, 1, i, s, alpha=2.5), 2),
            [x, torch.randn(3, 2, 5), torch.tensor([1, 1])],
        )
        yield lambda x, i: torch.take(x, i), [x, torch.tensor([[0, 5], [11, 2]])]
        yield lambda x, i: x.clone().index_fill_(1, i, 2.0), [x, torch.tensor([0, 3, 0])]
        yield lambda x, i, v: x.index_put((i,), v, True), [x, i[:3], torch.randn(5)]
        yield lambda x, i, j, v: x.index_put((j, i), v, True), [x, i[:3], i[:3].clamp(0, 2), torch.randn(5)]
    index = torch.randint(0, 3, (3, 4))
    for dim, reduce, whole in product((0, 1), ("sum", "prod", "mean"), (True, False)):
        a = (dim, reduce, whole)
        yield (
            lambda x, i, s, a=a: torch.scatter_reduce(x, a[0], i, s, a[1], include_self=a[2]),
            [torch.randn(3, 4), index, torch.randn(3, 4)],
        )


def extrema() -> Iterator[Case]:
    """The plugin starts from the largest finite number, and passes over NaN."""
    rows = torch.tensor([[INF, INF], [-INF, -INF], [INF, -INF], [NAN, INF], [3.4028234663852886e38, INF], [1.0, 1.0]])
    for x, dim in product((rows, rows.t(), special(4, 6)), (0, 1)):
        for f in (
            torch.amax,
            torch.amin,
            torch.argmax,
            torch.argmin,
            torch.max,
            torch.min,
            torch.softmax,
            torch.log_softmax,
        ):
            yield lambda x, f=f, dim=dim: list(f(x, dim)) if f in (torch.max, torch.min) else f(x, dim), [x]
        yield lambda x, dim=dim: list(torch.aminmax(x, dim=dim)), [x]


def losses() -> Iterator[Case]:
    a, b, p, t = torch.randn(5, 6), torch.randn(5, 6), torch.rand(5, 6), torch.rand(5, 6)
    target = torch.randint(0, 5, (2, 3, 4))
    target[0, 0, 0] = -100
    for reduction in ("none", "mean", "sum"):
        kw: dict[str, Any] = {"reduction": reduction}
        yield with_gradients(lambda a, b, kw=kw: F.huber_loss(a, b, delta=0.7, **kw), 2), [a, b]
        yield with_gradients(lambda a, b, kw=kw: F.smooth_l1_loss(a, b, beta=0.7, **kw), 2), [a, b]
        for w in (None, p + 1):
            yield with_gradients(lambda p, t, w, kw=kw: F.binary_cross_entropy(p, t, w, **kw)), [p, t, w]
        for w in (None, torch.rand(5)):
            logits = torch.randn(2, 5, 3, 4).log_softmax(1)
            yield with_gradients(lambda x, t, w, kw=kw: F.nll_loss(x, t, w, **kw)), [logits, target, w]


def attention() -> Iterator[Case]:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    sdpa = F.scaled_dot_product_attention
    for causal, scale in product((False, True), (None, 0.3)):
        yield with_gradients(lambda q, k, v, a=(causal, scale): sdpa(q, k, v, is_causal=a[0], scale=a[1]), 3), [q, k, v]
    mask = torch.randn(2, 1, 5, 7)
    seen = torch.rand(2, 1, 5, 7) > 0.3
    seen[0, 0, 1] = False  # a row that sees nothing
    for m in (mask, seen):
        yield with_gradients(lambda q, k, v, m: sdpa(q, k, v, m), 3), [q, k, v, m]


@pytest.mark.parametrize(
    "cases", [pools, windows, norms, indexing, extrema, losses, attention], ids=lambda f: f.__name__
)
def test_is_the_cpus(dev: Any, device: str, cases: Callable[[], Iterator[Case]]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for number, (f, arguments) in enumerate(cases()):
        on = [there(a, device) for a in arguments]
        dev.reset_counters()
        got = tensors(f(*on))
        fallen = {op: why for op, c in dev.counters().items() if (why := c["fallback"].keys() - MEANT)}
        for g, w in zip(got, tensors(f(*arguments)), strict=True):
            where = f"{cases.__name__} {number}: {[a.shape if a is not None else a for a in arguments]}"
            assert (g.shape, g.dtype) == (w.shape, w.dtype), where
            torch.testing.assert_close(
                g.cpu(), w, rtol=5e-4, atol=5e-4, equal_nan=True, msg=lambda m, at=where: f"{at}: {m}"
            )
        assert not fallen, f"{cases.__name__} {number}: {fallen}"
