"""Functions that lower rooms call and cannot import, since they lie in higher rooms.

They are registered by the import of this module, when ``shiplap.dispatch`` has been imported. No op can be declared
without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from shiplap.declare.kernel import Kernel, KernelTerms, template_kernel_makers
from shiplap.declare.sharding_rule import failure_hooks
from shiplap.declare.spec import OpSpec
from shiplap.declare.template import Template
from shiplap.dispatch import Op, compile_cache_key
from shiplap.dispatch.op import builders
from shiplap.lazy_imports import uncollected
from shiplap.tuning import compiled_templates


def _kernel_of_template(spec: OpSpec, terms: KernelTerms, template: Template) -> Kernel:
    """Return the kernel that runs ``template`` for calls outside compiled graphs. Inductor uses the same Triton
    template in graphs.

    ``declare`` calls this hook whenever a template is declared.
    """
    with uncollected():
        from shiplap.kernels.triton.template_kernel import TemplateKernel

    return TemplateKernel(spec, terms, template)


def _build_op(op: Op) -> None:
    """Compile the native C++ binding of ``op`` and everything else that its kernels need to run without Python.
    ``op.build()`` calls this hook.
    """
    from shiplap.kernels.build import build_op

    build_op(op)


def _lower_templates() -> None:
    """Register with Inductor, for each op that has templates by now, the function that lowers its calls. This hook runs
    at each trace, before torch reads its compile caches.
    """
    from shiplap.inductor.install import install_lowerings

    install_lowerings()


def _explain_sharding(op: Op, values: Sequence[Any], cause: Exception) -> bool:
    """Register the rules by which DTensor may shard ``op``, and return whether the failed call can be repeated.

    This is done only if ``values``, the arguments of the call, contain a DTensor. ``cause`` is the error of the call.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False  # there is no DTensor
    from shiplap.sharding import on_refused

    return on_refused(op, values, cause)


def _tune_templates(*request: Any) -> Any:
    """Return the stored or measured choice among the templates of an op that run only in compiled code. ``op.tune``
    calls this hook with ``request``, the arguments of ``shiplap.inductor.tune_templates.tune_templates``.
    """
    from shiplap.inductor.tune_templates import tune_templates

    return tune_templates(*request)


# At the import, so that the lock of this module lets other threads wait, and nothing is registered twice.
builders.append(_build_op)
template_kernel_makers["triton"] = _kernel_of_template
compile_cache_key.add_trace_listener(_lower_templates)
compiled_templates.template_tuners.append(_tune_templates)
failure_hooks.append(_explain_sharding)
