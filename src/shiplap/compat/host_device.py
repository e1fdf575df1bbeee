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


@cache
def inductor(device: str) -> dict[str, Any]:
    """What ``device`` gives for each name in ``INDUCTOR``; its wrappers say "set device" as the CPU's do."""
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
    return {
        "CppWrapperCodegen": CppWrapperCpu, "PythonWrapperCodegen": whole, "Scheduling": CppScheduling,
        "WrapperFxCodegen": WrapperFxCodegen,
    }  # fmt: skip
