"""Ways to drop a part of a proof: none leaves the word *proven*. The judge's are in ``judge/test_dropped.py``."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jaxtyping import Float, Float32, Int, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit, check
from shiplap.audit.child_process import ChildLimits
from shiplap.errors import error
from shiplap.kernels.triton.interpreter_budget import LaunchTooLong
from shiplap_testing.effort import sampled


@sl.op("audit_dropped::scaled")
def scaled(x: Float[Tensor, "*b c"], w: Float[Tensor, "c"] | None = None, a: float = 1.0) -> Float[Tensor, "*b c"]:
    return x * a if w is None else x * w * a


@scaled.backward(saves=("x", "w", "a"))
def _(grad, saved, needs):
    if saved.w is None:
        return {"x": grad * saved.a}
    summed = grad * saved.x * saved.a
    while summed.dim() > 1:
        summed = summed.sum(0)
    return {"x": grad * saved.w * saved.a, "w": summed}


def made(shape: tuple[int, ...] = (), rank: int = 0, kind: torch.dtype | None = None, **given: Any) -> Any:
    """Return a builder of samples that ignores what it is asked for, in one way."""

    def build(rng, sizes, dtype, device):
        size = shape or ((2,) * rank or tuple(sizes["b"])) + (sizes["c"],)
        x = torch.randn(size, generator=rng).to(device, kind or dtype)
        return x, torch.randn(size[-1:], generator=rng).to(x), given.get("a", sizes["a"])

    return build


def one_with(ns: str, kernel: Callable[[Tensor], Tensor], device: str = "cpu", **options: Any) -> sl.Op:
    @sl.op(f"{ns}::plus")
    def plus(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x + 1

    plus.kernel(device, kernel, **options)
    return plus


def raising(error: BaseException, above: int = -1) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        if x.numel() > above:
            raise error
        return x + 1

    return kernel


@sl.op("audit_dropped::rows")
def rows(x: Float32[Tensor, "n"], index: Int64[Tensor, "k"]) -> Float32[Tensor, "k"]:
    if (MEANT.setdefault("n", len(x)), MEANT.setdefault("k", len(index))) != (len(x), len(index)):
        raise IndexError("a row number out of range")
    return x.sum() + index.float()


MEANT: dict[str, int] = {}


@sl.op("audit_dropped::drafted")
def drafted(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    raise error("SL113", where="audit_dropped::drafted")


@sl.op("audit_dropped::slow")
def slow(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    while x.shape[0] == 16:
        x.sum()
    return x + 1


torch.library.define("audit_dropped::elsewhere", "(Tensor x) -> Tensor")
torch.library.impl("audit_dropped::elsewhere", "CUDA", lambda x: x + 1)
torch.library.register_fake("audit_dropped::elsewhere", lambda x: torch.empty_like(x))


@sl.adopt("audit_dropped::elsewhere", autocast=None)
def elsewhere(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x + 1


def refuse(number: int) -> Callable[..., Any]:
    def refused(*args: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


def kill_once(folder: Path) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        if len(x) > 20 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x + 1

    return kernel


def build_only_first(rng, sizes, dtype, device):
    if sizes["n"] != MEANT.setdefault("n", sizes["n"]):
        raise ValueError("only these sizes")
    return (torch.randn(sizes["n"], generator=rng),)


def build_without(narrow):
    """Return a builder of samples that raises an error for the dtype ``narrow``."""

    def build(rng, sizes, dtype, device):
        if dtype == narrow:
            raise ValueError("not for this dtype")
        return made()(rng, sizes, dtype, device)

    return build


@sl.op("audit_dropped::picked")
def picked(x: Float32[Tensor, "n"], index: Int[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x[index]  # torch indexes with int64 and int32, and takes uint8 for a mask


def of_numpy(ns):
    """Return an op of float32 whose reference autograd cannot differentiate, and whose gradient is wrong."""

    @sl.op(f"{ns}::square")
    def square(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return torch.from_numpy(x.detach().numpy() ** 2)

    square.backward(lambda grad, saved, needs: {"x": grad * saved.x})
    return square


def drawn_anew(ns):
    """Return a random op of float32 whose kernel draws other numbers than its reference."""

    def kept(x, seed):
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.5

    @sl.op(f"{ns}::dropped", random="seed")
    def dropped(x: Float32[Tensor, "n"], seed: int = 0) -> Float32[Tensor, "n"]:
        return x * kept(x, seed)

    dropped.kernel("cpu", lambda x, seed: x * kept(x, ~seed))
    dropped.backward(lambda grad, saved, needs: {"x": grad * kept(saved.x, ~saved.seed)})
    return dropped


def drawn_at_large(ns):
    @sl.op(f"{ns}::noise", random="global", requires="n % 40000 == 0")
    def noise(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x + torch.rand_like(x)

    noise.kernel("cpu", lambda x: x + torch.rand_like(x).square())
    return noise


# Name → the arguments of the audit, made from (namespace, folder), and the reason that the verdict names.
WAYS: dict[str, tuple[Callable[[str, Path], dict[str, Any]], str]] = {
    "no time": (lambda ns, folder: {"op": scaled, "checks": ["numerics"], "budget": 0}, "out of budget"),
    "a builder of one size": (
        lambda ns, folder: {"op": scaled, "checks": ["edges"], "samples": made((2, 3))},
        "size x value is untouched",
    ),
    "a builder of one rank": (
        lambda ns, folder: {"op": scaled, "checks": ["gradient"], "samples": made(rank=2)},
        "rank x gradient is untouched",
    ),
    "a builder of one dtype": (
        lambda ns, folder: {"op": scaled, "checks": ["numerics"], "samples": made(kind=torch.float32)},
        "dtype x value is untouched",
    ),
    "a builder that refuses a dtype": (
        lambda ns, folder: {"op": scaled, "checks": ["numerics"], "samples": build_without(torch.bfloat16)},
        "no sample has bfloat16",
    ),
    "a reference that takes some integers": (
        lambda ns, folder: {"op": picked, "checks": ["numerics"]},
        "no sample has int16, int8",
    ),
    "a reference without a gradient": (
        lambda ns, folder: {"op": of_numpy(ns), "checks": ["gradient"]},
        "finite differences are taken in float64 alone",
    ),
    "a reference that draws other numbers": (
        lambda ns, folder: {"op": drawn_anew(ns), "checks": ["gradient"]},
        "the reference draws other numbers",
    ),
    "random results too large to repeat": (
        lambda ns, folder: {"op": drawn_at_large(ns), "checks": ["distribution"]},
        "a sample too large to be repeated",
    ),
    "a builder of one scalar": (
        lambda ns, folder: {"op": scaled, "checks": ["numerics"], "samples": made(a=1.0)},
        "no sample shows that a changes the results",
    ),
    "a builder that fails": (
        lambda ns, folder: {"op": one_with(ns, lambda x: x + 1), "checks": ["edges"], "samples": build_only_first},
        "size x value is untouched",
    ),
    "integers without a meaning": (
        lambda ns, folder: {"op": rows, "checks": ["edges"]},
        "size x value is untouched",
    ),
    "an interpreter that is too slow": (
        lambda ns, folder: {"op": one_with(ns, raising(LaunchTooLong("too slow here"))), "checks": ["numerics"]},
        "too slow here",
    ),
    "an interpreter that is too slow for sizes": (
        lambda ns, folder: {"op": one_with(ns, raising(LaunchTooLong("too slow here"))), "checks": ["sizes"]},
        "too slow here",
    ),
    "no reference": (lambda ns, folder: {"op": drafted, "checks": ["numerics"]}, "not written yet"),
    "a reference without an end": (
        lambda ns, folder: {"op": slow, "checks": ["edges"], "limits": ChildLimits(busy_s=1.0)},
        "the reference takes too long",
    ),
    "no kernel for the device": (lambda ns, folder: {"op": elsewhere, "checks": ["edges"]}, "no kernel for CPU"),
    "no kernel for a dtype": (
        lambda ns, folder: {
            "op": one_with(ns, raising(NotImplementedError("\"add\" not implemented for 'Float'"))),
            "checks": ["numerics"],
        },
        "narrow the declaration's dtypes",
    ),
    "a kernel that no sample reaches": (
        lambda ns, folder: {
            "op": one_with(ns, lambda x: x + 1, supports=lambda x: x.numel() > 1 << 40, name="wide"),
            "checks": ["kernels"],
        },
        "no sample reaches kernel",
    ),
    "no C compiler": (
        lambda ns, folder: {
            "op": one_with(ns, raising(RuntimeError("Failed to find C compiler. Please specify via CC"))),
            "checks": ["numerics"],
        },
        "no C compiler",
    ),
    "no C++ compiler": (
        lambda ns, folder: {
            "op": one_with(ns, raising(RuntimeError("InvalidCxxCompiler: No working C++ compiler found in g++"))),
            "checks": ["numerics"],
        },
        "no working C++ compiler",
    ),
    "a full disk": (
        lambda ns, folder: {"op": one_with(ns, raising(OSError(28, os.strerror(28)))), "checks": ["numerics"]},
        "the disk is full",
    ),
    "a device without a kernel": (
        lambda ns, folder: {"op": one_with(ns, lambda x: torch.zeros_like(x), "cuda"), "checks": ["kernels"]},
        "no kernel of the op has run: none is for cpu, audit it with --device cuda",
    ),
    "a process that is killed from outside": (
        lambda ns, folder: {"op": one_with(ns, kill_once(folder)), "checks": ["edges"], "isolate": True},
        "killed from outside",
    ),
}


@pytest.mark.parametrize("name", sampled(WAYS, 10))
def test_a_dropped_part_makes_the_verdict_incomplete(ns, tmp_path, name):
    MEANT.clear()
    make, reason = WAYS[name]
    report = audit(seed=1, **make(ns, tmp_path))
    assert report.verdict == "incomplete", report.headline
    assert reason in report.headline


@pytest.mark.parametrize(
    ("where", "function", "number"),
    [(os, "fork", errno.EAGAIN), (os, "pipe", errno.EMFILE), (tempfile, "TemporaryFile", errno.ENOSPC)],
)
@pytest.mark.parametrize("cuda", [torch.version.cuda, "13.0"], ids=["this torch", "torch for CUDA"])
def test_a_process_that_cannot_be_started_makes_the_verdict_incomplete(
    monkeypatch, working_forks, where, function, number, cuda
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(where, function, refuse(number))
    report = audit(scaled, checks=["numerics", "edges"], seed=1)
    assert report.verdict == "incomplete"
    assert f"no process can be started: {os.strerror(number)}" in report.headline
    assert len(report) == 2


def test_a_check_whose_time_ends_makes_the_verdict_incomplete(monkeypatch):
    calls = count()
    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: 0.0 if next(calls) < 3 else 1e12))
    report = audit(scaled, checks=["numerics"], seed=1)
    assert report.verdict == "incomplete"
    assert "stopped early" in report.headline


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mode_of_the_caller_drops_no_gradient(ns, mode):
    @sl.op(f"{ns}::doubled")
    def doubled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    doubled.backward(lambda grad, saved, needs: {"x": grad})
    with mode():
        report = audit(doubled, checks=["gradient"], seed=1, isolate=False)
    assert report.verdict == "failed", report.headline
    assert "d/dx" in report.findings[0].evidence


def test_a_compiler_that_is_switched_off_makes_the_verdict_incomplete(ns):
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        report = audit(one_with(ns, lambda x: x + 1), checks=["compile"], seed=1)
    assert report.verdict == "incomplete", report.headline
    assert "torch.compile has compiled nothing" in report.headline
