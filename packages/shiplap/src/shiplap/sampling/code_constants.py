"""Constants in the code of an op, such as thresholds, tile sizes and modes, at which a kernel may branch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from shiplap.declare.code_walk import constants_used
from shiplap.declare.template import Template
from shiplap.dispatch import Op
from shiplap.sampling.literals import FLOAT_LITERAL, SOURCE_SUFFIXES, integers_in_text
from shiplap.sampling.values import AROUND_PREFIX

MAX_OBJECTS = 1000  # functions and other objects that are searched, the nearest first
FAR, MOST = 1e4, 8  # the largest threshold of values, and the most thresholds
LONGEST_LIST = 128  # a larger constant is no limit on the length of a list
MANY_MEMBERS = 130  # more than a launch takes; native code, which is not searched, may hold that limit
LONGEST_MODE = 40  # characters of a string that may be a mode
LARGEST_FILE = 200_000


@dataclass(frozen=True)
class CodeConstants:
    """Constants in the code of an op. Each field has distinct values in ascending order.

    Attributes:
        ints: absolute values of integers in the code of kernels, ``supports``, configs, reference and gradient.
        floats: floats of the same code.
        strings: short strings of the same code, which may be modes.
    """

    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    strings: tuple[str, ...] = ()

    @property
    def members(self) -> list[int]:
        """The lengths to try for an argument that is a list of tensors. They are a few usual lengths, one large length,
        and the successors of up to three small integers of the code. Such an integer may be the largest number of
        members that a kernel takes at once.
        """
        return list(dict.fromkeys((1, 3, 0, 9, *[v + 1 for v in self.ints if 3 < v <= LONGEST_LIST][:3], MANY_MEMBERS)))


def find_code_constants(op: Op) -> CodeConstants:
    """Return the integers, floats and short strings in the code of ``op``. A kernel may branch at such a constant.

    The code consists of the reference, the gradient, the kernels, the templates, the native sources and the expressions
    of the declaration.
    """
    exprs = (*op.spec.requires, *(e for _, e in (*op.spec.dims, *op.spec.bounds)))
    return _collect_constants(_code_roots(op), [*_native_source_texts(op), *map(str, exprs)])


def find_template_constants(template: Template, config: Mapping[str, Any]) -> CodeConstants:
    """Return the integers, floats and short strings in the source and the functions of ``template``. The values of its
    parameters in ``config`` are included.
    """
    functions = template.supports, template.grid, template.split_k, template.function, dict(template.tables)
    mined = _collect_constants([dict(config), *functions], [template.source])
    literals = {float(v) for v in FLOAT_LITERAL.findall(template.source)}
    return replace(mined, floats=tuple(sorted({*mined.floats, *literals})))


def _collect_constants(roots: Iterable[Any], texts: Iterable[str]) -> CodeConstants:
    """Return the constants of the code that is reachable from the objects ``roots``, and the integers in the strings
    ``texts`` of source code. The integers are absolute values. Long strings are left out.
    """
    inputs: list[Any] = constants_used(*roots, most=MAX_OBJECTS)
    for text in texts:
        inputs += integers_in_text(text)
    ints = {abs(v) for v in inputs if type(v) is int}
    # NaN, which differs from itself, is left out.
    floats = {v for v in inputs if type(v) is float and v == v and abs(v) < 1e30}
    strings = {
        v for v in inputs if isinstance(v, str) and 0 < len(v) <= LONGEST_MODE and " " not in v and "\n" not in v
    }
    return CodeConstants(tuple(sorted(ints)), tuple(sorted(floats)), tuple(sorted(strings)))


def threshold_value_kind(mined: CodeConstants, scalars: Iterable[Any], positions: Iterable[float] = ()) -> str:
    """Return the name of the kind of values that lie near certain numbers, for ``draw_values``. The name is an empty
    string if there are no such numbers.

    The numbers are the magnitudes of the floats among ``scalars``, of the floats ``mined`` from the code, of
    ``positions`` and of the integers of the code. The name is ``AROUND_PREFIX`` followed by at most ``MOST`` of them.
    """
    given = [v for v in scalars if type(v) is float]
    numbers = *given, *mined.floats, *positions, *mined.ints
    sizes = dict.fromkeys(abs(v) for v in numbers if 0 < abs(v) < FAR)
    return AROUND_PREFIX + " ".join(f"{v:.17g}" for v in list(sizes)[:MOST]) if sizes else ""


def _code_roots(op: Op) -> Iterator[Any]:
    """Yield the functions and values of an op whose code is searched for constants. They belong to its reference, its
    gradient with the ops that the gradient uses, its kernels with their tuning spaces, and its templates.
    """
    yield op.reference
    if op.gradient is not None:
        yield op.gradient.function
        for part in op.gradient.ops:
            yield from _code_roots(cast("Op", part.op))
    for kernels in op.kernels.values():
        for kernel in kernels:
            yield from (kernel.function, kernel.supports)
            if kernel.space is not None:
                yield from (kernel.space.derived, kernel.space.prior, kernel.space.chosen)
                yield [dict(c.items) for c in kernel.space.fixed]
    for templates in op.templates.values():
        for template in templates:
            yield vars(template)


def _native_source_texts(op: Op) -> Iterator[str]:
    """Yield the contents of the source files of the op's native kernels. They are the files beside the library or the
    declaration that contain the name of the kernel's function.
    """
    for kernels in op.kernels.values():
        for kernel in kernels:
            if kernel.native is None or kernel.native.generated:
                continue
            for folder in {Path(op.file).parent, kernel.native.library.parent}:
                yield from _sources_naming(folder, kernel.native.symbol)


def _sources_naming(folder: Path, symbol: str) -> Iterator[str]:
    """Yield the content of each native source file in ``folder`` that contains ``symbol``. Only the first 60 files that
    are not too large are read. Yield nothing if the folder cannot be read.
    """
    try:
        files = [f for f in folder.iterdir() if f.suffix in SOURCE_SUFFIXES and f.stat().st_size < LARGEST_FILE]
        texts = [f.read_text(errors="replace") for f in files[:60]]
    except OSError:
        return
    yield from (text for text in texts if symbol in text)
