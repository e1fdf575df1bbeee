"""The generic lowering, registered with Inductor at the first trace of an op with templates. The import does
nothing.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from shiplap.dispatch import Op, compile_cache_key, registry
from shiplap.dispatch.state import OpState
from shiplap.errors import notice
from shiplap.torch_private import available

_installed: set[Any] = set()
_seen: set[Any] = set()  # asked whether they have a kernel that Inductor could see
_prepared: list[bool] = []  # whether Inductor lowers what graphs of ops that write to arguments have
# The rooms whose code decides how templates are lowered.
LOWERING = ("inductor", "torch_private", "codegen", "declare", "plan", "dispatch", "sampling")


def install_lowerings() -> None:
    """Register with Inductor the lowerings of all declared ops that need one and have none yet.

    These are ops with kernel templates, and ops that have a separate overload without autograd. Ops without templates,
    and fixes for ops that write to arguments, are registered only after the program has loaded Inductor.
    """
    loaded = "torch._inductor.lowering" in sys.modules
    if loaded and not _prepared and any(op.spec.mutated for op in registry.declared_op_list()):
        from shiplap.torch_private import inductor_lowering

        inductor_lowering.lower_storage_offsets()
        inductor_lowering.lower_lone_results()
        _prepared.append(True)
    # Asked once and not for each op: this runs at each trace of an op.
    lowers_templates = available("templates in Inductor's lowering")
    lowers_calls = loaded and available("calls from Inductor's code")
    kernels_fuse = lowers_calls and _user_kernels_fuse()
    for op in registry.declared_op_list():
        if op.templates:
            if not lowers_templates:
                say_opaque(op)
            else:
                if not {op.overload, op.below_autograd} <= _installed:
                    _register_lowering(op)
                continue
        if lowers_calls:
            # An op that nothing has to record has one overload for both.
            if op.below_autograd is not op.overload and op.overload not in _installed:
                _lower_below(op)
            if kernels_fuse and op.overload not in _seen:
                _make_kernel_visible(op)


def _user_kernels_fuse() -> bool:
    """Return whether Inductor can fuse neighbours into Triton kernels of users, and torch's flag for that is on."""
    from shiplap.torch_private import inductor_lowering

    return inductor_lowering.user_kernels_fuse()


def say_opaque(op: Op) -> None:
    """Issue a notice that compiled code calls ops with kernel templates, such as ``op``, as opaque functions. It is
    shown once. The reason is that no test run has verified templates on this version of torch.
    """
    notice(
        "templates are opaque",
        f"no template is used: no run has verified them on torch {torch.__version__}; compiled code calls "
        f"{op.spec.name} and other ops with templates as it calls any op ('shiplap env' lists what is verified)",
    )


def _lower_below(op: Op) -> None:
    """Make code that Inductor generates call ``op.below_autograd``, the overload without autograd, in place of
    ``op.overload``. Compiled code records no gradient at that point.
    """
    from shiplap.torch_private import inductor_lowering

    inductor_lowering.call_below(op.overload, op.below_autograd)
    _installed.add(op.overload)


def _make_kernel_visible(op: Op) -> None:
    """Register a lowering of ``op`` that gives Inductor the op's Triton kernel, so that Inductor can fuse neighbours
    into it. Register nothing if the op has no device on which a single launch of a Triton kernel is its only kernel.
    """
    from shiplap.inductor.triton_kernels import is_single_launch, lower_triton_op
    from shiplap.torch_private import inductor_lowering

    # Inductor's node for such kernels is one launch.
    if is_single_launch(op):
        inductor_lowering.call_below(op.overload, op.below_autograd)
        inductor_lowering.replace_lowering(op.overload, partial(lower_triton_op, op, op.below_autograd))
    _seen.add(op.overload)


def _register_lowering(op: Op) -> None:
    """Register :func:`lower_op` as Inductor's lowering of ``op``, which has kernel templates. It is registered for
    ``op.overload`` and for ``op.below_autograd``, the overload without autograd.
    """
    from shiplap.inductor.lower import lower_op
    from shiplap.torch_private import dynamo, inductor_lowering

    # A graph holds either overload: the outer one if nothing was recorded, the inner one below autograd.
    for overload in {op.overload, op.below_autograd}:
        inductor_lowering.replace_lowering(overload, partial(lower_op, op, op.below_autograd))
    _installed.update((op.overload, op.below_autograd))
    dynamo.prepare_cache_keys()


# What Inductor's code calls for a plain op, which no text of the op says: counted up where that changes.
_PLAIN = "4"


def _part_of_key(op: OpState) -> str:
    """Return the part of a compiled graph's cache key that the op ``op`` adds. It is a version number and, for an op
    with templates, a digest of the code that lowers them. If templates are not used on this version of torch, the word
    ``opaque`` replaces the digest.
    """
    if not op.templates:
        return _PLAIN
    if not available("templates in Inductor's lowering"):
        return f"{_PLAIN} opaque"
    from shiplap.tuning.key import rooms_digest

    return f"{_PLAIN} {rooms_digest(*LOWERING)}"


compile_cache_key.add_key_part(_part_of_key)
