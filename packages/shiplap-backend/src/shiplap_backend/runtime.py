"""The description of a vendor's runtime: its C++, its requirements, and the functions that metadata may call.

This is the contract between this package and a vendor, who may be outside of this repository: docs/add-a-runtime.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from shiplap_backend.vendor import Functions, check_function_names, free_functions

CONTRACT = 1  # of this class and of the C++ in runtimes/common/include; a change that a vendor must follow raises it
RUNTIMES = Path(__file__).parent / "runtimes"
COMMON = RUNTIMES / "common"
EAGER = RUNTIMES / "eager"
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Runtime:
    """The description of a vendor's runtime.

    Its functions are called when their values are needed, since the vendor's package may be missing (``SL907``).

    Args:
        name: A lower-case word. Metadata says ``runtime: <name>``, and a project's ``ops.yaml`` says ``extends:
            <name>``.
        contract: The ``CONTRACT`` for which the runtime was written. A runtime with another one is refused (``SL909``).
        directory: An include directory with ``vendor.h`` or ``functions_header``. Its ``*.cpp`` and ``*.c`` files are
            compiled.
        metadata: The YAML file that describes how each ATen overload is computed on the target.
        functions_header: The C++ header that declares the functions which metadata may call. They are free functions of
            the namespace ``shiplap::backend::functions``. The file may be missing.
        opset: The functions of a vendor's own headers, if they are not in ``functions_header``.
        enums: The values of the enums that such functions take.
        requires: The Python packages, with ranges of versions, that a generated project depends on.
        version: The version of the vendor's library. Metadata entries may require a range of it.
        system_dirs: The include directories of the vendor's library.
        link_args: The arguments of the linker, such as the library's path.
        compile_args: Further options of the C++ compiler.
        sources: C and C++ files that are compiled besides those of ``directory``.
        discrete: Whether the device has its own memory and streams. The C++ then defines ``driver()``, which
            ``shiplap_backend/driver.h`` declares. By default the device computes in the host's memory.
        graph: ``"own"`` if ``vendor.h`` in ``directory`` defines nodes and graphs. With ``"eager"`` this package
            defines them, for a library whose functions compute when they are called.
        block: The number of elements in a block, if the device stores the last dim of each tensor in blocks padded with
            zeros. 0 means that tensors are stored row-major.
    """

    name: str
    contract: int
    directory: Path
    metadata: Path
    functions_header: str = "functions.h"
    opset: Callable[[], Functions] = dict
    enums: Callable[[], Mapping[str, Mapping[str, str]]] = dict
    requires: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    version: Callable[[], str] = lambda: "0"
    system_dirs: Callable[[], list[Path]] = list
    link_args: Callable[[], list[str]] = list
    compile_args: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    discrete: bool = False
    graph: Literal["own", "eager"] = "own"
    block: int = 0

    @property
    def registers(self) -> frozenset[str]:
        """The names of the overloads for which the device core registers its own kernels.

        The device core is the C++ that all devices share.
        """
        return _core_overloads()

    @property
    def units(self) -> tuple[Path, ...]:
        """The C and C++ sources that are not generated.

        They are the vendor's files and the device core, the C++ that all devices share.
        """
        own = (p for suffix in ("*.cpp", "*.c") for p in sorted(self.directory.glob(suffix)))
        graph = sorted(EAGER.glob("*.cpp")) if self.graph == "eager" else []
        return (COMMON / "csrc" / "all.cpp", COMMON / "csrc" / "profiler.cpp", *graph, *own, *self.sources)

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of the C++ compiler. They say whether the device has its own memory and how it stores tensors,
        and include the vendor's own options.
        """
        return (
            f"-DSHIPLAP_DISCRETE={int(self.discrete)}",
            f"-DSHIPLAP_BLOCK_LAST={self.block}",
            *self.compile_args,
        )

    @property
    def include_dirs(self) -> list[Path]:
        """The include folders of the vendor, of the eager graph if it is used, and of the C++ that all devices
        share.
        """
        return [self.directory, *([EAGER] if self.graph == "eager" else []), COMMON / "include"]

    @property
    def needed(self) -> tuple[Path, ...]:
        """The files without which a runtime cannot be used.

        They are ``vendor.h`` or, for a runtime without a graph of its own, the header of its functions, and the
        metadata file.
        """
        header = "vendor.h" if self.graph == "own" else self.functions_header
        return (self.directory / header, self.metadata)

    def functions(self) -> Functions:
        """Return the functions that expressions of the metadata may call, by name.

        They are the functions of sizes and attributes that all targets share, the vendor's functions, and the runtime's
        helpers. A helper replaces the vendor's function of the same name.
        """
        helpers = sorted(self.directory.glob("helpers*.h"))
        attributes = COMMON / "include" / "shiplap_backend" / "attributes.h"
        own = self.directory / self.functions_header
        core = free_functions(attributes, "attributes", "shiplap_backend/attributes.h")
        if own.is_file():
            check_function_names(own, core)
        # Helpers may name an enum without its namespace.
        enums = {name.rpartition("::")[2] for name in self.enums()}
        mine = free_functions(own, "functions", own.name, enums) if own.is_file() else {}
        return {
            **core,
            # One with other arguments than the core's of its name stands beside it.
            **{name: (*functions, *core.get(name, ())) for name, functions in mine.items()},
            **self.opset(),
            **{name: made for h in helpers for name, made in free_functions(h, "helpers", h.name).items()},
        }


@cache
def _core_overloads() -> frozenset[str]:
    """Return the names of the overloads for which the device core, the C++ that all devices share, registers
    kernels.
    """
    source = (COMMON / "csrc" / "ops.cpp").read_text(encoding="utf-8")
    # Read from the source, so that no second list has to be kept in step.
    aten = source.partition("TORCH_LIBRARY_IMPL(aten, PrivateUse1")[2].partition("TORCH_LIBRARY_IMPL(")[0]
    return frozenset(re.findall(r'm\.impl\("([^"]+)"', aten))
