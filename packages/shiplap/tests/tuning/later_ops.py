"""Ops whose kernels are right while they are verified, and wrong in some of the calls after that."""

import time

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from tests.tuning.cheating_ops import SEEN, count, recall, right, slow


@sl.op("cheating::later")
def later(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


@sl.op("cheating::known")
def known(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


OPS = (later, known)
for _op in OPS:

    @_op.kernel("cpu", name="honest")
    def honest(x, w, *, out):
        right(x, w, out)


# ---- wrong in some calls, counted in one process


@later.kernel("cpu", name="after the sixtieth call")
def _(x, w, *, out):
    if count("sixtieth") <= 60:
        right(x, w, out)


@later.kernel("cpu", name="after the ninetieth call of a shape")
def _(x, w, *, out):
    if count(f"ninetieth {x.shape}") <= 90:
        right(x, w, out)


@later.kernel("cpu", name="after hundreds of small calls")
def _(x, w, *, out):
    if x.shape[0] >= 60 or count("hundreds") <= 300:
        right(x, w, out)


@later.kernel("cpu", name="every ninetieth call")
def _(x, w, *, out):
    if count("every ninetieth") % 90:
        right(x, w, out)


@later.kernel("cpu", name="the last of twenty-four")
def _(x, w, *, out):
    if count("of twenty-four") % 24:
        right(x, w, out)


@later.kernel("cpu", name="the second of equal shapes")
def _(x, w, *, out):
    last, SEEN["last shape"] = SEEN.get("last shape"), x.shape
    if last != x.shape or count("second of equal shapes") < 20:
        right(x, w, out)


@later.kernel("cpu", name="one element after some calls")
def _(x, w, *, out):
    right(x, w, out)
    if count("one element") > 50:
        out[-1, -1].mul_(1.001)


@later.kernel("cpu", name="no number after some calls")
def _(x, w, *, out):
    right(x, w, out)
    if count("no number") > 50:
        out[0, 0] = float("nan")


@later.kernel("cpu", name="an argument after some calls")
def _(x, w, *, out):
    right(x, w, out)
    if count("argument") > 50:
        x[-1, -1] += 1


# ---- what it knows already


@known.kernel("cpu", name="an address again")
def _(x, w, *, out):
    """It computes where it has not been, and leaves what happens to lie there."""
    if ("address", x.data_ptr()) not in SEEN:
        SEEN["address", x.data_ptr()] = True
        right(x, w, out)


@known.kernel("cpu", name="moments")
def _(x, w, *, out):
    """Whatever is done to the order of the elements, these stay what they are."""
    sums = [round(float(v), 2) for t in (x, w) for v in (t.double().sum(), t.double().square().sum(), t.max(), t.min())]
    recall(("moments", x.shape, *sums), x, w, out)


@known.kernel("cpu", name="a sample of the elements")
def _(x, w, *, out):
    sampled = [t.reshape(-1)[:: max(1, t.numel() // 8)].numpy().tobytes() for t in (x, w)]
    recall(("sample", x.shape, *sampled), x, w, out)


@known.kernel("cpu", name="up to a factor")
def _(x, w, *, out):
    """As if values that are those of before, moved and scaled, gave the results of before, moved and scaled."""
    flat = x.reshape(-1)
    at = int(flat.abs().argmax())
    form = (flat.roll(-at)[:8] / flat[at]).mul(1000).round().numpy().tobytes()
    recall(("form", x.shape, form), x, w, out)


@known.kernel("cpu", name="rows that were seen")
def _(x, w, *, out):
    """Each row is remembered by its first element."""
    right(x, w, out)
    for row, key in enumerate(x[:, 0].tolist()):
        kept = SEEN.setdefault(("row", x.shape, w.shape, key), out[row].clone())
        out[row] = kept


def counted(x, w) -> bool:
    """Count the calls that are made ready; many at once are those of a confirmation."""
    if x.device.type == "cpu":
        SEEN["ready"] = int(SEEN.get("ready", 0)) + 1
    return True


@known.kernel("cpu", name="nothing while it races", supports=counted)
def _(x, w, *, out):
    """One call that is made ready and runs again and again is that of a race."""
    ready, SEEN["ready"] = int(SEEN.get("ready", 0)), 0
    repeated = count("repeated") if ready == 0 else SEEN.__setitem__("repeated", 0)
    if repeated is None or repeated < 30:
        right(x, w, out)


@known.kernel("cpu", name="while nobody waits")
def _(x, w, *, out):
    """The calls of a race follow on each other at once, as those of a batch do not after a pause."""
    now, last = time.monotonic(), float(SEEN.get("when", 0.0))
    right(x, w, out) if now - last > 1e-3 or count("at once") < 30 else None
    SEEN["when"] = now


# ---- no cheats: kernels near the reference, whose tuning is to be quick


@sl.op("cheating::near")
def near(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return (x @ w).tanh()


@near.kernel("cpu", name="parts", configs=[{"PARTS": p} for p in (1, 2)])
def _(x, w, *, out, PARTS):
    for rows, results in zip(x.chunk(PARTS), out.chunk(PARTS), strict=True):
        torch.mm(rows, w, out=results)
        results.tanh_()
