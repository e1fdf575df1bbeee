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
    """A vendor's runtime. Callables are called late, since the vendor's package may be missing (SL907).

    Args:
        name: a lower-case word; metadata says ``runtime: <name>``, and a project's ``ops.yaml`` ``extends: <name>``.
        contract: the ``CONTRACT`` that the runtime was written for. Another one is refused (SL909).
        directory: an include directory, which holds ``vendor.h`` or ``functions_header``. Its ``*.cpp`` and ``*.c``
            are compiled.
        metadata: YAML file of what each ATen overload is on the target.
        functions_header: declares what metadata may call, as free functions of the namespace
            ``shiplap::backend::functions``; by default ``functions.h`` if ``directory`` has it.
        opset: the functions of a vendor's own headers, if they are not in ``functions_header``.
        enums: the values of enums that such functions take.
        requires: Python packages and version ranges that a generated project depends on.
        version: of the vendor's library. Entries may ask for a range of it.
        system_dirs: include directories of the vendor's library.
        link_args: what the linker is told, such as the library's path.
        compile_args: further options of the C++ compiler.
        sources: C and C++ files to compile besides those of ``directory``.
        discrete: the device has memory and streams of its own, and the C++ defines ``driver()``
            (``shiplap_backend/driver.h``). By default it computes on the host's memory.
        graph: ``"own"`` if ``vendor.h`` in ``directory`` says what nodes and graphs are. ``"eager"`` takes both from
            this package, for a library whose functions compute when they are called.
        block: the device stores the last dim of each tensor in blocks of so many elements, padded with zeros; 0 if it
            stores tensors row-major.
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
        """The names of the overloads for which the device core, the C++ sources that all devices share, registers
        kernels of its own.
        """
        return _core_overloads()

    @property
    def units(self) -> tuple[Path, ...]:
        """The C and C++ sources besides generated code: the device core and the vendor's own files."""
        own = (p for suffix in ("*.cpp", "*.c") for p in sorted(self.directory.glob(suffix)))
        graph = sorted(EAGER.glob("*.cpp")) if self.graph == "eager" else []
        return (COMMON / "csrc" / "all.cpp", COMMON / "csrc" / "profiler.cpp", *graph, *own, *self.sources)

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of the C++ compiler: the kind of memory, its layout, and the vendor's own options."""
        return (
            f"-DSHIPLAP_DISCRETE={int(self.discrete)}",
            f"-DSHIPLAP_BLOCK_LAST={self.block}",
            *self.compile_args,
        )

    @property
    def include_dirs(self) -> list[Path]:
        """The include folders: the vendor's, then that of the eager graph if it is used, then that of the device
        core.
        """
        return [self.directory, *([EAGER] if self.graph == "eager" else []), COMMON / "include"]

    @property
    def needed(self) -> tuple[Path, ...]:
        """The files that a runtime's directory must contain: its C++ header for generated code, and its metadata
        (``ops.yaml``).
        """
        header = "vendor.h" if self.graph == "own" else self.functions_header
        return (self.directory / header, self.metadata)

    def functions(self) -> Functions:
        """Return the vendor functions that expressions may call, by name: those of sizes and attributes that every
        target has, the vendor's own, and the runtime's helpers.

        A helper takes the place of the vendor's operation of its name.
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
    """Return the names of the overloads that the C++ source of the device core registers."""
    source = (COMMON / "csrc" / "ops.cpp").read_text(encoding="utf-8")
    # Read from the source, so that no second list has to be kept in step.
    aten = source.partition("TORCH_LIBRARY_IMPL(aten, PrivateUse1")[2].partition("TORCH_LIBRARY_IMPL(")[0]
    return frozenset(re.findall(r'm\.impl\("([^"]+)"', aten))
