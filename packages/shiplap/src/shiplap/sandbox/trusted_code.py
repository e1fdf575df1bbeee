"""Whether code is the content of the file that it names.

Code can be given the name of any file, such as one of torch. So the name alone does not make code trusted, and its
bytes are compared with those of the file.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from importlib.machinery import SourceFileLoader
from os.path import realpath  # bound now, since the candidate may replace ``os.path.realpath`` later
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from shiplap.torch_private.process_state import frozen_code

OURS = os.path.join(os.path.dirname(os.path.dirname(realpath(__file__))), "")
PLACES = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), os.path.dirname(torch.__file__))
# A virtual environment may include the packages of the system.
PACKAGES = tuple(p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages"))
TRUSTED = tuple(os.path.join(realpath(p), "") for p in (*PLACES, *PACKAGES))  # a separator ends each
# Since release 2.15, torch names the wrappers of this file by the context manager that they enter.
RENAMING_FILE = os.path.join(os.path.dirname(torch.__file__), "utils", "_contextlib.py")
RENAMED = ("decorate_context", "generator_context")
WRAPPER_CLASSES = frozenset({MethodType, staticmethod, classmethod})
_load, _prefix = SourceFileLoader.get_code, sys.pycache_prefix
_held: dict[str, frozenset[CodeType]] = {}
_began = time.time()


def is_trusted_file(file: str) -> bool:
    """Return whether a file or folder belongs to Python, torch or an installed package.

    A name such as ``<frozen os>`` belongs to Python. A folder whose name merely begins with the name of a trusted
    folder does not count.
    """
    return file.startswith("<frozen") if file.startswith("<") else f"{realpath(file)}{os.sep}".startswith(TRUSTED)


def is_genuine_code(code: CodeType) -> bool:
    """Return whether a code object is exactly the code that its file holds. The file must belong to Python, torch, an
    installed package or Shiplap. Return True also if such a file was written after this process began, since the
    process runs its earlier content.
    """
    file = code.co_filename
    if not is_trusted_file(file) and not realpath(file).startswith(OURS):
        return False
    if file not in _held:
        _held[file] = frozenset(_nested_code_objects(_read_compiled_code(file)))
    named = [code, *(code.replace(co_name=name) for name in (RENAMED if file == RENAMING_FILE else ()))]
    return any(each in _held[file] for each in named) or _is_newer_than_process(file)


def forget_files() -> None:
    """Clear the cache of the code objects that were read from files. The code under test runs in this process and could
    have changed the cache.
    """
    _held.clear()


def _is_newer_than_process(file: str) -> bool:
    """Return whether a file was written after this process began. The process then runs an earlier content of the
    file.
    """
    try:
        return not file.startswith("<") and os.stat(file).st_mtime > _began
    except OSError:
        return False


def _read_compiled_code(file: str) -> CodeType | None:
    """Return the code object that Python would load for a file, usually from its compiled cache. Return None if that is
    not possible or if the candidate may have written the cache.
    """
    if file.startswith("<"):
        return frozen_code(file.removeprefix("<frozen ").removesuffix(">"))
    if sys.pycache_prefix != _prefix:  # the compiled files may come from the candidate
        return None
    try:
        return _load(SourceFileLoader("it", file), "it")
    except (ImportError, OSError, SyntaxError, ValueError, EOFError):
        return None


def _nested_code_objects(code: CodeType | None) -> list[CodeType]:
    """Return a code object and all code objects nested in its constants. Return an empty list if ``code`` is None."""
    if code is None:
        return []
    return [code, *(each for c in code.co_consts if isinstance(c, CodeType) for each in _nested_code_objects(c))]


def _unwrap_function(value: Any) -> Any:
    """Return the function of a method, of a static or class method, or of the getter of a property. Return another
    value unchanged.

    Only exact types are unwrapped, so no code of the value runs.
    """
    inner: Any = value.fget if type(value) is property else value
    return inner.__func__ if type(inner) in WRAPPER_CLASSES else inner


def function_code(value: Any) -> CodeType | None:
    """Return the code object of a function, a method or the getter of a property. Return None for another value."""
    inner = _unwrap_function(value)
    return inner.__code__ if type(inner) is FunctionType else None


def is_trusted_module(value: Any) -> bool:
    """Return whether the module that a function or class names as its own is in ``sys.modules`` and has a file of
    Python, torch or an installed package.
    """
    file = getattr(sys.modules.get(str(getattr(value, "__module__", ""))), "__file__", None)
    return file is not None and is_trusted_file(str(file))


def is_installed_module(value: Any) -> bool:
    """Return whether a value is a module of Python, torch or an installed package. It must be in ``sys.modules`` under
    its own name.
    """
    if not isinstance(value, ModuleType):
        return False
    file = vars(value).get("__file__")
    return sys.modules.get(value.__name__) is value and (file is None or is_trusted_file(str(file)))
