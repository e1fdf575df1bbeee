"""Ops whose kernels are right for the numbers of one call, or change what all code of the process shares."""

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from tests.tuning.cheating_ops import right, slow


@sl.op("cheating::scaled")
def scaled(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"], alpha: float = 1.0) -> Float[Tensor, "n m"]:
    return slow(x, w) * alpha


@scaled.kernel("cpu", name="honest")
def honest(x, w, alpha, *, out):
    right(x, w, out)
    out.mul_(alpha)


@scaled.kernel("cpu", name="a number that is always the same")
def _(x, w, alpha, *, out):
    right(x, w, out)


@scaled.kernel("cpu", name="a method that a class inherits")
def _(x, w, alpha, *, out):
    right(x, w, out)
    out.mul_(alpha)
    torch.Tensor.sum = lambda self, *args, **rest: self


@scaled.kernel("cpu", name="a module of torch in its package")
def _(x, w, alpha, *, out):
    right(x, w, out)
    out.mul_(alpha)
    torch.nn.functional = torch.testing


@scaled.kernel("cpu", name="a default of a function")
def _(x, w, alpha, *, out):
    right(x, w, out)
    out.mul_(alpha)
    torch.nn.functional.layer_norm.__defaults__ = (None, None, 1.0)


@scaled.kernel("cpu", name="a name that hides one of Python")
def _(x, w, alpha, *, out):
    right(x, w, out)
    out.mul_(alpha)
    torch.nn.functional.isinstance = lambda *args: True


@scaled.kernel("cpu", name="events that nobody hears")
def _(x, w, alpha, *, out):
    from shiplap.sandbox import interpreter_state

    right(x, w, out)
    out.mul_(alpha)
    interpreter_state.EVENTS = frozenset()


@scaled.kernel("cpu", name="a class of torch that loads")
def _(x, w, alpha, *, out):
    import torch.utils.data

    right(x, w, out)
    out.mul_(alpha)
    torch.utils.data.DataLoader.__iter__ = lambda self: iter(())


@scaled.kernel("cpu", name="a threshold of the garbage collection")
def _(x, w, alpha, *, out):
    import gc

    right(x, w, out)
    out.mul_(alpha)
    gc.set_threshold(0)


@scaled.kernel("cpu", name="a base of a layer")
def _(x, w, alpha, *, out):
    right(x, w, out)
    out.mul_(alpha)
    torch.nn.GELU.__bases__ = (type("Other", (torch.nn.Module,), {"__call__": lambda self, x: x}),)


@sl.op("cheating::chosen")
def chosen(x: Float[Tensor, "n k"], alpha: float = 1.0, times: int = 2, flag: bool = False) -> Float[Tensor, "n k"]:
    return x * alpha * times * (-1 if flag else 1)
