"""Find constants in the code of an op: thresholds, tile sizes, modes and literals at which a kernel may branch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from shiplap.declare.code_walk import constants_used
from shiplap.declare.template import Template
from shiplap.dispatch import Op
from shiplap.sampling.values import AROUND

MANY = 1000  # functions and other objects that are looked at, the nearest first
FAR, MOST = 1e4, 8  # what is no threshold of values, and how many are
MEMBERS = 128  # of the longest list
MANY_MEMBERS = 130  # more than a launch takes: that number may stand where nothing can be mined, in native code
LITERAL = re.compile(r"(?<![\w.])(\d{1,6}\.\d{0,17}(?:e[+-]?\d{1,2})?)(?=[fF]?\b|\b|\W)")  # of C++ and of Triton
LONGEST = 40  # characters of a string that may be a mode
SOURCES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
LARGEST_FILE = 200_000


@dataclass(frozen=True)
class Mined:
    """Constants, each once and in order.

    Attributes:
        ints: of everything that may decide on a size: kernels, ``supports``, configs, reference and gradient.
        floats: of the same. ``strings``: short ones, of the same.
    """

    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    strings: tuple[str, ...] = ()

    @property
    def members(self) -> list[int]:
        """Lengths of lists of tensors: few, one more than a kernel may take at once, and many."""
        return list(dict.fromkeys((1, 3, 0, 9, *[v + 1 for v in self.ints if 3 < v <= MEMBERS][:3], MANY_MEMBERS)))


def mine(op: Op) -> Mined:
    """The constants of ``op``."""
    exprs = (*op.spec.requires, *(e for _, e in (*op.spec.dims, *op.spec.bounds)))
    return _mined(_roots(op), [*_texts(op), *map(str, exprs)])


def mine_template(template: Template, config: Mapping[str, Any]) -> Mined:
    """The constants of a template with one of its configs, which other configs may lack."""
    functions = template.supports, template.grid, template.split_k, template.function, dict(template.tables)
    mined = _mined([dict(config), *functions], [template.source])
    literals = {float(v) for v in LITERAL.findall(template.source)}
    return replace(mined, floats=tuple(sorted({*mined.floats, *literals})))


def _mined(roots: Iterable[Any], texts: Iterable[str]) -> Mined:
    inputs: list[Any] = constants_used(*roots, most=MANY)
    for text in texts:
        inputs += numbers(text)
    ints = {abs(v) for v in inputs if type(v) is int}
    floats = {v for v in inputs if type(v) is float and v == v and abs(v) < 1e30}
    strings = {v for v in inputs if isinstance(v, str) and 0 < len(v) <= LONGEST and " " not in v and "\n" not in v}
    return Mined(tuple(sorted(ints)), tuple(sorted(floats)), tuple(sorted(strings)))


def around(mined: Mined, scalars: Iterable[Any]) -> str:
    """The kind of values (``values.AROUND``) at numbers of the code and at scalars; empty where there are none."""
    given = [v for v in scalars if type(v) is float]
    sizes = dict.fromkeys(abs(v) for v in (*given, *mined.floats, *mined.ints) if 0 < abs(v) < FAR)
    return AROUND + " ".join(f"{v:.17g}" for v in list(sizes)[:MOST]) if sizes else ""


def numbers(text: str) -> list[int]:
    """Decimal integers in a source text, shifts of one (``1 << 10``) included."""
    plain = [int(v) for v in re.findall(r"(?<![\w.])(\d{1,7})(?![\w.])", text)]
    return plain + [1 << int(v) for v in re.findall(r"\b1[uUlL]*\s*<<\s*(\d{1,2})\b", text) if int(v) < 24]


def _roots(op: Op) -> Iterator[Any]:
    yield op.reference
    if op.gradient is not None:
        yield op.gradient.function
        for part in op.gradient.ops:
            yield from _roots(cast("Op", part.op))
    for kernels in op.kernels.values():
        for kernel in kernels:
            yield from (kernel.function, kernel.supports)
            if kernel.space is not None:
                yield from (kernel.space.derived, kernel.space.prior, kernel.space.chosen)
                yield [dict(c.items) for c in kernel.space.fixed]
    for templates in op.templates.values():
        for template in templates:
            yield vars(template)


def _texts(op: Op) -> Iterator[str]:
    """Sources of native kernels that lie beside their library or the declaration, and name the kernel's function."""
    for kernels in op.kernels.values():
        for kernel in kernels:
            if kernel.native is None or kernel.native.generated:
                continue
            for folder in {Path(op.reference.__code__.co_filename).parent, kernel.native.library.parent}:
                yield from _naming(folder, kernel.native.symbol)


def _naming(folder: Path, symbol: str) -> Iterator[str]:
    try:
        files = [f for f in folder.iterdir() if f.suffix in SOURCES and f.stat().st_size < LARGEST_FILE]
        texts = [f.read_text(errors="replace") for f in files[:60]]
    except OSError:
        return
    yield from (text for text in texts if symbol in text)
