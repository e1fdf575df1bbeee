"""Inductor for a PrivateUse1 device in host memory. Imports torch only: generated packages carry a copy.

What Inductor leaves to ATen (products, convolutions) is called on the device; what it fuses are its own C++ loops over
the tensors' memory. With ``fallback_by_default`` in the options of ``torch.compile`` every op is called on the device.

Known to work on torch 2.11, 2.13.
"""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["INDUCTOR", "inductor"]

# What Inductor asks a device's module for, at the first compilation that meets the device.
INDUCTOR = ("CppWrapperCodegen", "PythonWrapperCodegen", "Scheduling", "WrapperFxCodegen")


def _host_calls(base: type, device: str) -> type:
    """``base``, calling a C++ kernel for ``device`` as it calls one for the CPU."""

    class HostCalls(base):
        def _generate_kernel_call_helper(self, name: str, args: Any, *, device: Any = None, **more: Any) -> None:
            import torch

            if device is not None and device.type == self._device:
                device = torch.device("cpu")
            super()._generate_kernel_call_helper(name, args, device=device, **more)

    HostCalls._device = device
    return HostCalls


class _Group(tuple[Any, ...]):
    """Sizes of a loop nest. The scheduler multiplies two to reindex loops, except on the CPU, whose loops are ours:
    no nest has the product that it gets, so it reindexes nothing here either."""

    __slots__ = ()

    def __mul__(self, other: Any) -> Any:
        return -1


def _host_loops(base: type) -> type:
    """``base``, C++ loops, for a device that the scheduler does not take for the CPU."""

    class HostLoops(base):
        def group_fn(self, sizes: Any) -> Any:
            return tuple(_Group(group) for group in super().group_fn(sizes))

    return HostLoops


@cache
def inductor(device: str) -> dict[str, Any]:
    """What ``device`` gives for each name in ``INDUCTOR``; device, streams and wrappers are handled as the CPU's."""
    from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
    from torch._inductor.codegen import common, wrapper
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    whole = _host_calls(wrapper.PythonWrapperCodegen, device)
    part = _host_calls(wrapper.SubgraphPythonWrapperCodegen, device)

    def create(is_subgraph: bool, name: Any, parent: Any, signatures: Any = None) -> Any:
        return part(name, parent, signatures) if is_subgraph else whole()

    whole.create = staticmethod(create)  # type: ignore[attr-defined]
    common.register_device_op_overrides(device, CpuDeviceOpOverrides())
    for name in (device, f"{device}:0"):
        register_interface_for_device(name, CpuInterface)
    return {
        "CppWrapperCodegen": CppWrapperCpu, "PythonWrapperCodegen": whole, "Scheduling": _host_loops(CppScheduling),
        "WrapperFxCodegen": WrapperFxCodegen,
    }  # fmt: skip
