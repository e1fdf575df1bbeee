"""``package_model(program, path)``: one ``.pt2`` that contains the ops of the model, for torch's own loader.

AOTInductor's package holds a model as a library, which calls ops through torch's dispatcher. Here another library takes
its place, under its name. When a loader opens it, it loads the ops beside it, then the model, and exports the model's
functions. The package is therefore loaded by one call, ``aoti_load_package`` in Python and ``AOTIModelPackageLoader``
in C++, in a process without Shiplap and without the ops.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from shiplap import safe_io
from shiplap.codegen.environment import render_source
from shiplap.dispatch import Op, registry
from shiplap.dispatch.fake import refuse_python_in_package
from shiplap.errors import ArgumentError, ShiplapError, error, writing
from shiplap.kernels.native.build_plan import compiler_command, make_plan
from shiplap.kernels.native.deploy import DeployedLibrary, make_on_demand_library
from shiplap.kernels.triton.kernel import compile_call, launched_kernels
from shiplap.packaging.fixed_floats import refuse_fixed_floats
from shiplap.packaging.tags import DAMAGED, shares_cxx_runtime
from shiplap.safe_io.work_folders import work_folder
from shiplap.torch_private.dynamo import compile_package, processor_features
from shiplap.torch_private.graph_nodes import node_value, operator_name, overload_of
from shiplap.torch_private.symbolic_sizes import concrete_calls, size_bounds

MODELS = "/data/aotinductor/"  # where an archive has its models
ALIGNMENT = 64  # bytes, as in torch's own archives, whose files may be mapped
_NONE: Mapping[str, object] = {}
# The program of a child process that tests whether a package can be loaded.
_LOAD = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"


@dataclass(frozen=True)
class PackedModel:
    """A compiled model that was written to a file. It holds the path, the names of the ops that the file contains, and
    the size of their libraries in bytes.
    """

    path: Path
    ops: tuple[str, ...]
    size: int


def package_model(
    program: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    *,
    options: Mapping[str, object] = _NONE,
    architectures: Iterable[int] = (),
    checks: bool = True,
) -> PackedModel:
    """Compile ``program`` with AOTInductor into one file that contains the libraries of its ops.

    ``torch._inductor.aoti_load_package(path)`` and ``torch::inductor::AOTIModelPackageLoader(path)`` load the file,
    without Shiplap and without Python. If the process already has an op, from its declaration or another package, that
    op is used.

    Args:
        program: the result of ``torch.export.export``.
        path: the file to write, ``model.pt2``.
        options: Inductor's settings by name, such as ``{"max_autotune": True}``.
        architectures: the devices for which kernels of ``sl.triton`` are compiled, 90 for compute capability 9.0. The
            default is the current device. Each kernel is compiled for the sizes of the example. If a size is a symbol,
            it is also compiled for multiples of 16 and for odd numbers near that of the example. Kernels that the
            process has compiled for other arguments (see ``compile_ahead``) are added.
        checks: whether the package checks its inputs at each call and raises ``RuntimeError``. It checks their number,
            dtypes, devices, ranks, strides and bounds, and sizes that have to be equal. The environment variable
            ``AOTI_RUNTIME_CHECK_INPUTS=0`` switches that off in a process.

    The loaders' ``get_metadata()`` returns the release of torch, the processor, the ops and the bounds of the inputs
    under names that begin with ``SHIPLAP_``. Another release of torch, or a processor without the features that the
    code uses, is refused when a package is loaded.

    Raises:
        KernelError: ``SL307`` for an op that only Python can run, before anything is compiled.
        LibraryError: ``SL404`` to ``SL406`` for an op that C++ cannot bind, and where nothing can be compiled.
        LaunchError: ``SL620`` for an op of ``sl.triton`` without compiled forms. ``compile_ahead`` compiles them.
        LibraryError: ``SL408`` if the compiler links the C++ runtime into libraries and such a library ends the
            process.
        ShippingError: ``SL324`` if a float that follows from a size that varies is fixed in the program. ``SL325`` if
            Inductor compiles it for fewer sizes than it was exported for.
        CommandError: ``SL602`` if the file cannot be written.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise error(
            "SL140",
            what="an argument is of another type",
            where="package_model(...)",
            got=f"program of type {type(program).__name__}",
            expected="what torch.export.export returns",
            fix="pass torch.export.export(model, args), where args is a tuple of example arguments",
        )
    # First, since the compilation takes minutes and an op may be refused at once.
    refuse_fixed_floats(program, str(path))
    ops = _ops_to_pack(program)
    _compile_forms(program, tuple(architectures) or _current_architecture())
    target = Path(path)
    with work_folder("model") as scratch:
        made = make_on_demand_library(ops, str(target)) if ops else None
        plain = scratch / target.name
        compile_package(program, plain, {**options, "aot_inductor.metadata": _describe(program, ops, options)})
        _refuse_narrowed(program, target)
        _refuse_broken(plain, target)
        checked = _input_checks(program) if checks else None
        plain = _add_front_libraries(plain, made, scratch, {"checks": checks, "inputs": checked})
        with writing(target, "the package"):
            # The temporary folder may be on another file system, from which a rename is impossible.
            safe_io.copy_whole(plain, target)
    size = sum(file.stat().st_size for file in (made.library, *made.kernels.values())) if made is not None else 0
    return PackedModel(target, tuple(op.spec.name for op in ops), size)


def _refuse_narrowed(program: torch.export.ExportedProgram, target: Path) -> None:
    """Raise ``SL325`` if a size of the compiled ``program`` has narrower bounds than it was exported with. An upper
    bound where the program has none is Inductor's limit of 32-bit indices, and is kept.
    """
    for name, ((least, most), (low, high)) in size_bounds(program).items():
        if low > least or (most is not None and high != most):
            got, expected = f"{name} in {low}..{high or ''}", f"{least}..{most or ''}"
            raise error("SL325", where=str(target), got=got, expected=expected)


def _describe(
    program: torch.export.ExportedProgram, ops: Iterable[Op], options: Mapping[str, object]
) -> dict[str, str]:
    """Return the metadata of a package as a mapping from name to string. They are the release of torch, the processor,
    the ops, and the inputs with the bounds of their sizes. Metadata that the caller gave in ``options`` are included.
    """
    ranges = {str(symbol): f"{bound.lower}..{bound.upper}" for symbol, bound in program.range_constraints.items()}
    inputs = {
        name: f"{str(held.dtype).removeprefix('torch.')} [{', '.join(ranges.get(str(n), str(n)) for n in held.shape)}]"
        for name, held in _inputs_of(program).items()
        if isinstance(held, torch.Tensor)
    }
    given: Any = options.get("aot_inductor.metadata", {})
    facts = {
        "torch": torch.__version__,
        "processor": " ".join([platform.machine(), *processor_features()]),
        "ops": " ".join(op.spec.name for op in ops),
        "inputs": json.dumps(inputs),
    }
    return {**given, **{f"SHIPLAP_{name.upper()}": fact for name, fact in facts.items()}}


def _inputs_of(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Return a mapping from name to value of the inputs that a caller of the program passes. A tensor is represented by
    a fake tensor.
    """
    placed = {n.name: node_value(n) for n in program.graph.find_nodes(op="placeholder")}
    return {name: placed[name] for name in program.graph_signature.user_inputs if name in placed}


def _input_checks(program: torch.export.ExportedProgram) -> dict[str, Any] | None:
    """Return what the front library has to check of the program's inputs before the model reads them. Return None if an
    input is not a tensor.

    ``tensors`` of the result has the name, the rank and whether it must be contiguous, for each input. ``same`` has
    pairs of dims whose sizes must be equal, as (input, dim, input, dim). The model's own checks presuppose the number
    of inputs, their ranks, and the equality of sizes that share a symbol.
    """
    inputs, first = _inputs_of(program), dict[str, tuple[int, int]]()
    if not all(isinstance(held, torch.Tensor) for held in inputs.values()):
        return None
    described, same = list[tuple[str, int, str]](), list[tuple[int, int, int, int]]()
    for i, (name, held) in enumerate(inputs.items()):
        rows = [math.prod(held.shape[d + 1 :]) for d in range(held.dim())]
        described.append(
            # Compared as text, since sizes and strides may be symbols.
            (name, held.dim(), "true" if list(map(str, rows)) == list(map(str, held.stride())) else "false")
        )
        for d, size in enumerate(held.shape):
            # One symbol means equal sizes, which the model takes for granted.
            if not isinstance(size, int) and (before := first.setdefault(str(size), (i, d))) != (i, d):
                same.append((i, d, *before))
    return {"tensors": described, "same": same}


def _refuse_broken(package: Path, target: Path) -> None:
    """Raise ``SL408`` if ``package``, a compiled model, ends the process that loads it. This happens if a compiler has
    linked a second C++ runtime into its library.

    A library without a reference to a shared runtime is loaded in a child process to find out. The error names
    ``target``.
    """
    with zipfile.ZipFile(package) as archive:
        if all(shares_cxx_runtime(archive.read(name)) for name in _model_names(archive)):
            return
    # A load in this process would end this process.
    done = subprocess.run([sys.executable, "-P", "-c", _LOAD, str(package)], capture_output=True, check=False)
    # A negative status is a signal. An ordinary error of the load has causes that are not the compiler's.
    if done.returncode < 0:
        name = os.environ.get("CXX") or "the default compiler"
        ended = signal.Signals(-done.returncode).name
        raise error(
            "SL408",
            where=str(target),
            got=f"a library into which {name} has linked the C++ runtime; {ended} ends a process that loads it",
            expected="a library that uses the C++ runtime of torch, libstdc++.so",
            fix=f"set CXX to another compiler than {name}, such as CXX=/usr/bin/g++, and make the package again",
        )


def _model_names(archive: zipfile.ZipFile) -> list[str]:
    """Return the names of the files in a package's archive that are compiled models."""
    return [name for name in archive.namelist() if MODELS in f"/{name}" and name.endswith(".so")]


def _ops_to_pack(program: torch.export.ExportedProgram) -> list[Op]:
    """Return the declared ops of the program that its package has to contain, sorted by name. Raise ``SL307`` for an op
    that only Python can run.
    """
    needed: dict[str, Op] = {}
    for op, node in _op_calls(program):
        call = _bind_node(op, node)
        templates = call is not None and op.templates.get(call.device.type)
        if call is not None and not templates:
            refuse_python_in_package(op, call)
        # A template is in the model itself and needs no library.
        if op.spec.name not in needed and not (templates and _cannot_bind(op)):
            needed[op.spec.name] = op
    return [needed[name] for name in sorted(needed)]


def _current_architecture() -> tuple[int, ...]:
    """Return the architecture of the current CUDA device, such as 90, in a tuple. Without a device the tuple is
    empty.
    """
    if not torch.cuda.is_available():
        return ()
    major, minor = torch.cuda.get_device_capability()
    return (10 * major + minor,)


def _compile_forms(program: torch.export.ExportedProgram, architectures: tuple[int, ...]) -> None:
    """Compile the Triton kernels of the ops for the calls in ``program`` on the GPU architectures. Each symbolic size
    is replaced by concrete sizes.
    """
    for op, node in _op_calls(program) if architectures else ():
        if not launched_kernels(op):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), node_value)
        # A symbolic size stands for calls that need several forms.
        for call in concrete_calls(op.spec.complete(args, kwargs)):
            with suppress(ArgumentError):  # sizes that the declaration excludes: no call has them
                compile_call(op, op.bind(call), architectures)


def _op_calls(program: torch.export.ExportedProgram) -> Iterator[tuple[Op, Any]]:
    """Yield the calls of declared ops in the program as pairs (op, node), including those in branches and loops."""
    # Branches and loops are graph modules of their own.
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            op = registry.find_declared_op(operator_name(node.target)) if overload_of(node) is not None else None
            if op is not None:
                yield op, node


def _bind_node(op: Op, node: Any) -> Any:
    """Return the op's call at the graph node ``node``, whose arguments are fake tensors. Return None if they do not fit
    the op's declaration.
    """
    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), node_value)
        return op.bind(op.spec.complete(args, kwargs))
    except (TypeError, ShiplapError):  # torch reports more when it compiles the call
        return None


def _cannot_bind(op: Op) -> bool:
    """Return whether generated C++ cannot call the op's kernels. In that case the kernel that Inductor makes from the
    op's template is packaged inside the model.
    """
    try:
        make_plan(op)
    except ShiplapError:
        return True
    return False


# --- the archive ------------------------------------------------------------------------------------------------------


def _add_front_libraries(package: Path, ops: DeployedLibrary | None, scratch: Path, checks: Mapping[str, Any]) -> Path:
    """Return the path of a copy of ``package`` in the folder ``scratch``, with a front library in place of each model.

    A front library loads the ops and checks the inputs before it calls the model. The copy also has the models under
    other names, and the libraries of ``ops`` unless it is None. ``checks`` states what is checked. Raise ``SL308`` if
    the package has no model, or ``SL405`` if the compiler fails.
    """
    made = scratch / f"carrying-{package.name}"
    beside = {} if ops is None else {ops.name: ops.library, **ops.kernels}
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as target:
        if not (models := _model_names(source)):
            raise error(
                "SL308",
                where=package.name,
                got="no compiled model in the package",
                expected="a library of AOTInductor",
                fix="pass a .pt2 file that AOTInductor wrote",
            )
        for info in source.infolist():
            if info.filename not in models:
                _add_aligned(target, info.filename, source.read(info))
        # Beside each model, since the front library looks in its own folder.
        for folder in dict.fromkeys(PurePosixPath(name).parent for name in models):
            for name, path in beside.items():
                _add_aligned(target, str(folder / name), path.read_bytes())
        for name in models:
            inner = Path(scratch) / PurePosixPath(name).name
            safe_io.write_bytes(inner, source.read(name))
            # The model keeps its content and gets another name, because a loader opens the first library by the old
            # one.
            _add_aligned(target, f"{name}.model", inner.read_bytes())
            front = _compile_front_library(inner, ops.name if ops is not None else "", package.name, checks)
            _add_aligned(target, name, front.read_bytes())
    return made


def _add_aligned(target: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add the file ``name`` with ``content`` to the archive ``target``, uncompressed, at an offset that is a multiple
    of 64 bytes. Torch's own writer aligns files so, because a reader may map them into memory.
    """
    info = zipfile.ZipInfo(name)
    # A local header has 30 bytes, the name and the extra field, whose own header has 4.
    start = (target.fp.tell() if target.fp is not None else 0) + 30 + len(name.encode()) + 4
    # Readers skip extra fields that they do not know, so the padding may stand in one.
    padding = -start % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    target.writestr(info, content)


def _compile_front_library(model: Path, ops: str, where: str, checks: Mapping[str, Any]) -> Path:
    """Return the compiled library that replaces ``model``. It loads the library named ``ops``, unless the name is
    empty, then the model, and it exports the model's functions.

    Raise ``SL405``, with ``where``, if the compiler fails.
    """
    source, made = model.with_suffix(".front.cpp"), model.with_suffix(".front")
    functions = _exported_functions(model)
    words = {"ops": ops, "model": f"{model.name}.model", "features": processor_features(), **checks}
    text = render_source("package.cpp.jinja", functions=functions, **words)
    safe_io.write_text(source, text)
    home = Path(torch.__file__).parent
    include = [f"-isystem{home / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl"]
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"]
    # The ABI of std::string has to be that of torch's own libraries, or the functions are not found.
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    command = [*compiler_command(where), *flags, *include, "-o", str(made), str(source), *link]
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode:
        raise error("SL405", where=where, got=done.stderr.strip()[:2000], expected="a library")
    return made


def _exported_functions(library: Path) -> list[str]:
    """Return the names of the C functions of a model that a loader may look up, sorted. Raise ``SL405`` if the library
    is damaged.
    """
    try:
        with library.open("rb") as file:
            tables = [s for s in ELFFile(file).iter_sections() if isinstance(s, SymbolTableSection)]
            names = {symbol.name for table in tables if table.name == ".dynsym" for symbol in _defined_functions(table)}
    except DAMAGED as e:
        got, expected = f"a damaged library: {e}", "a model as torch has compiled it"
        raise error("SL405", where=str(library), got=got, expected=expected, fix="make the package again") from None
    # A loader looks up these functions alone.
    return sorted(name for name in names if name.startswith("AOTInductor"))


def _defined_functions(table: SymbolTableSection) -> Iterable[Any]:
    """Return an iterator over those symbols of ``table`` that are functions which the library defines."""
    symbols: Iterable[Any] = table.iter_symbols()
    return (s for s in symbols if s["st_info"]["type"] == "STT_FUNC" and s["st_shndx"] != "SHN_UNDEF")
