"""PyTorch's operators as the installed torch declares and tests them, for the backend of a new device.

The declarations are read through torchgen's model of the files in torch's wheel. torchgen ships inside torch and
promises no stable API. Nothing of torchgen leaves this module: callers get plain values. Importing torch's test package
looks for devices once and freezes the flags of ``torch.backends``, so that a function here imports it when it is
called, by a process that has loaded its device and does nothing but test it. ``op_infos`` leaves the flags free, since
the judge calls it in the process of its user.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

# --- declarations -----------------------------------------------------------------------------------------------------


Kind = Literal["functional", "inplace", "out", "mutable"]


@dataclass(frozen=True)
class AtenArgument:
    """One argument of an overload. ``type`` is its type in the schema, and ``cpp`` that in C++. ``default`` is the
    default value as the schema writes it, or None. ``out`` is true for an output (``out=``), and ``mutated`` is true if
    the overload writes to the argument.
    """

    name: str
    type: str
    cpp: str
    default: str | None = None
    out: bool = False
    mutated: bool = False

    @property
    def tensor(self) -> bool:
        """Whether the argument is declared as a tensor, an optional tensor or a list of tensors."""
        return self.type.startswith("Tensor")


@dataclass(frozen=True)
class StructuredMeta:
    """The data for a call of ATen's shape inference of a structured group of overloads.

    ``cls`` is the C++ class, ``header`` its header, and ``call`` has the C++ arguments of its method ``meta``.
    ``iterator`` is true if the class derives from ``TensorIteratorBase``.
    """

    cls: str
    header: str
    call: tuple[str, ...]
    iterator: bool


@dataclass(frozen=True)
class AtenDeclaration:
    """One overload of an ATen operator as the installed torch declares it. ``name`` is ``base.overload``, such as
    ``add.out``.

    ``returns`` has the types of the results in the schema, and ``cpp_returns`` is the C++ type of the result.
    ``structured`` has the data of the shape inference, or is None. ``group`` has the names of the related overloads if
    this is the primary one. ``view`` is true if the result is a view. ``composite`` is ``"implicit"``, ``"explicit"``
    or empty, as for :func:`_composite_kind`. ``cpu`` is true if torch has a CPU kernel. ``delegate`` is the overload
    whose structured kernel is used, or empty. ``compares_devices`` is true if torch compares the devices of the
    arguments.
    """

    name: str
    schema: str
    base: str
    kind: Kind
    arguments: tuple[AtenArgument, ...]
    returns: tuple[str, ...]
    cpp_returns: str
    structured: StructuredMeta | None
    group: tuple[str, ...]
    view: bool
    tags: tuple[str, ...]
    composite: str
    cpu: bool
    delegate: str = ""
    compares_devices: bool = True  # before a kernel of an accelerator is called

    @property
    def identifier(self) -> str:
        """The name of the overload as a C++ or Python identifier, with ``_`` in place of the dot."""
        return self.name.replace(".", "_")

    @property
    def inputs(self) -> tuple[AtenArgument, ...]:
        """The arguments of the operator without those that are outputs (``out=``)."""
        return tuple(a for a in self.arguments if not a.out)

    @property
    def outs(self) -> tuple[AtenArgument, ...]:
        """The arguments of the operator that are outputs (``out=``)."""
        return tuple(a for a in self.arguments if a.out)


def _packaged_folder() -> Path:
    """Return the folder in which the package ``torchgen`` has its copy of ``native_functions.yaml``."""
    import torchgen

    return Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"


@cache
def aten_declarations() -> dict[str, AtenDeclaration]:
    """Return a mapping from a name such as ``add.out`` to the declaration, for every ATen overload of the installed
    torch. The first call takes about two seconds.
    """
    from torchgen.gen import get_grouped_native_functions, parse_native_yaml
    from torchgen.model import NativeFunction

    parsed = parse_native_yaml(str(_packaged_folder() / "native_functions.yaml"), str(_packaged_folder() / "tags.yaml"))
    by_name = {}
    for group in get_grouped_native_functions(parsed.native_functions):
        functions = [group] if isinstance(group, NativeFunction) else list(group.functions())
        for f in functions:
            declaration = _make_declaration(f, None if group is f else group, parsed.backend_indices)
            by_name[declaration.name] = declaration
    return by_name


def _make_declaration(f: Any, group: Any, indices: Any) -> AtenDeclaration:
    """Return the declaration of an overload from torchgen's function ``f``. ``group`` is torchgen's group of related
    overloads, or None. ``indices`` has the kernels of each backend.
    """
    from torchgen.api.types import NativeSignature
    from torchgen.context import native_function_manager

    # torchgen reports errors with the function that is being processed, which this context sets.
    with native_function_manager(f):
        signature = NativeSignature(f.func, symint=False)
        structured = (
            _make_structured(group, signature) if group is not None and group.structured and f is group.out else None
        )
        outs = {a.name for a in f.func.arguments.out}
        arguments = tuple(_make_argument(b, outs) for b in signature.arguments())
        returns = signature.returns_type().cpp_type()
    name = str(f.func.name)
    # The primary overload of a group is its structured out=, or else its functional one.
    primary = group is not None and f is (group.out if group.structured else getattr(group, "functional", None))
    others = group.functions() if primary else ()
    return AtenDeclaration(
        name=name,
        schema=str(f.func),
        base=f.root_name,
        kind=f.func.kind().name,
        arguments=arguments,
        returns=tuple(str(r.type) for r in f.func.returns),
        cpp_returns=returns,
        structured=structured,
        group=tuple(sorted(str(o.func.name) for o in others if o is not f)),
        view=f.is_view_op,
        tags=tuple(sorted(f.tags)),
        composite=_composite_kind(f),
        cpu=_has_cpu_kernel(f, group, indices),
        delegate=str(f.structured_delegate or ""),
        compares_devices=f.device_check.name != "NoCheck",
    )


def _make_argument(binding: Any, outs: set[str]) -> AtenArgument:
    """Return one argument of an operator, made from torchgen's ``binding`` of a C++ parameter. ``outs`` are the names
    of the arguments that are outputs.
    """
    # dtype, layout, device and pin_memory share one TensorOptionsArguments; each binding is one of its fields.
    a = getattr(binding.argument, binding.name) if not hasattr(binding.argument, "type") else binding.argument
    annotation = getattr(a, "annotation", None)
    mutated = bool(annotation is not None and annotation.is_write)
    return AtenArgument(binding.name, str(a.type), binding.nctype.cpp_type(), a.default, binding.name in outs, mutated)


def _make_structured(group: Any, signature: Any) -> StructuredMeta:
    """Return the data for a call of the shape inference of a structured operator. ``group`` is torchgen's group of its
    overloads, and ``signature`` the C++ signature of the caller.
    """
    from torchgen.api import meta, structured
    from torchgen.api.translate import translate

    call = translate(signature.arguments(), structured.meta_arguments(group), method=False)
    return StructuredMeta(
        cls=f"at::meta::structured_{meta.name(group)}",
        header=f"ATen/ops/{group.out.root_name}_meta.h",
        call=tuple(e.expr for e in call),
        iterator=group.out.structured_inherits == "TensorIteratorBase",
    )


def _composite_kind(f: Any) -> str:
    """Return whether an operator is composed of other operators, as a string.

    Return ``"implicit"`` if autograd records those other operators, and ``"explicit"`` if it records the operator
    itself. Return an empty string for an operator that is not composed.
    """
    if f.has_composite_implicit_autograd_kernel:
        return "implicit"
    if f.has_composite_explicit_autograd_kernel or f.has_composite_explicit_autograd_non_functional_kernel:
        return "explicit"
    return ""


def _has_cpu_kernel(f: Any, group: Any, indices: Any) -> bool:
    """Return whether torch has a CPU kernel of the operator ``f`` itself, or of the structured overload of its
    ``group`` to which it delegates. ``indices`` has the kernels of each backend.
    """
    from torchgen.model import DispatchKey

    index = indices[DispatchKey.CPU]
    return bool(index.has_kernel(f) or (f.structured_delegate and group is not None and index.has_kernel(group.out)))


def has_kernel(name: str, key: str = "PrivateUse1") -> bool:
    """Return whether a call of the ATen overload ``name`` on the dispatch key ``key`` finds a kernel. The kernel of a
    composite operator counts as well.
    """
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{name}", key))


# --- torch's own device tests: its operator database, and the maker of test cases for a device ------------------------


def op_infos() -> dict[str, Any]:
    """Return torch's ``OpInfo`` database, which has sample inputs of its operators. The keys are full names such as
    ``div.floor_rounding``.
    """
    with patch.object(torch.backends, "disable_global_flags", lambda: None):
        from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db}


def make_device_tests(
    name: str,
    check: Callable[[Any, str, torch.dtype, Any], None],
    infos: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    scope: dict[str, Any],
) -> type[unittest.TestCase]:
    """Return a class of test cases for the PrivateUse1 device, made by ``instantiate_device_type_tests``.

    The class is ``name`` + ``PRIVATEUSE1`` in ``scope``. It has a method ``{check.__name__}_{op}_{device}_{dtype}`` for
    each of ``infos`` and each of ``dtypes`` that it supports. The method calls ``check(case, device, dtype, op)``.
    Raise ``RuntimeError`` if no device was loaded before.
    """
    from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
    from torch.testing._internal.common_utils import TestCase

    method = ops(infos, allowed_dtypes=tuple(dtypes))(check)
    scope[name] = type(name, (TestCase,), {check.__name__: method, "__module__": scope["__name__"]})
    instantiate_device_type_tests(scope[name], scope, only_for=("privateuse1",))
    made: type[unittest.TestCase] | None = scope.get(f"{name}PRIVATEUSE1")
    # The test package reads the list of devices once, when it is imported, and makes no class for a later one.
    if made is None:
        raise RuntimeError("torch's tests know no PrivateUse1 device: load it before they are imported")
    return made


UNIQUE_VALUES = torch.ops.aten._unique2.default  # which torch.unique of all values calls
