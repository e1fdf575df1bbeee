"""``export(op)`` returns a C ABI kernel as a tvm-ffi function, for callers that use tvm-ffi and DLPack without Shiplap.

This requires the extra ``tvm-ffi`` (the package apache-tvm-ffi). The C++ is generated from the declaration, with its
checks. It is compiled at the first export and stored beside the native bindings.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from shiplap.codegen.tvm_ffi import tvm_ffi_source
from shiplap.dispatch import Op
from shiplap.errors import error
from shiplap.kernels.c.library import load_symbol, locate_library
from shiplap.kernels.native import build_plan
from shiplap.kernels.native.build import LIBRARY
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.kernels.native.build_digest import INCLUDE, library_name_digest
from shiplap.kernels.native.cache import is_library_present

TVM_FFI_PACKAGE = "apache-tvm-ffi"
FLAGS = ("-O2", "-fwrapv", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden")


@dataclass(frozen=True)
class _TvmFfiFiles:
    """The installed package apache-tvm-ffi. ``version`` is its version. ``include`` holds the compiler's options for
    its headers, and ``library`` is the file of its shared library.
    """

    version: str
    include: tuple[str, ...]
    library: Path


def export(op: Op) -> Any:
    """Return ``op`` as a ``tvm_ffi.Function``, which takes any objects that support DLPack.

    The function takes all arguments in declared order, then the outputs. The caller allocates the outputs. They must be
    contiguous and of the declared shape, with a data-dependent size at its bound. The function returns None, one
    data-dependent size as an int, or several as an array. It runs on the CPU with as many threads as torch has now.

    An invalid argument raises a ``RuntimeError`` with the text of the catalogue's error. There is no autograd, and
    nothing is copied. Strided inputs are refused unless ``sl.cabi(..., strided=)`` names them.

    Raises:
        LibraryError: ``SL407`` if apache-tvm-ffi is not installed. ``SL404`` unless the op has one C ABI kernel on the
            CPU that C++ can check. ``SL405`` or ``SL406`` if the function cannot be built. ``SL401`` to ``SL403`` if
            the kernel library does not fit.

    Example:
        >>> from shiplap.kernels.native import tvm_ffi
        >>> add = tvm_ffi.export(my_add)   # doctest: +SKIP
        >>> add(x, y, out)                 # doctest: +SKIP
    """
    module = _load_tvm_module(op).load_module(str(build_tvm_library(op)))
    # The library has no torch to ask for the number of threads.
    module.get_function("set_num_threads")(torch.get_num_threads())
    return module.get_function(op.spec.opname)


def build_tvm_library(op: Op) -> Path:
    """Return the library of ``export(op)``, which is built if it is not in the cache. It is a module in tvm-ffi's own
    format, so that every language with a binding of tvm-ffi can load it. Raise the errors of :func:`export`.
    """
    package = _find_tvm_ffi(op)
    described, form = build_plan.bound_native_kernel(op, "cpu")
    kernels = locate_library(form.library)
    load_symbol(form)  # which says what does not fit
    # The rpath finds the library of tvm-ffi where it is installed now.
    library = (f"-L{package.library.parent}", f"-Wl,-rpath,{package.library.parent}", "-ltvm_ffi", "-ldl")
    command = [*build_plan.compiler_command(op.spec.name), *FLAGS, "-I", str(INCLUDE), *package.include, *library]
    source, root = tvm_ffi_source(described, kernels), build_plan.library_cache_folder(op)
    name = library_name_digest(
        source, (*FLAGS, *build_plan.extra_compiler_flags(), *library), f"{TVM_FFI_PACKAGE} {package.version}"
    )
    if problem := compile_into(root, name, source, command):
        raise error("SL405", where=op.spec.name, got=problem, expected="a library")
    if not is_library_present(root / name, op.spec.name):
        raise error("SL405", where=op.spec.name, got="the library does not fit its seal", expected="a library")
    return root / name / LIBRARY


def _load_tvm_module(op: Op) -> Any:
    """Return the module ``tvm_ffi``. Raise ``SL407``, with the name of ``op``, if it is not installed."""
    try:
        import tvm_ffi
    except ImportError as e:
        raise error("SL407", where=op.spec.name, got=str(e), expected=f"the package {TVM_FFI_PACKAGE}") from None
    return tvm_ffi


def _find_tvm_ffi(op: Op) -> _TvmFfiFiles:
    """Return the version, the include flags and the library file of the installed tvm-ffi. Raise ``SL407``, with the
    name of ``op``, if it is not installed.
    """
    info = _load_tvm_module(op).libinfo
    include = [f for p in (info.find_include_path(), info.find_dlpack_include_path()) for f in ("-isystem", p)]
    return _TvmFfiFiles(metadata.version(TVM_FFI_PACKAGE), tuple(include), Path(info.find_libtvm_ffi()))
