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
            (
                "A C kernel is a function in a shared library, which Shiplap opens by its path. The file does not "
                "exist, or the loader of the system rejects it."
            ),
            (
                "if the file is missing, build the library, or set SHIPLAP_LIBRARY_PATH to its directory. If the "
                "loader rejects it, build it again for this machine, with the libraries that 'got' names installed"
            ),
        ),
        (
            "SL402",
            "the library does not contain the function",
            (
                "The library has no function of the name that the declaration gives. It is older or newer than the "
                "declaration, or the name is misspelt."
            ),
            (
                "write the name of a function of the library in sl.cabi(...). If the name is right, build the library "
                "again from sources that define the function with C linkage"
            ),
        ),
        (
            "SL403",
            "the library was built for another declaration",
            "A library that was compiled for another declaration would misread the arguments of a call.",
            (
                "write the header again with: shiplap header mylib.ops -o mylib.h, where mylib.ops is the module of "
                "the op. Correct the function where its prototype in the header has changed, and build the library "
                "again. If the function belongs to another op, name the function of this op in sl.cabi(...)"
            ),
        ),
        (
            "SL404",
            "the declaration has no equivalent in C",
            (
                "C functions can take only tensors, optional tensors and scalars. Generated C++ code can evaluate "
                "only some preconditions."
            ),
            (
                "replace an argument under 'got' by single tensors and scalars. To keep the argument, or if 'got' "
                "shows a precondition, bind a Python function as the kernel"
            ),
        ),
        (
            "SL405",
            "the native binding cannot be used",
            (
                "A native binding is compiled code through which calls reach the kernel without Python. It could not "
                "be compiled or loaded, for the reason under 'got'. Calls use the slower Python binding."
            ),
            (
                "if 'got' says that there is no compiler, install a C++20 compiler or set CXX to its path. If it says "
                "that torch has no CUDA, install a torch with CUDA. For any other reason, set SHIPLAP_NATIVE=0 "
                "to use the Python binding. If you make a package, remove the reason under 'got' instead"
            ),
        ),
        (
            "SL406",
            "the cache directory is not private",
            "Shiplap loads files of the cache directory as code, so only you may be able to write to it.",
            "set SHIPLAP_CACHE_DIR to a directory that only you can write to",
        ),
        (
            "SL410",
            "the native binding could not be built or loaded for lack of a resource",
            (
                "The machine ran out of memory, disk space, open files or processes, or the system killed the "
                "compiler. The kernel is not at fault. Calls use the slower Python binding."
            ),
            "free the resource under 'got' or raise its limit, then run the program again",
        ),
        (
            "SL407",
            "tvm-ffi is not installed",
            "Shiplap exports a kernel to tvm-ffi with the headers and the library of that package.",
            "install it: pip install 'shiplap[tvm-ffi]'",
        ),
        (
            "SL408",
            "the compiled model cannot be loaded",
            (
                "AOTInductor compiles a model with the C++ compiler that CXX names. Some compilers link the C++ "
                "runtime into every library. Torch has a C++ runtime too, and a process that loads both can crash. "
                "Loading this model crashed a test process, so Shiplap refuses it."
            ),
            "set CXX to another compiler, such as CXX=/usr/bin/g++, and compile the model again",
        ),
        (
            "SL409",
            "no native kernel of the deployed library takes the call",
            (
                "A deployed library contains only native code. Either no kernel takes the dtypes and layouts of these "
                "arguments, or the op writes to a tensor that may require a gradient. In a process with Shiplap, "
                "Python would run such a call."
            ),
            (
                "pass contiguous tensors of dtypes that the kernel takes. If the op writes to its arguments, call it "
                "under torch.no_grad()"
            ),
        ),
        (
            "SL420",
            "the sources of the kernel are not compiled",
            (
                "The sources of a kernel that sl.source declares are compiled only on request, so that no call waits "
                "for a compiler."
            ),
            "call op.build() in Python, or run 'shiplap build mylib.ops' with the module that declares the op",
        ),
        (
            "SL421",
            "the sources of the kernel cannot be compiled",
            (
                "The compiler rejected a source file or did not find a header, with the message under 'got'. Sources "
                "are compiled together with a header that declares the kernel as the op's declaration requires it."
            ),
            "correct the source at the line that the compiler names under 'got'",
        ),
        (
            "SL422",
            "the CUDA architecture is unknown",
            (
                "A CUDA architecture is named by its compute capability, such as 90 for 9.0. The name is not of this "
                "form, or the installed nvcc does not know it."
            ),
            (
                "run 'nvcc --list-gpu-arch', and pass what follows compute_ in the line with the compute capability of "
                'your GPU, such as architectures=["90"], or ["90a"] for features of that architecture alone. If nvcc '
                "does not list your GPU, install a newer CUDA toolkit"
            ),
        ),
        (
            "SL423",
            "there is no compiler for the sources of the kernel",
            (
                "C and C++ sources need a C++ compiler, and CUDA sources need nvcc. A package that was built "
                "elsewhere needs neither."
            ),
            (
                "for C and C++, install a C++ compiler or set CXX to its path. For CUDA, install the CUDA toolkit or "
                "set CUDACXX to the path of nvcc"
            ),
        ),
    ],
)
