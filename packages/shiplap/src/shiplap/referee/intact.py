"""Whether code that is judged has replaced functions of Python, torch or the referee in its process."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from shiplap.referee.watch import is_trusted

__all__ = ["Snapshot"]

WATCHED = (
    "torch.testing",
    "torch.cuda",
    "torch.nn.functional",
    "torch.autograd",
    "torch.autograd.profiler",
    "torch.linalg",
    "torch.library",
    "os",
    "posixpath",
    "mmap",
    "json",
    "socket",
    "struct",
)
OURS = "shiplap."
DESCRIPTORS = (property, staticmethod, classmethod)


def _is_of(value: type, module: str) -> bool:
    """Whether a class belongs to a module: of ours where it was written, of torch wherever torch wrote it."""
    return value.__module__ == module if module.startswith(OURS) else value.__module__.startswith("torch")


def _code(value: Any) -> CodeType | None:
    """The code of a function, a method or the getter of a property."""
    inner = value.fget if isinstance(value, property) else value
    inner = inner.__func__ if isinstance(inner, (MethodType, staticmethod, classmethod)) else inner
    return inner.__code__ if isinstance(inner, FunctionType) else None


class Snapshot:
    """What public functions were when it was taken."""

    def __init__(self) -> None:
        self._owners: list[tuple[str, Any]] = [("builtins", builtins), ("time", time), ("torch", torch)]
        self._owners += [("torch.Tensor", torch.Tensor), ("torch.nn.Module", torch.nn.Module)]
        self._owners += [(n, m) for n in WATCHED if isinstance(m := sys.modules.get(n), ModuleType)]
        self._owners += [(n, m) for n, m in list(sys.modules.items()) if n.startswith(OURS) and m is not None]
        for name, module in [o for o in self._owners if o[0].startswith((OURS, *WATCHED))]:
            own = [c for c in vars(module).values() if isinstance(c, type) and _is_of(c, name)]
            self._owners += [(f"{name}.{c.__name__}", c) for c in own]
        self._before = {name: dict(vars(owner)) for name, owner in self._owners}
        self._codes = {name: {k: _code(v) for k, v in before.items()} for name, before in self._before.items()}

    def changed(self) -> list[str]:
        """Names whose functions are now somebody else's."""
        replaced = []
        for name, owner in self._owners:
            now = vars(owner)
            for key, before in self._before[name].items():
                value = now.get(key)
                if not (callable(before) or isinstance(before, DESCRIPTORS)):
                    continue
                if value is not before and self._foreign(value):
                    replaced.append(f"{name}.{key}")
                elif value is before and _code(value) is not self._codes[name][key]:
                    replaced.append(f"the code of {name}.{key}")
        return replaced

    def threads(self) -> int:
        """How many other threads of Python run code that is neither Python's own nor torch's, nor wait in it."""
        mine, count = threading.get_ident(), 0
        for ident, frame in sys._current_frames().items():
            files: list[str] = []
            at: FrameType | None = frame
            while ident != mine and at is not None:
                files.append(at.f_code.co_filename)
                at = at.f_back
            count += any(not is_trusted(f) for f in files)
        return count

    def _foreign(self, value: Any) -> bool:
        """Torch and Python replace functions of theirs as well, when further parts of them are imported."""
        code = _code(value)
        if code is None:
            module = str(getattr(type(value), "__module__", ""))
            return not module.startswith("torch")
        return not is_trusted(code.co_filename)
