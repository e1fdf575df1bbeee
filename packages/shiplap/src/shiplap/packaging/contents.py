"""The contents of a package: libraries that bind its ops, with seals and manifests, choices, and Triton kernels."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from shiplap import safe_io
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch import Op, registry
from shiplap.dispatch.package_folder import FOLDER
from shiplap.errors import ShiplapError, error
from shiplap.kernels.build import compile_sources
from shiplap.kernels.c.library import load_symbol, locate_library, source_libraries
from shiplap.kernels.native import binding
from shiplap.kernels.native import prebuilt as installed
from shiplap.kernels.native.build import LIBRARY, SEAL
from shiplap.kernels.native.build_plan import LibraryPlan, make_plan
from shiplap.kernels.triton import prebuilt as shipped
from shiplap.kernels.triton.kernel import compile_call, launched_kernels
from shiplap.tuning import packaged_choices
from shiplap.tuning.inputs import SEED, Inputs
from shiplap.tuning.recorded_calls import read_calls


@dataclass(frozen=True)
class PackageExtras:
    """The further contents of a package beside the bindings.

    Attributes:
        tuned: a table of choices that ``shiplap freeze`` wrote, or None.
        cubins: the architectures for which ``sl.triton`` kernels are compiled, such as 90 for compute capability 9.0.
        calls: the file of recorded calls (``SHIPLAP_RECORD``) for which they are compiled, or None.
    """

    tuned: Path | None = None
    cubins: tuple[int, ...] = ()
    calls: Path | None = None


@dataclass(frozen=True)
class BoundOp:
    """An op that the package binds natively. It holds the op's name, its device types, and the folder of the binding
    relative to the package.
    """

    op: str
    devices: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class PackageContents:
    """The list of what was put into one package.

    Attributes:
        package: the name under which the package is imported.
        bound: the ops that are native from the first call on.
        left_out: ``(op, reason)`` of the ops that stay with Python, such as those whose kernels are Python functions.
        libraries: the kernel libraries of the package, relative to it.
        cubins: ``(kernel, architecture)`` of each compiled Triton kernel.
        choices: the number of tuned choices.
    """

    package: str
    bound: tuple[BoundOp, ...]
    left_out: tuple[tuple[str, str], ...]
    libraries: tuple[str, ...]
    cubins: tuple[tuple[str, int], ...] = ()
    choices: int = 0


NO_EXTRAS = PackageExtras()


def fill_packages(modules: Iterable[str], within: Path, extras: PackageExtras = NO_EXTRAS) -> list[PackageContents]:
    """Import ``modules`` and put into each of their packages the native bindings of the ops that it declares. Return
    the contents of each package.

    Args:
        modules: the modules that declare ops, such as ``mylib.ops``.
        within: the folder from which the packages have to be imported.
        extras: a table of tuned choices and recorded calls for compiled Triton kernels, if they are to be added.

    Raises:
        ShippingError: ``SL308`` for a module or kernel library outside its folder, for modules that declare no op, and
            for extras that fit no op of the packages.
        LibraryError: ``SL401`` to ``SL403`` for a kernel library that is missing or of another declaration. ``SL405``
            if a binding cannot be compiled.
        CommandError: ``SL601`` for a module that cannot be imported, ``SL602`` for a file of the extras that cannot be
            read.
        TuneError: ``SL609`` for a table that is damaged or was made for another version of an op.
        LaunchError: ``SL619`` for a Triton kernel that generated C++ cannot launch.
    """
    # The import declares the ops, which are listed only then.
    packages = dict.fromkeys(_import_top_package(name, within) for name in modules)
    ops = {package: [op for op in registry.declared_op_list() if _top_package(op) == package] for package in packages}
    if not any(ops.values()):
        raise error(
            "SL308",
            where=", ".join(packages),
            got="no op is declared when it is imported",
            expected="modules that declare ops",
            fix="name the modules that declare the ops: --ops mylib.ops",
        )
    filled = [_fill_one(package, declared, within, extras) for package, declared in ops.items() if declared]
    for given, added, what in (
        (extras.tuned, any(each.choices for each in filled), "choices for an op of the package"),
        (extras.cubins, any(each.cubins for each in filled), "calls on CUDA of an op with an sl.triton kernel"),
    ):
        # An extra that is for nothing in the package is a mistake of the caller.
        if given and not added:
            where = str(extras.tuned if given is extras.tuned else extras.calls)
            fix = "pass a file that was recorded with the ops of this package, or leave the option out"
            raise error("SL308", where=where, got="nothing that is for this package", expected=what, fix=fix)
    return filled


def _import_top_package(name: str, within: Path) -> str:
    """Import the module ``name`` and return the name of its top package.

    Raise ``SL601`` if the import fails. Raise ``SL308`` if the package is a single file or lies outside ``within``.
    """
    try:
        import_module(name)
    # The module is foreign code, whose import may raise anything.
    except Exception as e:
        raise error("SL601", where=name, got=f"{type(e).__name__}: {e}", expected="a module of the wheel") from e
    package = name.partition(".")[0]
    roots = [Path(root).resolve() for root in getattr(sys.modules[package], "__path__", ())]
    # A module of one file has no folder for the libraries.
    if not roots:
        raise error(
            "SL308",
            where=package,
            got="a module of one file",
            expected="a package: a folder that can hold libraries",
            fix=f"make {package}.py the file {package}/__init__.py",
        )
    # Bindings would be written into the installed package, and be missing in the wheel.
    if not any(root.is_relative_to(within.resolve()) for root in roots):
        raise error(
            "SL308",
            where=package,
            got=f"it was imported from {roots[0]}",
            expected=f"the package in {within}",
            fix=f"remove {package} from this environment: an editable install comes before the wheel",
        )
    return package


def _top_package(op: Op) -> str:
    """Return the name of the top package of the module in which an op is declared."""
    return (op.reference.__module__ or "").partition(".")[0]


def _fill_one(package: str, ops: Sequence[Op], within: Path, extras: PackageExtras) -> PackageContents:
    """Fill the folder of ``package`` below ``within`` with what its declared ops ``ops`` need, and return the contents.
    They are native bindings (generated C++), kernel libraries, tuned choices and compiled GPU kernels.
    """
    # A namespace package may have several roots, of which one is inside the unpacked wheel.
    root = next(r for p in sys.modules[package].__path__ if (r := Path(p).resolve()).is_relative_to(within.resolve()))
    libraries = sorted(
        {
            _path_in_package(op, form, root)
            for op in ops
            for form in _native_forms(op)
            if not form.generated and form.library not in source_libraries
        }
    )
    folder = root / FOLDER
    # An earlier run may have left bindings of ops that are no longer declared.
    shutil.rmtree(folder, ignore_errors=True)
    # Before the plans: a binding opens the libraries of its kernels.
    libraries += sorted(_copy_compiled_sources(ops, folder, root))
    plans: dict[str, LibraryPlan] = {}
    bound, left_out = [], []
    for op in ops:
        try:
            plan = make_plan(op)
        except ShiplapError as e:
            # SL404 is the one error that means "this op stays with Python". Others are defects of the package.
            if e.id != "SL404":
                raise
            left_out.append((op.spec.name, e.got))
            continue
        plans[plan.place.name] = plan
        devices = tuple([e.device for e in plan.entries.values() if e.op is op])
        bound.append(BoundOp(op.spec.name, devices, f"{FOLDER}/{plan.place.name}"))
    for plan in plans.values():
        _copy_binding(plan, folder / plan.place.name)
    tuned = packaged_choices.write_packaged_table(folder, extras.tuned, ops) if extras.tuned is not None else 0
    cubins = _compile_cubins(folder, [op for op in ops if launched_kernels(op)], extras)
    return PackageContents(package, tuple(bound), tuple(left_out), tuple(libraries), tuple(cubins), tuned)


def _compile_cubins(folder: Path, ops: Sequence[Op], extras: PackageExtras) -> list[tuple[str, int]]:
    """Compile the Triton kernels of ``ops`` for the recorded calls and the GPU architectures in ``extras``, and write
    them to ``folder``. Return pairs of the name of a kernel's Python function and an architecture.
    """
    named = {op.spec.name: op for op in ops}
    calls = read_calls(extras.calls) if extras.calls is not None and extras.cubins else []
    for call in calls:
        if call.op in named and call.device.partition(":")[0] == "cuda":
            op = named[call.op]
            compile_call(
                op,
                # On the CPU: sizes, dtypes and strides decide a form, and no GPU is needed.
                Inputs(op, call.parsed, "cpu", SEED).call,
                extras.cubins,
                packaged_choices.packaged_kernels(folder, op),
            )
    rows = shipped.write_cubins(
        folder, [form for op in ops for kernel in launched_kernels(op) for form in kernel.native.compiled()]
    )
    return [(row.kernel, row.architecture) for row in rows]


def _native_forms(op: Op) -> list[NativeForm]:
    """Return the C functions of all kernels of an op, each once. Each comes with its library and the strides and
    alignment that it needs.
    """
    return list({id(k.native): k.native for ks in op.kernels.values() for k in ks if k.native is not None}.values())


def _path_in_package(op: Op, form: NativeForm, root: Path) -> str:
    """Return the path of the library of ``form``, the C function of a kernel of ``op``, relative to the package folder
    ``root``.

    Raise ``SL308`` if it lies outside, and ``SL401`` to ``SL403`` if it is missing or does not fit the declaration.
    """
    path = form.library.resolve()
    if not path.is_relative_to(root):
        raise error(
            "SL308",
            where=f"{op.spec.name}, kernel {form.symbol}",
            got=f"the kernel library {form.library}",
            expected=f"a file in {root}",
            fix="build the library into the package, and pass sl.cabi(Path(__file__).with_name('lib....so'), ...)",
        )
    locate_library(path)
    # Raises SL403 now for a library that was built for another declaration.
    load_symbol(form)
    return str(path.relative_to(root))


def _copy_compiled_sources(ops: Sequence[Op], folder: Path, root: Path) -> set[str]:
    """Compile the source kernels of ``ops`` and copy their libraries below ``folder``. Return the libraries' paths
    relative to the package folder ``root``.
    """
    copied = set()
    for op in ops:
        compile_sources(op)
        for form in _native_forms(op):
            if form.library in source_libraries:
                built = locate_library(form.library)
                place = folder / built.parent.name
                place.mkdir(parents=True, exist_ok=True)
                # Without the keyed seal, which only the building user could check.
                for name in (LIBRARY, SEAL, built.name):
                    safe_io.copy_whole(built.with_name(name), place / name)
                copied.add(str((place / built.name).relative_to(root)))
    return copied


def _copy_binding(plan: LibraryPlan, folder: Path) -> None:
    """Compile the library of ``plan`` and copy it into ``folder`` with its seal (digest) and a manifest. A library in
    the cache is not compiled again.
    """
    binding.compile_plan(plan, next(e.op for e in plan.entries.values()))
    # It must not exist: the folder of earlier bindings was removed.
    folder.mkdir(parents=True)
    for name in (LIBRARY, SEAL):
        safe_io.copy_whole(plan.place / name, folder / name)
    safe_io.write_bytes(folder / installed.MANIFEST, installed.library_manifest(list(plan.entries.values())))
