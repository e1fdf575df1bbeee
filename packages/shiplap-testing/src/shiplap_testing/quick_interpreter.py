"""Triton's interpreter without what it computes again for each call of a function and for each value of a kernel.

For each call of a device function it goes through all members of its language to find those that it has to put in the
place of the compiler's; after the first, that is none. For each value it builds the table that gives NumPy's type for
its own. Both took 30 % of the processor time of interpreted kernels (two busy cores, 2026-11-27), and are the same each
time. For each sum, difference and product of integers it computes with 64 bits whether the result fits its type, for an
assertion that it makes only with its option ``debug``, which is off; that took 40 % of the rest. Where a release of
Triton has no such functions, its interpreter is as quick as it is.

This file imports only what comes with Python, and can be run by its path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any


def quicken() -> None:
    """Replace two functions of Triton's interpreter, ``_patch_builtin`` and ``_get_np_dtype``, by faster ones that give
    the same results, and let it compute no conditions for assertions that it leaves out. Correct its conversions of a
    scalar to an index and of a condition to a mask, which it refuses with some releases of NumPy and Triton.

    Call this function before any kernel runs, in a process with the environment variable ``TRITON_INTERPRET=1``. In a
    version of Triton without these functions, nothing is changed.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        interpreter, language = import_module("triton.runtime.interpreter"), import_module("triton.language")
        # Looked up before anything is replaced: a release without one of them keeps its own.
        kept = interpreter._patch_builtin, interpreter._get_np_dtype, interpreter._patch_attr
        interpreter._patch_builtin = _patch_builtin(language.core.is_builtin, *kept[::2])
        interpreter._get_np_dtype = _numpy_type(language, kept[1])
        if tuple(map(int, import_module("triton").__version__.split(".")[:2])) < (3, 7):
            interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
        _skip_overflow_conditions(interpreter.interpreter_builder)
        interpreter.InterpreterBuilder.create_splat = _with_conditions(interpreter.InterpreterBuilder.create_splat)


def _with_index(original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does what ``original`` does, the function of Triton's interpreter that gives Triton's
    tensors their methods, and lets a scalar be taken for an int with each release of NumPy.

    Until Triton 3.6 the interpreter makes an int of an array with one element, which NumPy refuses from 2.5 on.
    """

    def patch(tensor: Any, scope: Any) -> None:
        """Give the class ``tensor`` the methods that it has until the end of ``scope``."""
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch


def _with_conditions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what ``original`` does, the method of the interpreter's builder that makes a block of
    a scalar, and keeps a condition one. Triton makes integers of it, and refuses a mask of integers from 3.9 on.
    """

    def splat(self: Any, block_type: Any, scalar: Any) -> Any:
        """Return a block of ``block_type`` with the value ``scalar``."""
        block = original(self, block_type, scalar)
        block.data = block.data.astype(bool) if scalar.data.dtype == bool else block.data
        return block

    return splat


def _skip_overflow_conditions(builder: Any) -> None:
    """Turn off the option ``sanitize_overflow`` of ``builder``, the builder of Triton's interpreter, if its option
    ``debug`` is off.

    With the first and without the second, Triton computes whether integers overflow and does not look at the result.
    """
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_builtin(is_builtin: Callable[..., bool], original: Callable[..., Any], patch: Callable[..., Any]) -> Any:
    """Return a faster function with the parameters of ``original``. That is the function of Triton's interpreter that
    replaces the functions of a module or class of Triton's language, such as ``tl.math``, by interpreted ones.

    The faster function determines only once which functions of a module or class have to be replaced. ``patch``
    replaces one of them, and ``is_builtin`` returns whether a function is still the compiler's.
    """

    @cache
    def names(part: Any) -> list[str]:
        """Return the names of the functions that ``original`` (argument of ``_patch_builtin``) replaces in ``part``, a
        module or class of Triton's language.
        """
        replaced: list[str] = []

        class Scope:
            def set_attr(self, _: Any, name: str, __: Any) -> None:
                """Record ``name``, the name of a function that ``original`` would replace. The function itself is not
                replaced.
                """
                replaced.append(name)

        original(part, None, Scope())
        return replaced

    def quick(part: Any, builder: Any, scope: Any) -> None:
        """Replace the functions of ``part``, a module or class of Triton's language, that are still the compiler's. The
        new functions use the interpreter's ``builder``, and ``scope`` restores the old ones later.
        """
        for name in names(part):
            if is_builtin(member := getattr(part, name)):
                patch(part, name, member, builder, scope)

    language = import_module("triton.language")
    for part in (language, language.core, language.core.tensor, language.math, language.core.tensor_descriptor_base):
        names(part)  # now, when nothing has been replaced
    return quick


def _numpy_type(language: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a faster function with the results of ``original``, which maps a type of Triton to the type of NumPy.

    It remembers the result for each name of an element type. ``language`` is the module ``triton.language``.
    """
    known: dict[str, Any] = {}
    block, pointer = language.block_type, language.pointer_type

    def quick(given: Any) -> Any:
        """Return the NumPy type for ``given``, a block or scalar type of Triton."""
        element = given.element_ty if isinstance(given, block) else given
        if isinstance(element, pointer):
            return original(element)
        if element.name not in known:
            known[element.name] = original(element)
        return known[element.name]

    return quick
