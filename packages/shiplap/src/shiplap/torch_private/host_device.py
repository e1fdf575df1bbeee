"""Dynamo and Inductor for a PrivateUse1 device. Imports torch only: generated packages carry a copy.

Dynamo asks an interface for devices and streams. Matrix products and convolutions, which Inductor leaves to ATen, run
on the device. Code that Inductor fuses runs as its own C++ loops over the tensors' memory, which must be the host's.
With ``fallback_by_default`` in the options of ``torch.compile`` every op is called on the device, in any memory.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

# The names that Inductor looks up in a device's module, at the first compilation for the device.
INDUCTOR = ("CppWrapperCodegen", "PythonWrapperCodegen", "Scheduling", "WrapperFxCodegen")


class _LoopSizes(tuple[Any, ...]):
    """The sizes of a group of loops, whose product with the sizes of another group is always -1.

    Inductor's scheduler multiplies the sizes of two groups to reindex loops, except for the CPU. The loops here are
    generated as for the CPU, and must not be reindexed either. No loop nest has the product -1, so the scheduler finds
    nothing to reindex.
    """

    __slots__ = ()

    def __mul__(self, other: Any) -> Any:
        """Return -1, which is the product of sizes of no loop nest. Inductor's scheduler then reindexes no loops."""
        return -1


def _host_loops(device: str, discrete: bool) -> type:
    """Return a subclass of Inductor's C++ scheduling, which groups and generates loops, for ``device``.

    The device's code runs on the host, so the CPU's loops are generated with the CPU as the current device. If
    ``discrete`` is true, the host cannot address the device's memory, and generating loops raises
    ``NotImplementedError``. If it is false, loops are generated.
    """
    import torch
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.virtualized import V

    host = torch.device("cpu")

    class HostLoops(CppScheduling):
        """Inductor's C++ scheduling, changed for a device whose code runs on the host."""

        def group_fn(self, sizes: Any) -> Any:
            """Return the sizes of a node's loops, in the groups that the CPU's scheduling makes. Inductor does not
            multiply the sizes of a group into one loop.
            """
            return tuple(_LoopSizes(group) for group in CppScheduling.group_fn(self, sizes))

        def codegen_node(self, node: Any) -> Any:
            """Generate the loops of a node as for the CPU. Raise ``NotImplementedError`` if ``discrete`` is true, since
            the host cannot address the device's memory.
            """
            if discrete:
                raise NotImplementedError(
                    f"Inductor's loops run on the host, which cannot address the memory of device {device!r}: compile "
                    "with options={'fallback_by_default': True} or backend='aot_eager', which call its operators"
                )
            with V.graph.set_current_device(host):
                return CppScheduling.codegen_node(self, node)

        def flush(self) -> Any:
            """Write the generated loops, with the CPU as the current device."""
            with V.graph.set_current_device(host):
                return CppScheduling.flush(self)

    return HostLoops


def _make_interface(device: str, module: ModuleType) -> type:
    """Return a class with Dynamo's interface of ``device``. Its functions are those of the device module ``module``."""
    import torch
    from torch._dynamo.device_interface import CpuInterface

    class Worker:
        """The interface of the device for Inductor's compiler processes, which must not touch the device.
        ``properties`` has the properties of each device, which were read before such a process started.
        """

        properties = tuple(module.get_device_properties(i) for i in range(module.device_count()))

        @staticmethod
        def get_device_properties(which: Any = None) -> Any:
            """Return the properties of a device, which were read before the worker process started. ``which`` is an
            index, a name, or None for the first device.
            """
            index = which if isinstance(which, int) else torch.device(which).index if which is not None else 0
            return Worker.properties[index or 0]

        @staticmethod
        def current_device() -> int:
            """Return the index of the current device."""
            return int(module.current_device())

        set_device = staticmethod(module.set_device)

    functions = (
        "current_device set_device device_count is_available stream current_stream set_stream synchronize "
        "get_device_properties memory_allocated is_bf16_supported"
    )
    names: dict[str, Any] = {name: staticmethod(getattr(module, name)) for name in functions.split()}
    names |= {
        "device": module.device,
        "Event": torch.Event,
        "Stream": torch.Stream,
        "Worker": Worker,
        "exchange_device": staticmethod(module._exchange_device),
        "maybe_exchange_device": staticmethod(module._maybe_exchange_device),
        "_set_stream_by_id": staticmethod(module._set_stream_by_id),
    }
    # The rest is the CPU's: no raw streams, and the capability "".
    return type(f"{device.capitalize()}Interface", (CpuInterface,), names)


class _InterfaceFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that registers the interface of a device when Dynamo's module of interfaces is imported. That
    import takes a second.
    """

    TARGET = "torch._dynamo.device_interface"

    def __init__(self, device: str, module: ModuleType) -> None:
        """Make a finder that registers the interface of ``device`` once Dynamo's module of interfaces is imported."""
        self._device, self._module = device, module
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of Dynamo's module for device interfaces, with this finder as its loader, at the first
        request for that module. Return None for other modules and later requests.
        """
        if name != self.TARGET or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return None, so that Python makes the module as usual."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Run Dynamo's module of device interfaces by its own loader. Then register the interface of the device with
        it.
        """
        self._loader.exec_module(module)
        _register_interface(self._device, self._module)


def _register_interface(device: str, module: ModuleType) -> None:
    """Register ``module``, which has functions such as ``synchronize`` and ``current_device``, with Dynamo. It is
    registered as ``device`` and as ``device`` with each index.
    """
    from torch._dynamo.device_interface import register_interface_for_device

    interface = _make_interface(device, module)
    # A device is looked up under either spelling, with and without its index.
    for name in (device, *(f"{device}:{i}" for i in range(module.device_count()))):
        register_interface_for_device(name, interface)


def register_interface(device: str, module: ModuleType) -> None:
    """Register ``module``, which has functions of ``device`` such as ``synchronize``, with Dynamo. This is done now, or
    as soon as Dynamo is imported.
    """
    # Up to torch 2.13 Inductor looks for code generators once in a process: a compilation came before the device.
    if common := sys.modules.get("torch._inductor.codegen.common"):
        getattr(common.init_backend_registration, "cache_clear", bool)()
    if _InterfaceFinder.TARGET in sys.modules:
        _register_interface(device, module)
    else:
        sys.meta_path.insert(0, _InterfaceFinder(device, module))


@cache
def inductor(device: str, discrete: bool) -> dict[str, Any]:
    """Return a mapping from the names in ``INDUCTOR`` to Inductor's code generators for ``device``. Register the CPU's
    device functions as those of ``device`` with Inductor, too.

    The device's code runs on the host. If ``discrete`` is true, the host cannot address the device's memory, and
    generating loops raises an error. Otherwise loops are generated as for the CPU.
    """
    from torch._inductor.codegen import common, wrapper
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    common.register_device_op_overrides(device, CpuDeviceOpOverrides())

    class HostWrapper(wrapper.PythonWrapperCodegen):
        """Inductor's generator of the Python code around the loops. The code enters no stream, since streams of the
        host's memory order nothing.
        """

        @staticmethod
        def create(*args: Any, **kwargs: Any) -> Any:
            """Return the wrapper generator that torch makes. It is an instance of this class unless torch chose a
            subclass.
            """
            # Torch's function names the class that it makes, so it cannot make an instance of this one.
            made = wrapper.PythonWrapperCodegen.create(*args, **kwargs)
            if type(made) is wrapper.PythonWrapperCodegen:
                made.__class__ = HostWrapper
            return made

        def codegen_cuda_stream_enter(self, stream_idx: int) -> Any:
            """Return the line object for a stream without writing the line. The generated code then enters no
            stream.
            """
            return wrapper.EnterCudaStreamContextLine(stream_idx=stream_idx)

        def codegen_cuda_stream_exit(self) -> None:
            """Do nothing, since no stream was entered."""

    return {
        "CppWrapperCodegen": CppWrapperCpu,
        "PythonWrapperCodegen": HostWrapper,
        "Scheduling": _host_loops(device, discrete),
        "WrapperFxCodegen": WrapperFxCodegen,
    }
