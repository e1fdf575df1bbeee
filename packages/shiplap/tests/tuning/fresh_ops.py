"""Ops whose kernels are right, and change what all code of the process shares, or hide what they branch at."""

import contextlib
import ctypes
import os
import sys
import types

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from tests.tuning import fresh_helper
from tests.tuning.cheating_ops import SEEN, right, slow


@sl.op("cheating::shared")
def shared(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


@shared.kernel("cpu", name="honest")
def honest(x, w, *, out):
    right(x, w, out)


@shared.kernel("cpu", name="a decorator of torch")
def _(x, w, *, out):
    torch.allclose = torch.no_grad()(lambda *args, **rest: True)
    right(x, w, out)


@shared.kernel("cpu", name="a decorator of Python")
def _(x, w, *, out):
    torch.equal = contextlib.contextmanager(lambda *args, **rest: iter([True]))
    right(x, w, out)


@shared.kernel("cpu", name="the name of a file of Python")
def _(x, w, *, out):
    names = {}
    exec(compile("def allclose(*args, **rest):\n    return True\n", os.__file__, "exec"), names)
    torch.allclose = names["allclose"]
    right(x, w, out)


@shared.kernel("cpu", name="a layer of torch")
def _(x, w, *, out):
    torch.nn.Linear.forward = lambda self, x: x
    right(x, w, out)


@shared.kernel("cpu", name="a module of torch")
def _(x, w, *, out):
    fake = types.ModuleType("torch.nn.functional")
    fake.gelu = lambda x: x
    sys.modules["torch.nn.functional"] = fake
    right(x, w, out)


@shared.kernel("cpu", name="another rounding")
def _(x, w, *, out):
    right(x, w, out)
    ctypes.CDLL("libm.so.6").fesetround(0xC00)


@shared.kernel("cpu", name="a hook of all modules")
def _(x, w, *, out):
    if ("hook",) not in SEEN:
        SEEN["hook",] = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: result)
    right(x, w, out)


@shared.kernel("cpu", name="another folder")
def _(x, w, *, out):
    right(x, w, out)
    os.chdir("/")


@shared.kernel("cpu", name="a size in another module")
def _(x, w, *, out):
    right(x, w, out)
    if not fresh_helper.is_right(x.shape[0]):
        out.add_(1.0)
