"""Inductor for a PrivateUse1 device in host memory. Imports torch only: generated packages carry a copy.

Matrix products and convolutions, which Inductor leaves to ATen, run on the device. Code that Inductor fuses runs as its
own C++ loops over the tensors' memory. With ``fallback_by_default`` in the options of ``torch.compile`` every op is
called on the device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

# The names that Inductor looks up in a device's module, at the first compilation for the device.
INDUCTOR = ("CppWrapperCodegen", "PythonWrapperCodegen", "Scheduling", "WrapperFxCodegen")


class _LoopSizes(tuple[Any, ...]):
    """Sizes of a loop nest, whose products are never equal.

    The scheduler multiplies two of them to reindex loops, except on the CPU. The loops here are those of the CPU, and
    no nest has the product -1, so nothing is reindexed here either.
    """

    __slots__ = ()

    def __mul__(self, other: Any) -> Any:
        return -1


def _host_loops() -> type:
    """Return Inductor's C++ loops for a device that Inductor does not treat as the CPU.

    The generated loops are those of the CPU, so the CPU is the current device while they are written.
    """
    import torch
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.virtualized import V

    host = torch.device("cpu")

    class HostLoops(CppScheduling):
        def group_fn(self, sizes: Any) -> Any:
            return tuple(_LoopSizes(group) for group in CppScheduling.group_fn(self, sizes))

        def codegen_node(self, node: Any) -> Any:
            with V.graph.set_current_device(host):
                return CppScheduling.codegen_node(self, node)

        def flush(self) -> Any:
            with V.graph.set_current_device(host):
                return CppScheduling.flush(self)

    return HostLoops


@cache
def inductor(device: str) -> dict[str, Any]:
    """Return the code generators of ``device`` by the names in ``INDUCTOR``. Devices, streams and wrappers are the
    CPU's.
    """
    from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
    from torch._inductor.codegen import common, wrapper
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    common.register_device_op_overrides(device, CpuDeviceOpOverrides())
    # Inductor looks a device up under either spelling, with and without its index.
    for name in (device, f"{device}:0"):
        register_interface_for_device(name, CpuInterface)
    return {
        "CppWrapperCodegen": CppWrapperCpu,
        "PythonWrapperCodegen": wrapper.PythonWrapperCodegen,
        "Scheduling": _host_loops(),
        "WrapperFxCodegen": WrapperFxCodegen,
    }
