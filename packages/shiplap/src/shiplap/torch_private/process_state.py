"""State that torch and Python keep for the whole process, for checks of whether code has left it changed."""

from __future__ import annotations

import _imp
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from types import BuiltinFunctionType, CodeType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.nn.modules import module as modules
from torch.utils._contextlib import _DecoratorContextManager

deterministic: Any = torch.utils.deterministic  # torch gives it no types

COUNT_BY_MANAGEMENT, MANAGEMENT, MOST_STARTS = "PYTORCH_NVML_BASED_CUDA_CHECK", "libnvidia-ml.so.1", 64
OPEN_FILES, USED_BY_DRIVER = "/proc/self/fd", "/dev/nvidia-uvm"
_SHOWN = "aten::_cast_Byte"  # an operator for which no library has reason to register anything
_HOOKS = tuple(name for name in sorted(vars(modules)) if name.startswith("_global_"))
_PYTHON = re.compile(r"registered at (\S+\.py):\d+")


def frozen_code(name: str) -> CodeType | None:
    """Return the code object of a module that is frozen into the Python executable, or None if it is not frozen."""
    try:
        code: CodeType = _imp.get_frozen_object(name)
    except ImportError:
        return None
    return code


def process_settings() -> dict[str, Any]:
    """Return a mapping from name to value of the hooks and flags of torch that hold for all code in this process or
    thread. Equal values mean equal settings.
    """
    return {
        "hooks of all modules of torch": tuple(_count_hooks(vars(modules)[name]) for name in _HOOKS),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "fallbacks of torch": fallback_table(),
        "fast paths of torch": (
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.opt_einsum.enabled,
            torch.backends.opt_einsum.strategy,
        ),
        "torch.set_printoptions": tuple(vars(torch._tensor_str.PRINT_OPTS).items()),
        "torch.utils.deterministic": (
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,
        ),
        "anomaly detection": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    }


def set_deterministic(enabled: bool, *, warn_only: bool) -> None:
    """Set whether torch uses deterministic algorithms, as ``torch.use_deterministic_algorithms`` does. ``warn_only``
    says whether an operator without such an algorithm warns only.

    The public function also sets a flag of Inductor, and imports Inductor's configuration for that, which takes
    seconds. If a process has not imported it, this function leaves that flag alone. Inductor then does not read it
    before it is imported.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    else:
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def counting_by_management() -> Iterator[None]:
    """Return a context manager in whose body torch finds out by the management library of NVIDIA whether there is a
    GPU. Torch's compiler does so when it is imported, and would otherwise begin to use the driver, after which the
    process cannot be forked. The library is shut down afterwards.
    """
    before = os.environ.get(COUNT_BY_MANAGEMENT)
    os.environ[COUNT_BY_MANAGEMENT] = "1"
    try:
        yield
    finally:
        os.environ.pop(COUNT_BY_MANAGEMENT)
        os.environ |= {COUNT_BY_MANAGEMENT: before} if before is not None else {}
        with suppress(OSError, AttributeError):  # no such library
            library = ctypes.CDLL(MANAGEMENT)
            # Each start has to be undone, and the last one fails.
            for _ in range(MOST_STARTS):
                if library.nvmlShutdown():
                    break


def makes_context(method: MethodType) -> bool:
    """Return whether ``method`` is the one by which a decorator such as ``torch.no_grad()`` makes a context manager for
    each call of the function that it decorates.
    """
    kind = type(method.__self__)
    return issubclass(kind, _DecoratorContextManager) and method.__func__ is kind.clone


def forks_can_use_device() -> bool:
    """Return whether processes that are forked from this one now can use a GPU of CUDA. They cannot if this process has
    begun to use its driver, as the mere count of the GPUs does.
    """
    opened = [os.path.join(OPEN_FILES, name) for name in os.listdir(OPEN_FILES)]
    if any(os.readlink(file) == USED_BY_DRIVER for file in opened if os.path.islink(file)):
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _count_hooks(hooks: Any) -> int:
    """Return the number of hooks in the dict ``hooks``. For a flag, such as the one for full backward hooks, return 1
    if it is set and 0 if it is None.
    """
    return len(hooks) if isinstance(hooks, Mapping) else int(hooks is not None)


def fallback_table() -> str:
    """Return the dispatcher's table of fallbacks as a string. For each dispatch key, it has the kernel for operators
    that register none.
    """
    table: str = torch._C._dispatch_dump_table(_SHOWN)
    return table


def operators_of_torch() -> dict[str, str]:
    """Return a mapping from name to the dispatcher's dump, for each registered operator of torch and of other
    libraries. This takes 100 ms.
    """
    return {name: torch._C._dispatch_dump(name) for name in torch._C._dispatch_get_all_op_names()}


def registered_operators() -> set[str]:
    """Return the names of all registered operators, with and without their overloads, such as ``aten::mm``."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return {*names, *(name.partition(".")[0] for name in names)}


def torch_operator_types() -> tuple[type, ...]:
    """Return the classes of the objects in ``torch.ops`` that call an operator of the dispatcher."""
    return torch._ops.OpOverload, torch._ops.OpOverloadPacket


def operator_place(value: Any) -> str:
    """Return the name of the operator, such as ``aten::mm``, at whose place in ``torch.ops`` the object ``value`` lies.
    Return an empty string if it lies at no such place.
    """
    if type(value) not in torch_operator_types():
        return ""
    is_packet = type(value) is torch._ops.OpOverloadPacket
    name = vars(value).get("_qualified_op_name" if is_packet else "_name")
    if type(name) is not str:
        return ""
    library, _, operator = name.partition("::")
    at: Any = torch.ops
    for part in (library, operator) if is_packet else (library, *operator.partition(".")[::2]):
        at = vars(at).get(part or "default")
        if not hasattr(at, "__dict__"):
            return ""
    return name if at is value else ""


def overloads_of_torch() -> dict[str, Any]:
    """Return a mapping from the name of each object in ``torch.ops.aten`` and ``torch.ops.prims`` to the function that
    the object calls.
    """
    called: dict[str, Any] = {}
    for library in (torch.ops.aten, torch.ops.prims):
        for name, packet in list(vars(library).items()):
            if type(packet) is not torch._ops.OpOverloadPacket:
                continue
            called[f"{library.name}.{name}"] = packet._op
            overloads = [v for v in vars(packet).values() if type(v) is torch._ops.OpOverload]
            called |= {f"{library.name}.{name}.{v._overloadname}": v._op for v in overloads}
    return called


def altered_overloads(before: Mapping[str, Any], own: Callable[[Any], bool]) -> list[str]:
    """Return the names of objects in ``torch.ops`` that are new or call another function than in ``before``.

    ``before`` is an earlier result of ``overloads_of_torch``. An object is left out if ``own(function)`` is True for
    the function that it calls now.
    """
    now = overloads_of_torch()
    gone = [name for name in before if now.get(name) is not before[name]]
    # Torch fills its namespaces when names are first used, with builtin functions.
    new = [name for name in now.keys() - before.keys() if type(now[name]) is not BuiltinFunctionType]
    return [f"torch.ops.{name}" for name in (*gone, *new) if not own(now.get(name))]


def replaced_registrations(before: Mapping[str, str], own: Callable[[str], bool]) -> list[str]:
    """Return the names of operators whose registrations have changed since ``before``, an earlier
    ``operators_of_torch()``.

    Only changes by a file for which ``own(file)`` is False count.
    """
    now = operators_of_torch()
    return [
        name
        for name, told in before.items()
        if now.get(name) != told and _has_foreign_lines(told, now.get(name, ""), own)
    ]


def _has_foreign_lines(before: str, now: str, own: Callable[[str], bool]) -> bool:
    """Return whether ``now``, the dispatcher's dump of an operator, has new registrations since the dump ``before``.
    Those from files for which ``own(file)`` is True do not count.
    """
    known = set(before.splitlines())
    new = [line for line in now.splitlines() if line not in known and "registered at" in line]
    files = [_PYTHON.search(line) for line in new]
    return not all(file is not None and own(file.group(1)) for file in files)


def all_threads_config() -> Any:
    """Return the profiler configuration that lists operators of all threads, also of those that exist already.

    Return None if this torch has none. It is known to work on torch 2.11 and 2.13.
    """
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


@contextmanager
def shared_onnx_registry() -> Iterator[None]:
    """Return a context in which torch makes its registry of translations to ONNX once, and each export uses a copy.

    Making the registry takes seconds.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    make: Any = ONNXRegistry.from_torchlib
    known: dict[tuple[Any, ...], Any] = {}

    def copied(*args: Any, **kwargs: Any) -> Any:
        """Return a copy of the registry of translations for these arguments. The first call with them makes the
        registry.
        """
        key = (*args, *kwargs.items())
        if key not in known:
            known[key] = make(*args, **kwargs)
        registry = copy(known[key])
        # The lists are copied as well, since an export may add to them.
        registry.functions = {target: list(entries) for target, entries in registry.functions.items()}
        return registry

    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(copied)):
        yield
