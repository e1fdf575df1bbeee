"""``LibraryPlan``: the library that binds ops natively. Kernels of one kernel library share one translation unit."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from shiplap import safe_io
from shiplap.cached_property import cached_property
from shiplap.codegen.chosen import NativeChoice
from shiplap.codegen.native import NativeOp, native_source
from shiplap.declare.kernel import Kernel
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch import Op, registry
from shiplap.dispatch.out import has_out_variant
from shiplap.dispatch.registration import kernel_overload_names
from shiplap.errors import ShiplapError, error
from shiplap.kernels.c.library import load_symbol, locate_library
from shiplap.kernels.native.build_digest import FLAGS, INCLUDE, library_name_digest
from shiplap.kernels.native.cache import cache_folder
from shiplap.torch_private.dispatcher_library import name_of_edition

_made_plans: WeakKeyDictionary[NativeForm, NativeOp] = WeakKeyDictionary()
_DEVICE_NAMES = {"cpu": "the CPU", "cuda": "CUDA"}
DEVICES = tuple(_DEVICE_NAMES)  # device types for which there is native code


@dataclass(frozen=True)
class NativeKernelEntry:
    """The C ABI kernels of an op on a device type, as native code calls them.

    ``form`` has the C function of the kernel that is tried first, and the strides and alignment that it needs.
    ``forms`` has those of all kernels. ``native`` holds the data from which the C++ of the calls is generated.
    ``kernels`` is the file of the library with the C functions.
    """

    op: Op
    device: str
    form: NativeForm
    native: NativeOp
    kernels: Path
    forms: tuple[NativeForm, ...]


@dataclass(frozen=True)
class LibraryPlan:
    """The plan of a library with the native code of ops.

    Attributes:
        entries: the ops of this process that the library binds, by number in the library.
        place: the folder of the library, named by the digest of everything on which the library depends. It need not
            exist.
        source: the C++ of the library. It is empty if the library came with a package and is not built here.
        rule: the users who may own and write the files.
    """

    entries: Mapping[int, NativeKernelEntry]
    place: Path
    source: str = ""
    rule: safe_io.OwnershipRule = safe_io.CODE


class PlanInputs:
    """The inputs of plans that are made one after the other, while no op and no kernel is declared in between. They are
    the kernels of all ops that native code can bind, and the C++ that was generated for some of them.
    """

    def __init__(self) -> None:
        """Make the inputs of plans. The kernels are looked up when the first plan needs them."""
        self._sources: dict[tuple[int, ...], str] = {}

    @cached_property
    def entries(self) -> list[NativeKernelEntry]:
        """The kernels of all declared ops that native code can bind."""
        return [entry for op in registry.declared_op_list() for entry in bindable_entries(op)]

    def source_of(self, entries: Sequence[NativeKernelEntry]) -> str:
        """Return the C++ of a library with the kernels ``entries``, which are some of the attribute ``entries``."""
        key = tuple(map(id, entries))
        if key not in self._sources:
            self._sources[key] = native_source([e.native for e in entries])
        return self._sources[key]


def make_plan(op: Op, inputs: PlanInputs | None = None) -> LibraryPlan:
    """Return the plan of the native library for ``op``. The library also serves the ops that share a kernel library
    with it. Nothing is compiled. ``inputs`` are shared by the plans of several ops, and new ones if they are None.

    Raise ``SL404`` if C++ cannot bind the op.
    """
    inputs = inputs or PlanInputs()
    # A kernel that this machine cannot run is not looked at: its module may need Triton, which is not here either.
    forms = {device: form for device, form in _first_native_forms(op).items() if form.wanted}
    if not forms:
        raise _no_native_form_error(op, DEVICES)
    reasons = [_native_source(op, device, form).unfit for device, form in forms.items()]
    # A device that generated C++ can serve is enough for a library.
    if all(reasons):
        raise error(
            "SL404",
            where=op.spec.name,
            what="generated C++ cannot check calls of this op",
            got=reasons[0],
            expected="sizes and dtypes that generated C++ can check",
            fix="keep the Python binding, which handles this kernel, or declare sizes and dtypes that C++ can check",
        )
    for device, form in forms.items():
        try:
            _form_library_file(form)
        except ShiplapError as e:
            # Without nvcc and a GPU, the sources of a CUDA kernel are left uncompiled, and nobody needs them.
            if e.id != "SL420" or device != "cuda" or torch.cuda.is_available() or len(forms) < 2:
                raise
    entries = _related_entries(op, inputs.entries)
    if not entries:
        for form in forms.values():
            if not form.generated:
                load_symbol(form)  # which says what does not fit
    if not entries:  # another thread is declaring the op again, or its library is for another declaration
        raise error(
            "SL404",
            where=op.spec.name,
            got="no kernel that is bound to the op as it is declared now",
            expected="a C ABI kernel on the CPU or on CUDA",
            fix="build it when the op and its kernels are declared",
        )
    source = inputs.source_of(entries)
    return LibraryPlan(
        dict(enumerate(entries)),
        library_cache_folder(op) / library_name_digest(source, (*FLAGS, *extra_compiler_flags())),
        source,
    )


def library_cache_folder(op: Op) -> Path:
    """Return the cache folder of compiled libraries, which is created if it is missing. Raise ``SL406``, with the name
    of ``op``, if other users could write to it.
    """
    return cache_folder(op.spec.name)


def compiler_command(where: str) -> tuple[str, ...]:
    """Return the C++ compiler as the words of a command. They are the program's path and its flags. The environment
    variable ``CXX`` may state them, with a tool such as ``ccache`` in front. Raise ``SL405``, with ``where``, if a
    program is not on the ``PATH``.
    """
    programs, flags = requested_compiler()
    paths = [shutil.which(program) for program in programs]
    if not paths or None in paths:
        wanted = os.environ.get("CXX", "").strip() or "c++"
        raise error("SL405", where=where, got=f"no {wanted} on the PATH", expected="a C++20 compiler")
    return (*map(str, paths), *flags)


def extra_compiler_flags() -> list[str]:
    """Return the flags that follow the compiler in the environment variable ``CXX``. A library's digest covers them
    like Shiplap's own flags.
    """
    # Such as -march=native, with which a library of the same source is another one.
    return requested_compiler()[1]


def requested_compiler() -> tuple[list[str], list[str]]:
    """Return the programs in the environment variable ``CXX``, at most two (``ccache g++``), and the flags after them.
    If ``CXX`` is empty, the program is ``c++``. If its quotes do not match, both lists are empty.
    """
    wanted = os.environ.get("CXX", "").strip() or "c++"
    if shutil.which(wanted) is not None:  # a path may have blanks
        return [wanted], []
    try:
        words = shlex.split(wanted)
    except ValueError:
        words = []
    # Two for a launcher in front of the compiler, such as ccache.
    programs = [word for word in words[:2] if not word.startswith("-")]
    return programs, words[len(programs) :]


def compile_command(op: Op) -> list[str]:
    """Return the words of the command that compiles a native binding against torch, without source and output. Raise
    ``SL405``, with the name of ``op``, if there is no compiler.
    """
    home = Path(torch.__file__).parent
    include = ("-I", str(INCLUDE), "-isystem", str(home / "include"))
    return [*compiler_command(op.spec.name), *FLAGS, *include, f"-L{home / 'lib'}", "-ltorch_cpu", "-ldl"]


def bound_native_kernel(op: Op, device: str) -> tuple[NativeOp, NativeForm]:
    """Return the data for generating C++, and the C function, of the only C ABI kernel of ``op`` on ``device``. The C
    function comes with its library and the strides and alignment that it needs. Raise ``SL404`` if there is no such
    kernel or there are several.
    """
    form = _first_native_forms(op).get(device)
    if form is None:
        raise _no_native_form_error(op, (device,))
    if len(kernels := op.native_kernels(device)) > 1:
        got, fix = f"several kernels on {device}: {', '.join(k.name for k in kernels)}", "declare one of them alone"
        raise error("SL404", where=op.spec.name, got=got, expected=f"one C ABI kernel on {device}", fix=fix)
    return _native_source(op, device, form), form


def _no_native_form_error(op: Op, devices: Sequence[str]) -> ShiplapError:
    """Return the error ``SL404`` for an op without a kernel on ``devices`` that generated C++ can call first. The error
    names what is there instead, and its fix is the action for that case.
    """
    bound = [(device, kernels) for device in devices if (kernels := op.native_kernels(device))]
    where = " or on ".join([_DEVICE_NAMES.get(device, device) for device in devices])
    expected = f"a C ABI kernel on {where}, tried before all others"
    what, leave = "the op has no kernel that can be built", "call the op without building it, or"
    if not bound:
        got = f"no kernel on {where}, so that the reference runs, which needs no build"
        fix = f'{leave} bind a C function: {op.spec.opname}.kernel("{devices[0]}", sl.cabi(...)), or sl.source(...)'
        return error("SL404", what=what, where=op.spec.name, got=got, expected=expected, fix=fix)
    device, kernels = bound[0]
    first, named = kernels[0], f"the kernel {kernels[0].name!r} on {device}"
    if first.native is None:
        got = f"{named}, a Python function, which needs no build"
        fix = (
            f'{leave} bind a C function after it: {op.spec.opname}.kernel("{device}", sl.cabi(...)), or sl.source(...)'
        )
        if any(kernel.native is not None and kernel.supports is None for kernel in kernels):
            fix = f"bind {first.name!r} before the C kernels, since the kernel that is bound last is tried first"
    elif first.supports is not None:
        got = f"{named}, which asks supports=, a function of Python"
        fix = "bind the kernel without supports=, and name the dtypes that it takes with dtypes="
    else:
        got = f"{named}, whose launches C++ generates, beside {', '.join(k.name for k in kernels[1:])}"
        fix = f"declare the op with {first.name!r} as its only kernel on {device}"
    return error("SL404", what=what, where=op.spec.name, got=got, expected=expected, fix=fix)


def _forms_on(op: Op, device: str) -> list[NativeForm]:
    """Return the C functions of the kernels of ``op`` on ``device`` that generated C++ can call, in the order in which
    it tries them. Each comes with its library and the strides and alignment that it needs.
    """
    return [kernel.native for kernel in op.native_choices(device) if kernel.native is not None]


def _first_native_forms(op: Op) -> dict[str, NativeForm]:
    """Return a mapping from device type to the C function of the first kernel of ``op`` that generated C++ can call.
    The C function comes with its library and the strides and alignment that it needs. Device types without such a
    kernel are left out.
    """
    return {device: forms[0] for device in DEVICES if (forms := _forms_on(op, device))}


def form_is_native(op: Op, form: NativeForm) -> bool:
    """Return whether ``form``, the C function of a kernel, still belongs to a kernel of ``op`` that generated C++ can
    call. A kernel that was bound later may exclude it.
    """
    return any(form is other for device in DEVICES for other in _forms_on(op, device))


def _native_source(op: Op, device: str, form: NativeForm) -> NativeOp:
    """Return the data from which the C++ that runs ``op`` on ``device`` is generated. ``form`` is the C function of the
    kernel that is tried first there.

    As long as the data do not change, the same object is returned, because it caches the generated code.
    """
    made = _source_facts(op, device, form)
    kept = _made_plans.get(form)
    # The op may have been declared again, or another kernel bound.
    if kept is None or kept != made:
        kept = _made_plans[form] = made
    return kept


def _source_facts(op: Op, device: str, form: NativeForm) -> NativeOp:
    """Return a new object with the data from which the C++ that runs ``op`` on ``device`` is generated. They are the
    declaration, the names of the op's torch overloads, and the kernels. ``form`` is the C function of the kernel that
    is tried first.
    """
    names = kernel_overload_names(op.spec, op.needs_autograd)
    kernel, *others = op.native_choices(device)
    forms = _forms_on(op, device)
    return NativeOp(
        op.spec,
        form.symbol,
        tuple([name_of_edition(name, op.edition) for name in names]),
        device,
        kernel.workspace,
        # One packing of the arguments serves all kernels among which C++ picks.
        form.strided.intersection(*(other.strided for other in forms)),
        kernel.dtypes,
        has_out_variant(op.spec),
        kernel.space,
        op.rule,
        # The strictest alignment is a multiple of the others, which are powers of two.
        max(other.align for other in forms),
        op.edition,
        form.source(),
        tuple(_native_choice(each) for each in (kernel, *others)) if others else (),
    )


def _native_choice(kernel: Kernel) -> NativeChoice:
    """Return the data with which generated C++ can call ``kernel`` as one of several kernels of an op. They are its
    symbol, dtypes, workspace and config space.
    """
    assert kernel.native is not None
    return NativeChoice(kernel.native.symbol, kernel.dtypes, kernel.workspace, kernel.space)


def bindable_entries(op: Op) -> list[NativeKernelEntry]:
    """Return the kernels of ``op`` that native code can bind, as one ``NativeKernelEntry`` for each device type. A
    device type is left out if C++ cannot check its calls. It is also left out if a library of its kernels is missing or
    was built for another declaration.
    """
    entries = []
    for device, form in _first_native_forms(op).items():
        if not form.wanted:
            continue
        try:
            file, native, forms = _form_library_file(form), _native_source(op, device, form), _forms_on(op, device)
            # Loading the symbol checks the signature that the library was built with.
            there = form.generated or all(load_symbol(other) for other in forms)
            if not native.unfit and there:
                entries.append(NativeKernelEntry(op, device, form, native, file, tuple(forms)))
        except ShiplapError:  # its own call says what is wrong
            continue
    return entries


def _form_library_file(form: NativeForm) -> Path:
    """Return the library file that contains ``form``, the C function of a kernel.

    A generated function is compiled into the binding and has no library of its own. For such a function, return its
    symbol as a path. No other op has this symbol.
    """
    return Path(form.symbol) if form.generated else locate_library(form.library)


def _related_entries(op: Op, entries: list[NativeKernelEntry]) -> list[NativeKernelEntry]:
    """Return those of ``entries`` whose ops must be compiled together with ``op``. ``entries`` are the kernels of all
    ops by device type.

    The result has the kernels of ``op`` and of all ops that share a kernel library with it. It also has those of the
    ops that share one with these ops, and so on.
    """
    ops, files = {op.spec.name}, set[Path]()
    while True:
        more = {e.kernels for e in entries if e.op.spec.name in ops}
        ops |= {e.op.spec.name for e in entries if e.kernels in more}
        # Each round may reach further ops through a shared library, until none is new.
        if more == files:
            return [e for e in entries if e.op.spec.name in ops]
        files = more
