"""PyTorch's own device tests: its operator database, and the maker of test cases for a device.

Importing torch's test package looks for devices once and freezes the flags of ``torch.backends``. A function here
therefore imports it when it is called, by a process that has loaded its device and does nothing but test it. The
package needs ``expecttest`` and ``hypothesis``.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch


def op_infos() -> dict[str, Any]:
    """Return the OpInfo database by full name (``"div.floor_rounding"``)."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db}


def module_infos() -> dict[str, Any]:
    """Return the database of ``torch.nn`` modules by name (``"nn.LSTM"``)."""
    from torch.testing._internal.common_modules import module_db

    return {module.name: module for module in module_db}


def make_device_tests(
    name: str,
    check: Callable[[Any, str, torch.dtype, Any], None],
    infos: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    scope: dict[str, Any],
) -> type[unittest.TestCase]:
    """Return test cases for the PrivateUse1 device, made by ``instantiate_device_type_tests``.

    The class is ``name`` + ``PRIVATEUSE1`` in ``scope``. It has a method ``{check.__name__}_{op}_{device}_{dtype}`` for
    each of ``infos`` and each of ``dtypes`` that it supports, which calls ``check(case, device, dtype, op)``.
    RuntimeError if no device was loaded before.
    """
    from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
    from torch.testing._internal.common_utils import TestCase

    method = ops(infos, allowed_dtypes=tuple(dtypes))(check)
    scope[name] = type(name, (TestCase,), {check.__name__: method, "__module__": scope["__name__"]})
    instantiate_device_type_tests(scope[name], scope, only_for=("privateuse1",))
    made: type[unittest.TestCase] | None = scope.get(f"{name}PRIVATEUSE1")
    # The test package reads the list of devices once, when it is imported, and makes no class for a later one.
    if made is None:
        raise RuntimeError("torch's tests know no PrivateUse1 device: load it before they are imported")
    return made
