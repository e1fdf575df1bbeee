"""``Kernel``, the interface of one implementation of an op for one device type.

A Python function (``dispatch/python_kernel.py``), a C function (``kernels/c/declaration.py``) and a template that
Triton compiles (``kernels/triton/template_kernel.py``) are kernels. Callers use only the methods declared here. Each
has a default for kernels that do not support it. ``Implementation`` is code that can become a kernel. It is the
argument of ``Op.kernel(device, ...)``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Self, TypeAlias, TypedDict

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.choices import takes_members
from shiplap.declare.code_digest import code_digest
from shiplap.declare.code_parts import AnyValue, HasCode
from shiplap.declare.config import NO_CONFIG, Config, Configs, Default, Prior, Space, Values, read_space
from shiplap.declare.dim_expression import Expr
from shiplap.declare.named_parameters import bind_names
from shiplap.declare.native_interface import NativeForm
from shiplap.declare.signature import read_workspace
from shiplap.declare.spec import OpSpec
from shiplap.declare.template import Template
from shiplap.declare.values import Args, Outputs, Result, Supports
from shiplap.errors import error

# Only suggested in errors: torch itself decides which device types exist.
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla")
Rerun: TypeAlias = Callable[[Args], Result]  # runs a call that differs from one before it in addresses alone
Refill: TypeAlias = Callable[[Args, Outputs], None]  # the same into outputs that the caller owns


class KernelKeywords(TypedDict, total=False):
    """The keywords of ``Op.kernel``, whose docstring explains them."""

    name: str | None
    workspace: str | None
    dtypes: Iterable[str]
    supports: Supports | None
    configs: Configs | None
    default: Default | None
    prior: Prior | None
    strided: bool | Iterable[str]


@dataclass(frozen=True)
class KernelTerms:
    """The keywords with which a kernel was bound, as data.

    Attributes:
        name: the name of the kernel.
        device: its device type.
        code: the implementation from which the kernel was made.
        dtypes: the dtypes that the kernel accepts of those that an annotation such as ``Float`` admits. If it is empty,
            the kernel accepts all of them.
        supports: a function of the arguments. It returns True, or the reason why the kernel does not accept the call.
        workspace: the size of the scratch memory in bytes, or None.
        space: the configs, or None.
        strided: the tensor arguments that a Python kernel takes with any strides.
    """

    name: str
    device: str
    code: HasCode
    dtypes: tuple[str, ...] = ()
    supports: Supports | None = None
    workspace: Expr | None = None
    space: Space | None = None
    strided: frozenset[str] = frozenset()


class Kernel(HasCode):
    """One implementation of ``spec`` for one device type.

    Attributes:
        name, device, code, dtypes, supports, workspace, space: the declared terms, see :class:`KernelTerms`.
        condition: ``supports`` as a function of all arguments in declared order.
        config: the compile-time values of this variant.
        by_python: whether Python launches the kernel at each call. A compiled package cannot hold such a kernel.
        stays_in_python: whether native code could take over from Python, but never will in this process.
        can_repeat: whether :meth:`run_first_call` may return a function that repeats the call.
        compiles: whether :meth:`compile` can be called.
        template: the template from which it was rendered, or None.
        native: the C function of the kernel, which native code can call, or None.
        function: a Python function whose module is that of the kernel, or None.
    """

    by_python: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    can_repeat: bool = False
    template: Template | None = None
    native: NativeForm | None = None
    function: Callable[..., object] | None = None

    def __init__(self, spec: OpSpec, terms: KernelTerms) -> None:
        """Set the op and the terms under which the kernel was attached, such as its name, device type and workspace."""
        self.spec, self.name, self.device, self.code = spec, terms.name, terms.device, terms.code
        self.dtypes, self.supports, self.strided = terms.dtypes, terms.supports, terms.strided
        self.condition = None if terms.supports is None else _bind_supports(spec, terms.name, terms.supports)
        self.workspace, self.space = terms.workspace, terms.space
        self.config = NO_CONFIG
        self._variants: dict[Config, Self] = {}

    @property
    def identity(self) -> str:
        """A digest of the kernel's code and of the keywords with which it was attached."""
        return code_digest(self)

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield ``(text, value)`` for what the kernel's behaviour depends on. This is its code and the keywords with
        which it was attached.
        """
        yield f"kernel {self.workspace} {self.dtypes} {sorted(self.strided)}", self.code
        yield "terms", (self.supports, self.space)

    @abstractmethod
    def run_call(self, call: Binding) -> Outputs:
        """Run the kernel on a call with checked arguments. Return its newly allocated outputs in declared order."""

    @property
    def stays_in_python(self) -> bool:
        """Whether native code could take over the kernel's calls from Python, but never will in this process. It is
        false unless a subclass overrides it.
        """
        return False

    def run_into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Run the kernel on a call with checked arguments into ``outs``, which are contiguous and have the declared
        shapes. ``scratch`` is the workspace (scratch memory). If it is None, the kernel allocates one.
        """
        for out, value in zip(outs, self.run_call(call), strict=True):
            out.copy_(value)

    def run_first_call(self, call: Binding) -> tuple[Outputs, Rerun | None]:
        """Run the kernel on a call with checked arguments. Return ``(outputs, rerun)``. ``rerun`` is a function that
        repeats the call on tensors that differ only in their addresses. It is None if the kernel cannot repeat calls
        without checks.
        """
        return self.run_call(call), None

    def fill_first_call(self, call: Binding, outs: Outputs) -> Refill | None:
        """Run the kernel on a call with checked arguments into ``outs``. Return a function that repeats this on tensors
        that differ only in their addresses, or None if that is not possible.
        """
        self.run_into(call, outs, None)
        return None

    def compile(self, call: Binding) -> None:
        """Compile the code that ``call`` would launch, without launching it. Several threads may call this method at
        the same time. Raise ``NotImplementedError`` for a kernel that compiles nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} {self.name} compiles nothing")

    def why_refused(self, call: Binding) -> str:
        """Return the reason why the kernel does not accept this call, or an empty string if it does. The reason is the
        call's dtypes, or the result of the author's function ``supports``.
        """
        for dtype in call.dtypes.values() if self.dtypes else ():
            if str(dtype).removeprefix("torch.") not in self.dtypes:
                return f"it takes {' and '.join(self.dtypes)}, not {dtype}"
        verdict = True if self.condition is None else self.condition(*call.args)
        # True itself is required, since a reason in words is true as well.
        return "" if verdict is True else (verdict or "supports() returned False")

    def why_not_packaged(self, call: Binding) -> str:
        """Return the reason why a compiled package (a ``.pt2`` file) cannot contain the kernel for ``call``, or an
        empty string if it can.
        """
        return f"{self.name}, launched by Python on {self.device}"

    def variant_for_call(self, call: Binding) -> Self | str:
        """Return the kernel with its default compile-time values for ``call``. If the kernel does not accept the call,
        return the reason.
        """
        if reason := self.why_refused(call):
            return reason
        return self if self.space is None else self.with_config(self.space.default(call.env))

    def with_config(self, config: Config) -> Self:
        """Return a copy of this kernel with the compile-time values of ``config``. Each config has one copy, which is
        made at the first request.
        """
        variant = self._variants.get(config)
        if variant is None:
            made = copy.copy(self)
            made.config, made._variants = config, {}
            if config.items:
                made.configure(config.as_dict())
            # setdefault keeps one object if two threads come here at the same time.
            variant = self._variants.setdefault(config, made)
        return variant

    def configure(self, values: Values) -> None:
        """Set the compile-time values of this kernel. :meth:`with_config` calls this method once, on a new copy of the
        kernel.
        """
        raise NotImplementedError(f"{type(self).__name__} {self.name} takes no configs")


def _bind_supports(spec: OpSpec, kernel: str, supports: Supports) -> Supports:
    """Return ``supports`` as a function of all arguments in declared order. ``supports`` is the author's function that
    tests whether a kernel accepts a call. Raise ``SL122`` for a parameter of ``supports`` with an unknown name.
    """
    where = f"{spec.name}, supports= of kernel {kernel}"
    return bind_names(takes_members(spec, supports), [a.name for a in spec.args], id="SL122", where=where)


class Implementation(HasCode):
    """Code that can become a kernel of any op whose arguments it takes.

    Python functions are wrapped in an implementation (``dispatch/python_kernel.py``). ``sl.cabi(...)`` returns one. A
    library may define further ones. ``configs`` are the configs that it brings along, or None.
    """

    native_configs: ClassVar[bool] = False  # C code reads the values of a config: integers, by position
    takes_strided: ClassVar[bool] = False  # ``strided=`` of ``Op.kernel`` is for it
    configs: Configs | None = None  # those that it brings along, where ``Op.kernel`` gives none

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the kernel if its author has not chosen one."""

    @abstractmethod
    def bind(self, spec: OpSpec, terms: KernelTerms) -> Kernel:
        """Return the implementation as a kernel of the op ``spec``. ``terms`` are the checked keywords of
        ``Op.kernel``. Slow work, such as opening a library, is done at the first call.
        """

    def devices(self, device: str) -> tuple[str, ...]:
        """Return the device types on which ``Op.kernel(device, ...)`` attaches a kernel. By default it is ``device``
        alone.
        """
        return (device,)

    def keywords(self, spec: OpSpec) -> frozenset[str] | None:
        """Return the names of the compile-time values that this implementation takes from a config, or None if it
        accepts any name.
        """
        return None


def read_terms(
    spec: OpSpec,
    implementation: Implementation,
    device: str,
    *,
    name: str | None = None,
    workspace: str | None = None,
    dtypes: Iterable[str] = (),
    supports: Supports | None = None,
    configs: Configs | None = None,
    default: Default | None = None,
    prior: Prior | None = None,
    strided: bool | Iterable[str] = (),
) -> KernelTerms:
    """Return the keywords of ``Op.kernel`` as checked data. An index in ``device``, as in ``cuda:0``, is dropped.

    :class:`KernelTerms` describes ``workspace``, ``dtypes``, ``supports`` and ``strided``. ``configs``, ``default`` and
    ``prior`` make its ``space``. If ``name`` is None, it is the name of ``implementation``. If ``configs`` is None,
    they are those of ``implementation``. Raise ``SL105``, ``SL116`` or ``SL122`` for invalid keywords.
    """
    scratch = read_workspace(spec, workspace) if workspace else None
    taken = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    label, keywords = name or implementation.name, implementation.keywords(spec)
    _require_dtypes(f"{spec.name}, kernel {label}", taken)
    native, configs = implementation.native_configs, implementation.configs if configs is None else configs
    space = read_space(spec, label, configs, default, prior, keywords=keywords, native=native)
    free = read_strided(spec, f"kernel {label}", strided)
    if free and not implementation.takes_strided:
        got, fix = f"strided={strided!r}", "name what a C kernel takes with any strides in sl.cabi(..., strided=)"
        raise error("SL122", where=f"{spec.name}, kernel {label}", got=got, expected="a Python kernel", fix=fix)
    return KernelTerms(label, device.partition(":")[0], implementation, taken, supports, scratch, space, free)


def _require_dtypes(where: str, names: Iterable[str]) -> None:
    """Raise ``SL122`` unless each of ``names``, those of ``dtypes=``, is the name of a dtype of torch. A kernel for
    another name, such as ``half`` for ``float16``, would never run, and no call would report that.
    """
    for name in names:
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}":
            continue
        known = [str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)]
        near = get_close_matches(name, sorted({*known}), cutoff=0.5)
        if isinstance(dtype, torch.dtype):
            near = [str(dtype).removeprefix("torch.")]
        fix = f"write {near[0]!r} in dtypes=" if near else "write names of dtypes of torch in dtypes="
        got, expected = f"dtypes= with {name!r}", "names of dtypes of torch, such as 'float32' and 'bfloat16'"
        raise error("SL122", where=where, got=got, expected=expected, fix=fix)


def read_strided(spec: OpSpec, role: str, strided: bool | Iterable[str]) -> frozenset[str]:
    """Return the names of the tensor arguments that may have any strides according to ``strided=``. ``strided`` holds
    names, or is True for all tensors or False for none. Raise ``SL122`` for any other name. ``role`` names the function
    in the error.
    """
    tensors = [a.name for a in spec.tensors]
    if isinstance(strided, bool):
        return frozenset(tensors if strided else ())
    names = (strided,) if isinstance(strided, str) else tuple(strided)
    if unknown := next((n for n in names if n not in tensors), None):
        fix = "name tensor arguments of the op, or write strided=True for all of them"
        expected = f"names among {', '.join(tensors)}"
        raise error("SL122", where=f"{spec.name}, {role}", got=f"strided={unknown!r}", expected=expected, fix=fix)
    return frozenset(names)


def require_device_type(spec: OpSpec, device: object) -> None:
    """Raise ``SL122``, with a fix, unless ``device`` is the name of a device type of torch.

    A kernel for a device type that does not exist would never run, and no call would report that. If ``@op.kernel`` is
    written without parentheses, the decorated function is passed as the device.
    """
    where = f"{spec.name}, kernel"
    if isinstance(device, torch.device):
        fix = f'write @op.kernel("{device.type}")'
        raise error("SL122", where=where, got=f"{device!r}", expected='a text such as "cpu"', fix=fix)
    if not isinstance(device, str):
        got, expected = f"a {type(device).__name__} as the device type", 'a text such as "cpu"'
        raise error("SL122", where=where, got=got, expected=expected, fix='write @op.kernel("cpu")' * callable(device))
    try:
        torch.device(device)
    except RuntimeError:
        # PyTorch calls the devices of AMD cuda as well.
        near = "cuda" if device.lower() in ("gpu", "nvidia", "hip", "rocm") else ""
        near = near or next(iter(get_close_matches(device.lower(), DEVICE_TYPES)), "")
        fix = f'write @op.kernel("{near}")' if near else "import the package of the device before the kernel is bound"
        expected = f"{', '.join(DEVICE_TYPES)}, or a device type that a package has registered"
        raise error("SL122", where=where, got=f"the device type {device!r}", expected=expected, fix=fix) from None


# By language of a template, the function that makes a kernel of it. `shiplap/__init__.py` fills it, since this room may
# not import kernels/triton.
template_kernel_makers: dict[str, Callable[[OpSpec, KernelTerms, Template], Kernel]] = {}


def template_kernel(spec: OpSpec, template: Template) -> Kernel | None:
    """Return a kernel that runs ``template`` in calls outside compiled graphs, with its name and configs. Return
    None if templates of its language run only in compiled code.
    """
    make = template_kernel_makers.get(template.language)
    if make is None:
        return None
    configs = None if template.configs == ({},) else template.configs
    space = read_space(spec, template.name, configs, None, None)
    return make(spec, KernelTerms(template.name, template.device, template, space=space), template)
