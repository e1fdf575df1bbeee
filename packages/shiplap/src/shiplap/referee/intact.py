"""Whether code that is judged has replaced functions of Python, torch or the referee in its process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Set
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from shiplap.compat.standing import operators_of_torch, taken_over
from shiplap.referee.genuine import code_of, is_genuine, is_theirs, is_trusted

__all__ = ["Snapshot"]

WITH_CLASSES = (  # modules whose classes are looked at as well
    "torch.testing",
    "torch.cuda",
    "torch.nn",
    "torch.optim",
    "torch.autograd",
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


def _owners(modules: Mapping[str, Any], known: Set[int]) -> Iterator[tuple[str, Any]]:
    """Modules of Python, torch, installed packages and ours, and some of their classes, with their names.

    ``known``: the ids of those that are left out.
    """
    seen, folders = set(known), dict[str, bool]()
    for name, value in (("torch.Tensor", torch.Tensor), ("torch.ops.aten", torch.ops.aten)):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
    for name, module in modules.items():
        if type(module) is not ModuleType or name in ("__main__", "__mp_main__") or id(module) in seen:
            continue
        file = vars(module).get("__file__")
        folder = os.path.dirname(file) if isinstance(file, str) else ""
        if folder not in folders:
            folders[folder] = not folder or is_trusted(folder)
        if not folders[folder] and not name.startswith(OURS):
            continue
        seen.add(id(module))
        yield name, module
        if name.startswith((OURS, *WITH_CLASSES)):
            for value in list(vars(module).values()):
                if isinstance(value, type) and id(value) not in seen and _is_of(value, name):
                    seen.add(id(value))
                    yield f"{name}.{value.__name__}", value


class _Owner(NamedTuple):
    """A module or a class, what it held, and the code of the functions among that."""

    name: str
    value: Any
    held: dict[str, Any]
    codes: dict[str, CodeType]

    @classmethod
    def of(cls, name: str, value: Any) -> _Owner:
        held = dict(vars(value))
        codes = {k: v.__code__ for k, v in held.items() if type(v) is FunctionType}
        if not isinstance(value, ModuleType):
            codes |= {k: c for k, v in held.items() if type(v) in DESCRIPTORS and (c := code_of(v)) is not None}
        return cls(name, value, held, codes)

    @property
    def untouched(self) -> bool:
        """Whether it holds the same objects, in the same order."""
        now = vars(self.value)
        return len(now) == len(self.held) and all(map(is_, now.values(), self.held.values()))

    def changed(self) -> list[str]:
        """Names of functions that are now somebody else's."""
        codes, replaced = self.codes, []
        if not self.untouched:
            now = dict(vars(self.value))
            other = {k for k, v in self.held.items() if now.get(k) is not v}
            replaced = [f"{self.name}.{k}" for k in self.held if k in other and _is_lost(self.held[k], now.get(k))]
            codes = {k: code for k, code in codes.items() if k not in other}
        held = self.held
        anew = [k for k, code in codes.items() if getattr(held[k], "__code__", None) is not code]
        anew = [k for k in anew if code_of(held[k]) is not codes[k]]  # of a descriptor it is in its function
        return [*replaced, *(f"the code of {self.name}.{k}" for k in anew)]


class Snapshot:
    """What functions were when it was taken.

    Args:
        known: an earlier one, of which everything that has not changed is taken over.
        thorough: whether the operators of torch are looked at as well, whatever may register them.
    """

    def __init__(self, known: Snapshot | None = None, *, thorough: bool = False) -> None:
        before: list[_Owner] = known._owners if known is not None else []
        self._modules = dict(sys.modules)
        new = {n: m for n, m in self._modules.items() if known is None or n not in known._modules}
        self._owners: list[_Owner] = [o if o.untouched else _Owner.of(o.name, o.value) for o in before]
        self._owners += [_Owner.of(n, v) for n, v in _owners(new, {id(o.value) for o in before})]
        self._operators = operators_of_torch() if thorough else {}

    def changed(self) -> list[str]:
        """Names whose functions are now somebody else's."""
        known = self._modules
        replaced = [f"sys.modules['{n}']" for n, m in list(sys.modules.items()) if _is_another(n, m, known.get(n))]
        replaced += [name for owner in self._owners for name in owner.changed()]
        return [*replaced, *(taken_over(self._operators, is_trusted) if self._operators else ())]

    def threads(self) -> int:
        """How many other threads of Python run code that is neither Python's own nor torch's, nor wait in it."""
        mine, count = threading.get_ident(), 0
        for ident, frame in sys._current_frames().items():
            genuine = True
            at: FrameType | None = frame
            while ident != mine and at is not None:
                genuine = genuine and is_trusted(at.f_code.co_filename) and is_genuine(at.f_code)
                at = at.f_back
            count += not genuine
        return count


def _is_another(name: str, now: Any, before: Any) -> bool:
    """Whether a module of somebody else has the name of one that was there, or of one of Python.

    ``before``: what had that name; None if nothing had it.
    """
    if now is before or type(now) is not ModuleType:
        return False
    own = [v for v in vars(now).values() if type(v) is FunctionType]
    if before is not None:
        return not all(map(is_theirs, own))
    return name.partition(".")[0] in sys.stdlib_module_names and not all(
        is_trusted(v.__code__.co_filename) for v in own
    )


def _is_lost(before: Any, now: Any) -> bool:
    """Whether a function or a class was replaced by somebody else's."""
    return (callable(before) or isinstance(before, DESCRIPTORS)) and not is_theirs(now)
