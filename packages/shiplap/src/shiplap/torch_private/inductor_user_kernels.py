"""Plain Triton functions as nodes of Inductor's graph, into which it may fuse later operations (since torch 2.13).

``torch._inductor.config.epilogue_fusion_user_defined_triton_kernel`` is off by default. Torch rewrites the one
``tl.store`` of a kernel, where the result is read by pointwise operations without other inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._inductor import config, ir
from torch._inductor.lowering import empty_strided
from torch._inductor.virtualized import V

FLAG = "epilogue_fusion_user_defined_triton_kernel"


def user_kernels_fuse() -> bool:
    """Return whether the installed torch has the flag, and it is on."""
    return hasattr(config, FLAG) and bool(config.epilogue_fusion_user_defined_triton_kernel)


def compiling_code() -> bool:
    """Return whether this graph becomes Python. A C++ wrapper or a package loads its launches in another way."""
    return not V.graph.cpp_wrapper and not V.graph.aot_mode


def user_kernel_node(
    kernel: Any,
    grid: Sequence[int],
    options: Mapping[str, int],
    arguments: Mapping[str, Any],
    tensors: Mapping[str, tuple[Any, Tensor]],
    output: tuple[str, Tensor],
) -> Any:
    """Return the output of a launch of ``kernel``.

    Args:
        kernel: a ``@triton.jit`` function, or one that Triton's interpreter runs.
        grid: the number of programs along each axis.
        options: Triton's own, such as ``num_warps``.
        arguments: numbers and compile-time values by parameter.
        tensors: by parameter the node of a tensor, and the fake whose strides it will have.
        output: the parameter that is written, and a fake of the result.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    name, fake = output
    # The kernel writes into a buffer of the graph, so that Inductor can plan its memory.
    out = empty_strided(list(fake.shape), list(fake.stride()), dtype=fake.dtype, device=fake.device)
    given = {
        parameter: ir.ExternKernel.require_exact_strides(value, list(like.stride()))
        for parameter, (value, like) in tensors.items()
    }
    ir.UserDefinedTritonKernel(
        kernel_idx=kernel_side_table.add_kernel(_with_options(kernel, options)),
        grid=[tuple([*grid, 1, 1][:3])],
        tma_descriptor_metadata={},
        kernel_args={**given, name: out, **arguments},
    )
    return out


def _with_options(kernel: Any, options: Mapping[str, int]) -> Any:
    """Return a kernel in the form in which Dynamo finds it: options of a launch are those of its only config."""
    import triton
    from triton.runtime import JITFunction

    jitted = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn)
    return triton.autotune(configs=[triton.Config({}, **options)], key=[])(jitted) if options else jitted
