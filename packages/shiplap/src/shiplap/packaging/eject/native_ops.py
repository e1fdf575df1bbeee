"""The C++ of ejected ops: a library by torch's stable ABI, printed from the same plan as the native bindings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiplap.codegen.environment import render_source
from shiplap.codegen.native import SCALAR, NativeOp, describe_op
from shiplap.declare.cpp_expression import quote_cpp
from shiplap.declare.schema import public_schema, schema_text
from shiplap.dispatch import Op
from shiplap.dispatch.registration import core_overload_name
from shiplap.errors import ShiplapError
from shiplap.kernels.c.declaration import CKernel
from shiplap.kernels.c.header import header_text
from shiplap.kernels.c.library import locate_library, source_libraries
from shiplap.kernels.native.build_digest import FLAGS, INCLUDE
from shiplap.kernels.native.build_plan import bound_native_kernel
from shiplap.kernels.native.source_library import INCLUDES, SUFFIX, SourceLibrary, gencode_flag
from shiplap.packaging.eject.copied_source import CannotCopy
from shiplap.plan.rules import GRADIENTS_ENABLED

REFUSAL = re.compile(r'\brefuse\("SL\d+", ')  # ids of a catalogue that ejected code does not have


@dataclass
class NativePart:
    """The C++ files of a package, and the libraries that its ``build.py`` compiles.

    ``files`` holds the contents of files, and ``copies`` the files that are copied unchanged, both by path in the
    package. ``units`` describes the kernel libraries to compile, by file name. ``libraries`` describes the libraries of
    torch ops to compile.
    """

    files: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    libraries: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class NativeKernel:
    """A C function that implements ``op`` on the device type ``device``. ``code`` holds the data from which the C++
    that calls it is generated. ``file`` is the name of the library that contains it.
    """

    op: Op
    device: str
    code: NativeOp
    file: str

    @property
    def symbol(self) -> str:
        """The name of the C function that implements the op."""
        return self.code.symbol


def native_kernel(op: Op, device: str) -> CKernel | None:
    """Return the kernel that is tried first for calls of an op on a device if it is a C function. Otherwise return
    None.
    """
    kernels = op.native_kernels(device)
    return kernels[0] if kernels and isinstance(kernels[0], CKernel) else None


def read_native_kernel(op: Op, device: str) -> NativeKernel:
    """Return the C function that implements ``op`` on ``device``, with the data from which the C++ that calls it is
    generated. Raise ``CannotCopy`` if generated C++ cannot call it.
    """
    try:
        code, form = bound_native_kernel(op, device)
        # The result is not needed here. The call raises if generated C++ cannot call the kernel.
        describe_op(code, op.spec.stem)
        library = source_libraries.get(form.library)
        if library is None:
            # This raises if the library is missing.
            locate_library(form.library)
    except ShiplapError as e:
        raise CannotCopy(f"{e.what}: {e.got}") from None
    name = f"lib{code.symbol}.so" if library is not None else form.library.name
    return NativeKernel(op, device, code, name)


def print_native_part(package: str, kernels: Sequence[NativeKernel]) -> NativePart:
    """Return the C++ part of a package. It holds the sources of the package's libraries of torch ops and the script
    that compiles them.

    Nothing is compiled or written.
    """
    part = NativePart()
    for kernel in kernels:
        _add_kernel(part, kernel)
    for name in _headers_behind("shiplap/native.h"):
        part.copies[f"csrc/{name}"] = INCLUDE / name
    ops = list(dict.fromkeys(k.op for k in kernels))
    on_cpu = [k for k in kernels if k.device == "cpu"]
    # Also where no kernel is on the CPU, since it defines the schemas.
    _add_library(part, "ops", on_cpu, ops)
    # Apart, so that the package works on a machine without CUDA.
    if on_cuda := [k for k in kernels if k.device == "cuda"]:
        _add_library(part, "ops_cuda", on_cuda, [])
    target = next(flag for flag in FLAGS if flag.startswith("-DTORCH"))
    part.files["build.py"] = render_source(
        "ejected_build.py.jinja",
        package="shiplap.packaging",
        **{"units": list(part.units.values()), "libraries": part.libraries, "target": target},
    ).replace("@package@", package)
    return part


def _add_library(part: NativePart, name: str, kernels: Sequence[NativeKernel], defined: Sequence[Op]) -> None:
    """Add to ``part`` the C++ source of the library ``name``. The library implements the ops of ``kernels`` and defines
    the schemas of ``defined``.
    """
    described = []
    for kernel in kernels:
        values = describe_op(kernel.code, kernel.op.spec.stem)
        # The ejected op registers its gradients itself, so there is no Python to ask about them.
        deferrals = [d for d in values["deferrals"] if GRADIENTS_ENABLED not in d.condition]
        printed = {k: [REFUSAL.sub("reject(", line) for line in values[k]] for k in ("checks", "allocated", "packed")}
        printed |= {k: [REFUSAL.sub("reject(", line) for line in values[k]] for k in ("workspace", "within")}
        described.append({**values, **printed, "deferrals": deferrals})
    schemas: dict[str, list[str]] = {}
    for op in defined:
        spec, core = op.spec, core_overload_name(op.spec)
        texts = [public_schema(spec, spec.opname)] if spec.returned else []
        schemas.setdefault(spec.namespace, []).extend(map(quote_cpp, [*texts, schema_text(spec, core)]))
    implementations: dict[str, list[tuple[str, str]]] = {}
    for kernel in kernels:
        row = core_overload_name(kernel.op.spec), kernel.op.spec.stem
        implementations.setdefault(kernel.op.spec.namespace, []).append(row)
    part.files[f"csrc/{name}.cpp"] = render_source(
        "ejected_ops.cpp.jinja",
        package="shiplap.packaging",
        names=[k.op.spec.name for k in kernels] or [op.spec.name for op in defined],
        cuda=name == "ops_cuda",
        headers=[f"{k.symbol}/declaration.h" for k in kernels],
        ops=described,
        scalar_types=SCALAR,
        schemas=schemas,
        implementations=implementations,
    )
    files = list(dict.fromkeys(k.file for k in kernels))
    part.libraries.append({"file": f"lib{name}.so", "source": f"{name}.cpp", "kernels": files})


def _add_kernel(part: NativePart, kernel: NativeKernel) -> None:
    """Add to ``part`` the sources and the header of a kernel. If the kernel came without sources, add the kernel's
    library instead. Raise ``CannotCopy`` if a source lies outside its folder.
    """
    native, spec = kernel.code, kernel.op.spec
    configs = {native.symbol: native.space.names} if native.space is not None else None
    folder = f"csrc/{native.symbol}"
    # The command that wrote the header is not part of an ejected package.
    part.files[f"{folder}/declaration.h"] = header_text({native.symbol: spec}, native.symbol, configs).replace(
        "Generated by `shiplap header", "Generated from the declaration of `"
    )
    form = kernel.op.native_kernels(kernel.device)[0].native
    assert form is not None
    library = source_libraries.get(form.library)
    if not isinstance(library, SourceLibrary):
        part.copies[f"lib/{kernel.file}"] = locate_library(form.library)
        return
    sources = []
    for text in library.texts:
        name = text.name if text.path is not None else f"code{SUFFIX[text.language]}"
        # The file would be written outside of the package.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CannotCopy(f"its source includes {name}, which lies outside of its folder")
        part.files[f"{folder}/{name}"] = text.content
        sources += [name] if text.language else []
    part.units[kernel.file] = {
        "file": kernel.file,
        "sources": sources,
        "folder": native.symbol,
        "flags": list(library.flags),
        "link": list(library.libraries),
        "architectures": [gencode_flag(name) for name in library.architectures],
    }


def _headers_behind(name: str) -> list[str]:
    """Return the names of the header ``name`` of Shiplap and of all headers that it includes, directly or through
    others, sorted.
    """
    found, queue = [name], [name]
    while queue:
        for other in INCLUDES.findall((INCLUDE / queue.pop()).read_text()):
            if other not in found and (INCLUDE / other).is_file():
                found.append(other)
                queue.append(other)
    return sorted(found)
