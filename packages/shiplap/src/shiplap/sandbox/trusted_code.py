"""Whether code is what the file that it names holds. Anybody may give code the name of a file that others trust."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from functools import partial
from importlib.machinery import SourceFileLoader
from os.path import realpath  # as it is now: what is judged may put another function in its place
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from shiplap.torch_private.process_state import frozen_code

OURS = os.path.join(os.path.dirname(os.path.dirname(realpath(__file__))), "")
PLACES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), os.path.dirname(torch.__file__))
# An environment may see the packages of another one, such as that of the system.
PACKAGES = tuple(p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages"))
TRUSTED = tuple(os.path.join(realpath(p), "") for p in (*PLACES, *PACKAGES))  # a separator ends each
SCRIPTED = (torch.jit.ScriptFunction, torch.nn.Module)  # code of somebody in an object of torch
WRAPPED = frozenset({MethodType, staticmethod, classmethod})
DEEP = 4  # how far what a function calls is followed through what it holds
_load, _prefix = SourceFileLoader.get_code, sys.pycache_prefix
_held: dict[str, frozenset[CodeType]] = {}
_began = time.time()


def is_trusted(file: str) -> bool:
    """Whether a file or folder of code is Python's, torch's or of an installed package.

    Names such as ``<frozen os>`` count. A folder whose name only begins as one of theirs does not.
    """
    return file.startswith("<frozen") if file.startswith("<") else f"{realpath(file)}{os.sep}".startswith(TRUSTED)


def is_genuine(code: CodeType) -> bool:
    """Whether a trusted file, or one of ours, holds this code."""
    file = code.co_filename
    if not is_trusted(file) and not realpath(file).startswith(OURS):
        return False
    if file not in _held:
        _held[file] = frozenset(_inside(_read(file)))
    return code in _held[file] or _is_new(file)


def forget() -> None:
    """Read all files anew: what was remembered of them lies where everybody can write."""
    _held.clear()


def _is_new(file: str) -> bool:
    """Whether a file was written after this process began, which runs what it held before."""
    try:
        return not file.startswith("<") and os.stat(file).st_mtime > _began
    except OSError:
        return False


def _read(file: str) -> CodeType | None:
    """What Python itself would run for a file; compiled before, as a rule."""
    if file.startswith("<"):
        return frozen_code(file.removeprefix("<frozen ").removesuffix(">"))
    if sys.pycache_prefix != _prefix:  # somebody else may have compiled it
        return None
    try:
        return _load(SourceFileLoader("it", file), "it")
    except (ImportError, OSError, SyntaxError, ValueError, EOFError):
        return None


def _inside(code: CodeType | None) -> list[CodeType]:
    if code is None:
        return []
    return [code, *(each for c in code.co_consts if isinstance(c, CodeType) for each in _inside(c))]


def _function(value: Any) -> Any:
    """The function of a method or of the getter of a property. What else it may be is not asked anything."""
    inner: Any = value.fget if type(value) is property else value
    return inner.__func__ if type(inner) in WRAPPED else inner


def code_of(value: Any) -> CodeType | None:
    """The code of a function, a method or the getter of a property."""
    inner = _function(value)
    return inner.__code__ if type(inner) is FunctionType else None


def is_theirs(value: Any, depth: int = DEEP) -> bool:
    """Whether what stands in the place of a function of Python or torch is theirs as well, with all that it holds.

    They replace functions of theirs when further parts of them are imported. A decorator of theirs around somebody
    else's function is not theirs.
    """
    code = code_of(value)
    if code is None:
        return type(value).__module__.startswith("torch") and not isinstance(value, SCRIPTED)
    inner = _function(value)
    module = sys.modules.get(str(inner.__globals__.get("__name__")))
    if not is_genuine(code) or module is None or vars(module) is not inner.__globals__:
        return False
    return all(map(partial(is_harmless, depth=depth - 1), _holds(inner)))


def _holds(function: FunctionType) -> list[Any]:
    """What a function may call beyond the names of its module."""
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return held


def is_harmless(value: Any, depth: int = DEEP) -> bool:
    """Whether it is no code, or code of Python or torch."""
    if isinstance(value, (FunctionType, MethodType, staticmethod, classmethod)):
        return depth > 0 and is_theirs(value, depth)
    if isinstance(value, (partial, type)):
        return is_trusted_module(value.func if isinstance(value, partial) else value)
    return not callable(value) or isinstance(value, (BuiltinFunctionType, ModuleType)) or is_trusted_module(type(value))


def is_trusted_module(value: Any) -> bool:
    """Whether a function or a class was written in a module of Python, torch or an installed package."""
    file = getattr(sys.modules.get(str(getattr(value, "__module__", ""))), "__file__", None)
    return file is None or is_trusted(str(file))


def is_module(value: Any) -> bool:
    """Whether it is a module of Python, torch or an installed package, and stands under its own name."""
    if not isinstance(value, ModuleType):
        return False
    file = vars(value).get("__file__")
    return sys.modules.get(value.__name__) is value and (file is None or is_trusted(str(file)))
