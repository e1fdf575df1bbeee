"""One vendor's runtime as a value: what it needs, what it compiles and links, which overloads it registers itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shiplap_backend.vendor import Functions, free_functions

__all__ = ["COMMON", "RUNTIMES", "Runtime"]

RUNTIMES = Path(__file__).parent / "runtimes"
COMMON = RUNTIMES / "common"


@dataclass(frozen=True)
class Runtime:
    """A vendor's runtime. Callables are asked late, since the vendor's package may be missing (SL907)."""

    name: str
    requires: Mapping[str, str]
    sources: tuple[Path, ...]
    include_dirs: Callable[[], list[Path]]
    system_dirs: Callable[[], list[Path]]
    link_args: Callable[[], list[str]]
    opset: Callable[[], Functions]
    enums: Callable[[], Mapping[str, Mapping[str, str]]]
    version: Callable[[], str]
    compile_args: tuple[str, ...] = ()

    @property
    def registers(self) -> frozenset[str]:
        """The overloads of the device core, which is the same for every target."""
        return _core()

    @property
    def directory(self) -> Path:
        return RUNTIMES / self.name

    def functions(self) -> Functions:
        """Functions of sizes and attributes that every target has, the vendor's own, and the runtime's helpers.

        A helper takes the place of the vendor's operation of its name.
        """
        helpers = sorted(self.directory.glob("helpers*.h"))
        attributes = COMMON / "include" / "shiplap_backend" / "attributes.h"
        return {
            **free_functions(attributes, "attributes", "shiplap_backend/attributes.h"),
            **self.opset(),
            **{name: made for h in helpers for name, made in free_functions(h, "helpers", h.name).items()},
        }


@cache
def _core() -> frozenset[str]:
    source = (COMMON / "csrc" / "ops.cpp").read_text(encoding="utf-8")
    aten = source.partition("TORCH_LIBRARY_IMPL(aten, PrivateUse1")[2].partition("TORCH_LIBRARY_IMPL(")[0]
    return frozenset(re.findall(r'm\.impl\("([^"]+)"', aten))
