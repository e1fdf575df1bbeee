"""Kernel libraries: SL4xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class LibraryError(ShiplapError, RuntimeError):
    """A kernel library that cannot be found, loaded or trusted (SL4xx)."""


register(
    LibraryError,
    [
        (
            "SL401",
            "the kernel library cannot be loaded",
            "A C ABI kernel is a function in a shared library, which Shiplap opens by its path.",
            "build the library, or set SHIPLAP_LIBRARY_PATH to its directory",
        ),
        (
            "SL402",
            "the library does not contain the symbol",
            "The file of the library is older or newer than the declaration that names this function.",
            "rebuild the library",
        ),
        (
            "SL403",
            "the library was built for another declaration",
            "A library that was compiled for another declaration would misread the arguments.",
            "regenerate the header with 'shiplap header', then rebuild the library",
        ),
        (
            "SL404",
            "the declaration has no equivalent in C",
            (
                "C functions can take only tensors, optional tensors and scalars, and generated C++ code can evaluate"
                " only some preconditions."
            ),
            "split the argument into tensors and scalars, or bind a Python function instead",
        ),
        (
            "SL405",
            "the native binding cannot be used",
            (
                "If the installed package contains no native binding, op.build() compiles one on your machine. Without "
                "a native binding, calls go through the slower Python binding."
            ),
            "install a C++20 compiler or set CXX; set SHIPLAP_NATIVE=0 to keep the Python binding",
        ),
        (
            "SL406",
            "the cache directory is not private",
            "Shiplap loads files of the cache directory as code, so only you may be able to write to it.",
            "set SHIPLAP_CACHE_DIR to a directory that only you can write to",
        ),
        (
            "SL410",
            "the machine lacks a resource for the native binding",
            (
                "The machine ran out of memory, disk space, open files or processes while the binding was compiled or "
                "loaded, or the system killed the compiler. The kernel is not at fault. Calls use the slower Python "
                "binding."
            ),
            "free what 'got' names, or raise its limit, and run the program again",
        ),
        (
            "SL407",
            "tvm-ffi is not installed",
            "Exporting a kernel through tvm-ffi needs its headers and its library.",
            "install it: pip install 'shiplap[tvm-ffi]'",
        ),
        (
            "SL408",
            "the compiled model cannot be loaded",
            (
                "AOTInductor compiles a model with the C++ compiler that CXX names. Some compilers link the C++ runtime"
                " into every library. Beside the runtime of torch, such a library can end the process that loads it."
            ),
            "set CXX to another compiler and make the package again",
        ),
        (
            "SL409",
            "only Python could serve the call, and this library has none",
            (
                "A deployed library has native code alone. Where a kernel does not take a dtype, or a tensor that is"
                " written to may require a gradient, a process with Shiplap leaves the call to Python."
            ),
            "pass tensors that the kernel takes, under torch.no_grad() where it writes to them",
        ),
        (
            "SL420",
            "the sources of the kernel are not compiled",
            "A kernel of sl.source is compiled on request, so that no call waits for a compiler.",
            "call op.build() in Python, or run 'shiplap build TARGET' in a shell",
        ),
        (
            "SL421",
            "the sources of the kernel cannot be compiled",
            "The compiler's message has the file and the line. Each source follows the header of the declaration.",
            "correct the source at the line that the compiler names",
        ),
        (
            "SL422",
            "the CUDA architecture is unknown",
            "nvcc compiles for the architectures that it knows, which are named by their compute capability.",
            'pass architectures=[...] with the compute capabilities of your GPUs, such as "90a"',
        ),
        (
            "SL423",
            "there is no compiler for the sources of the kernel",
            "C and C++ need a C++ compiler, CUDA C++ needs nvcc. A package that was built elsewhere needs neither.",
            "install a C++ compiler, or set CXX",
        ),
    ],
)
