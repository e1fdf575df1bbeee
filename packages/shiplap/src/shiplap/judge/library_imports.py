"""The modules of torch, Triton and peft that a candidate will import, found in its source and that of its packages.

Their import takes longer than most of the calls of a judgement: some 5 s for torch's compiler. The launcher therefore
imports them before it forks, so that the process of the candidate and that of the reference need not, nor do those of
later judgements with the same launcher. Only modules that are named here are imported, whatever a source says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

from shiplap.judge.target import file_of_module
from shiplap.sandbox.source_scan import gather_sources, read_source
from shiplap.torch_private.dynamo import VECTOR_MODULE

MOST_SOURCES = 128  # of a candidate and the packages that it uses
COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", VECTOR_MODULE)
SIGNS = {  # in a source: the modules that code with such a text imports
    re.compile(rb"\btorch\s*\.\s*compile\b|\btorch\.compiler\b|\b_inductor\b|\b_dynamo\b"): COMPILER,
    re.compile(rb"\bimport\s+triton\b|\bfrom\s+triton\b"): ("triton", "triton.language.extra.libdevice"),
    re.compile(rb"\btorch\.distributed\.tensor\b|\bDTensor\b"): ("torch.distributed.tensor",),
    re.compile(rb"\bcpp_extension\b"): ("torch.utils.cpp_extension",),
    # Liger's kernels import peft where it is installed. What peft itself imports comes first: one module of these may
    # be harmful, and the others are imported all the same.
    re.compile(rb"\bimport\s+peft\b|\bfrom\s+peft\b"): ("transformers.modeling_utils", "accelerate", "peft"),
    re.compile(rb"\bimport\s+transformers\b|\bfrom\s+transformers\b"): ("transformers",),
}
IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([A-Za-z_][\w.]*)", re.MULTILINE)
KNOWN = {*sys.stdlib_module_names, "torch", "triton", "numpy", "shiplap"}  # packages that are not searched


def library_modules(*files: str) -> list[str]:
    """Return the modules named in ``SIGNS`` that code in the Python ``files`` will import, as far as their text and
    that of the modules beside them and in installed packages shows. Nothing is imported.
    """
    found: dict[str, None] = {}
    for source in _used_sources([f for f in files if f]):
        text = read_source(source)
        found |= dict.fromkeys(name for sign, names in SIGNS.items() if sign.search(text) for name in names)
    return list(found)


def imports_from_package(file: str, folder: str, places: Iterable[str]) -> bool:
    """Return whether the Python ``file`` or one beside it imports a module in ``folder``, or in a folder inside of it,
    by a name that begins in one of ``places`` above that folder. Nothing is imported.
    """
    inner = Path(folder).resolve()
    above = [place for place in map(Path.resolve, map(Path, places)) if place in inner.parents]
    names = [m.decode() for source in gather_sources(file) for m in IMPORT.findall(read_source(source))] if file else []
    found = [place.joinpath(*name.split(".")) for place in above for name in names]
    return any(module.is_relative_to(inner) for module in found)


def _used_sources(files: Iterable[str]) -> Iterator[Path]:
    """Yield the sources that the Python ``files`` use, directly or indirectly: those beside them, and those of the
    modules of other packages than the best known ones. At most ``MOST_SOURCES`` are yielded.
    """
    left = [source for file in files for source in gather_sources(file)]
    seen, looked_up = set[Path](), set[str]()
    while left and len(seen) < MOST_SOURCES:
        source = left.pop(0)
        if source in seen:
            continue
        seen.add(source)
        yield source
        names = {m.decode() for m in IMPORT.findall(read_source(source))} - looked_up
        looked_up |= names
        for name in names:
            if name.partition(".")[0] not in KNOWN:
                parts = set(accumulate(name.split("."), "{}.{}".format)) - (looked_up - {name})
                looked_up |= parts
                left += [Path(file) for part in parts if (file := file_of_module(part)).endswith(".py")]
