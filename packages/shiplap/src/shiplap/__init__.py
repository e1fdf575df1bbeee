"""Shiplap: declare a kernel once, and it is a native, proven part of ``torch.compile``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shiplap.lazy_imports import names, uncollected

with uncollected():
    from shiplap.declare import OpSpec
    from shiplap.declare.kernel import Kernel, KernelTerms, template_kernel_makers
    from shiplap.declare.sharding_rule import failure_hooks
    from shiplap.declare.template import Template
    from shiplap.declare.values import Opaque
    from shiplap.dispatch import Op, adopt, compile_cache_key, op
    from shiplap.dispatch.op import builders
    from shiplap.errors import ShiplapError, ShiplapNotice
    from shiplap.tuning import compiled_templates, freeze, tune

if TYPE_CHECKING:
    from shiplap.audit import Finding, Report, audit
    from shiplap.doctor import Diagnosis, doctor
    from shiplap.inductor import Explanation, explain
    from shiplap.judge import judge
    from shiplap.kernels.c.declaration import cabi
    from shiplap.kernels.c.source import source
    from shiplap.kernels.triton.declaration import triton
    from shiplap.rewrite import rewrite, rewrites

__version__ = "0.1.0"
__all__ = [
    "Diagnosis",
    "Explanation",
    "Finding",
    "Op",
    "OpSpec",
    "Opaque",
    "Report",
    "ShiplapError",
    "ShiplapNotice",
    "adopt",
    "audit",
    "cabi",
    "doctor",
    "explain",
    "freeze",
    "judge",
    "op",
    "rewrite",
    "rewrites",
    "source",
    "triton",
    "tune",
]

# What a program that only calls ops does not need: loaded when it is first used. Name -> where it is.
_LATE = {
    "Diagnosis": "shiplap.doctor",
    "Explanation": "shiplap.inductor",
    "Finding": "shiplap.audit",
    "Report": "shiplap.audit",
    "audit": "shiplap.audit",
    "cabi": "shiplap.kernels.c.declaration",
    "doctor": "shiplap.doctor",
    "explain": "shiplap.inductor",
    "judge": "shiplap.judge",
    "rewrite": "shiplap.rewrite",
    "rewrites": "shiplap.rewrite",
    "source": "shiplap.kernels.c.source",
    "triton": "shiplap.kernels.triton.declaration",
}
_late = names(__name__, _LATE)


class _Package(ModuleType):
    """The type of the module ``shiplap``, which imports the names of ``_LATE`` at their first use.

    ``audit``, ``doctor``, ``judge`` and ``rewrite`` are functions and also packages. When any code imports
    ``shiplap.audit``, Python binds that package to the name ``audit`` of ``shiplap``. ``sl.audit(op)`` would then call
    a module. This class controls what is bound, so that the function keeps the name.
    """

    def __setattr__(self, name: str, value: object) -> None:
        """Bind a name of the package. A submodule that Python has imported does not replace the public function of the
        same name.
        """
        if not (name in _LATE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Import the public name ``name`` of ``_LATE`` from its module at its first use, bind it to the package and
        return it. Raise ``AttributeError`` for other names.
        """
        value = _late(name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        """Return the sorted attribute names of the package, including the public names that are not imported yet."""
        return sorted({*super().__dir__(), *_LATE})


def _kernel_of_template(spec: OpSpec, terms: KernelTerms, template: Template) -> Kernel:
    """Return the kernel that runs ``template`` for calls outside of compiled graphs. Inductor uses the same Triton
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


builders.append(_build_op)
template_kernel_makers["triton"] = _kernel_of_template
compile_cache_key.add_trace_listener(_lower_templates)
compiled_templates.template_tuners.append(_tune_templates)
failure_hooks.append(_explain_sharding)
# Only a class of the module can refuse an assignment: a module's own __getattr__ sees missing names alone.
sys.modules[__name__].__class__ = _Package
