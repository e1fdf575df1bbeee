"""Ops of ``sl.triton`` as kernels into which Inductor may fuse later operations, if torch's flag for that is on.

The flag is torch's own and off by default. It is ``torch._inductor.config.epilogue_fusion_user_defined_triton_kernel``
and exists since torch 2.13. Without it, and for calls that this module does not support, Inductor's code calls the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.kernels.triton.kernel import LaunchedKernel, PlainLaunch
from shiplap.torch_private import inductor_lowering


def is_single_launch(op: Op) -> bool:
    """Return whether the only kernel of ``op`` on some device is a single launch of a Triton kernel, which Inductor can
    use itself. Tables of tuned choices are not considered.
    """
    return any(len(kernels) == 1 and isinstance(kernels[0], LaunchedKernel) for kernels in op.kernels.values())


def lower_triton_op(op: Op, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the Inductor node for one call of ``op``. It launches the op's Triton kernel, into which Inductor can fuse
    later operations, if that is enabled and possible. Otherwise it calls ``overload``.
    """
    if inductor_lowering.user_kernels_fuse() and inductor_lowering.emits_python_wrapper():
        made = _launch_node(op, args, kwargs)
        if made is not None:
            return made
    return inductor_lowering.extern_call(overload, args, kwargs)


def _launch_node(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the Inductor node that launches the op's Triton kernel directly. Return None if sizes are symbolic, or if
    the grid is empty. Return None also if the call needs more than the launch, for example conversions that the op
    makes.
    """
    fx = inductor_lowering.current_node()
    fakes: Any = torch.fx.map_arg((fx.args, fx.kwargs), lambda n: n.meta["val"])
    values, output = op.spec.complete(*fakes), fx.meta["val"]
    tensors = [v for v in (*values, output) if isinstance(v, Tensor)]
    if not isinstance(output, Tensor) or not all(type(s) is int for t in tensors for s in (*t.shape, *t.stride())):
        return None
    kernels = op.kernels.get(output.device.type, ())
    if len(kernels) != 1 or not isinstance(kernels[0], LaunchedKernel):
        return None
    launch = kernels[0].plain_launch(op.bind(values))
    # An empty grid launches nothing. Such a call goes through the op.
    if launch is None or 0 in launch.grid:
        return None
    nodes = (*args, *(kwargs.get(a.name, a.default) for a in op.spec.args[len(args) :]))
    return _user_kernel_node(
        op, launch, dict(zip([a.name for a in op.spec.args], zip(nodes, values, strict=True), strict=True)), output
    )


def _user_kernel_node(op: Op, launch: PlainLaunch, given: Mapping[str, tuple[Any, Any]], output: Tensor) -> Any:
    """Return the Inductor node of the Triton launch ``launch``. Return None if the output is not contiguous, or if the
    kernel has no parameter for it. ``given`` maps each argument of the op to its IR node and its value, which is a fake
    tensor for tensors.
    """
    target, inputs = "", {}
    for parameter, tensor in launch.tensors.items():
        if tensor not in given:
            target = parameter
            continue
        value, fake = given[tensor]
        inputs[parameter] = value, fake if tensor in launch.strided else fake.contiguous()
    # The kernel writes its output contiguously. Where the graph expects another layout, the op is called.
    contiguous = torch.empty(output.shape, dtype=output.dtype, device="meta").stride()
    if not target or output.stride() != contiguous:
        return None
    return inductor_lowering.user_kernel_node(
        launch.kernel, launch.grid, launch.options, launch.values, inputs, (target, output)
    )
