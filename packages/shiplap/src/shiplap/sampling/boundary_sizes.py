"""Sizes and scalars at which a kernel may take another path, derived from constants in its code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice, permutations
from typing import Any

from shiplap.declare.spec import Arg, OpSpec
from shiplap.sampling.code_constants import CodeConstants
from shiplap.sampling.recipe import unnamed_dims

SIZE_LADDER = (63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097)
# Usual sizes of heads and layers, and the end of 16 bits.
USUAL_SIZES = (80, 96, 160, 180, 192, 210, 384, 768, 1536, 3072, 1 << 16)
LONGEST, MOST = 1 << 17, 48  # the largest size, and the most sizes derived from constants
LONG_SUM = 4096  # terms of a long sum
CROWDED_SIZE = 2 * LONG_SUM + 1  # elements of one dim, half of which may fall into one bin
GRAIN_ELEMENTS = 70_001  # elements: two grains of torch's parallel loops (32,768 each), and a rest
MILLION_ELEMENTS = (1 << 20) + 77_001
VALUE_ORDERS = ("ascending", "descending", "constant")
RARE_SIZES_S = 10.0  # seconds of processor time after which the rarer members of a series are left out
SEVERAL_ROUNDS = 101  # a position beyond small sizes, and a prime: a multiple of a size would be like no position
HUGE_INTEGERS = (2**31 + 5, -(2**32) - 3, 2**40 + 1)  # values of an int scalar beyond 32 bits
UNEVEN_SIZES = ((2, 5, 3), (5, 0, 1))  # sizes of the members of a list; the first is not always the largest
LARGEST_COMMON_SIZE = 33  # smaller sizes are covered by other samples


def sizes_near_constants(mined: CodeConstants) -> list[int]:
    """Return at most some hundred sizes of one dim to try, in ascending order.

    They are usual sizes, and sizes around the constants ``mined`` from the code of an op and around multiples of these.
    Powers of two and their neighbours are included, because native code may branch on any of them and its constants
    cannot always be read.
    """
    sizes: list[int] = []
    for value in (v for v in mined.ints if 3 < v <= LONGEST // 2):
        sizes += [value, value + 1, value - 1, 2 * value + 1, 3 * value + 2]
    # The sizes that are left out here are tried by ``Samples.edges``.
    own = [v for v in dict.fromkeys(sizes) if 1 < v <= LONGEST and v not in (15, 16, 17, 31, 33)]
    return sorted({*SIZE_LADDER, *USUAL_SIZES, *own[:MOST]})


def joint_sizes(names: list[str]) -> Iterator[dict[str, int]]:
    """Yield mappings from the names of several dims to sizes. In the first mappings all dims exceed one tile of a
    kernel. In the next ones one dim is far larger, and in the last ones one dim has size 1. Yield nothing for fewer
    than two names.
    """
    if len(names) < 2:
        return
    for sizes in ((67, 70, 73, 66), (130, 135, 133, 3), (257, 40, 300, 2), (290, 301, 307, 2), (1030, 520, 2, 1)):
        yield dict(zip(names, sizes * len(names), strict=False))
    for name in names:
        yield {**dict.fromkeys(names, 130), name: 1030}
    for single, name in islice(permutations(names, 2), 8):
        yield from ({single: 1, name: size} for size in (257, 2049))


def variadic_sizes(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield mappings from the name of a variadic dim (one that stands for any number of dims) to a tuple of sizes. Each
    name gets two sizes beyond one tile, then three small ones, then four.
    """
    for name in names:
        yield {name: (65, 63)}
        yield {name: (3, 2, 5)}
        yield {name: (2, 1, 3, 2)}


def uneven_member_sizes(spec: OpSpec) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield mappings from the name of a list argument to the sizes of its members, which differ from each other.

    Only lists of tensors with unnamed dims are included. In one mapping all lists get the same sequence of sizes, since
    a reference may combine the members of two lists.
    """
    free = [arg for arg in spec.tensors if arg.many and unnamed_dims(arg)]
    for sizes in UNEVEN_SIZES if free else ():
        yield {arg.name: tuple(islice(cycle(sizes), arg.length or len(sizes))) for arg in free}


def odd_scalar_values(arg: Arg, mined: CodeConstants) -> list[Any]:
    """Return unusual values to try for the scalar argument ``arg``. If the argument declares choices, all of them are
    returned. Otherwise the values are zero, negative, large, or near the literals ``mined`` from the code. The list is
    empty for a dtype or a device.
    """
    if arg.choices:
        return list(arg.choices)
    kind = str(arg.scalar)
    ints = [v for v in mined.ints if v <= LONGEST]
    if kind == "int":  # checks first find out whether the reference takes those beyond 32 bits
        unusual = 0, -1, -2, 5, 7, 100, SEVERAL_ROUNDS
        return _unique_by_repr([*unusual, *(n for v in ints[:12] for n in (v, v + 1, v - 1, -v)), *HUGE_INTEGERS])
    if kind == "float":
        literals = [*mined.floats, *map(float, ints[:8])][:14]
        around = [n for v in literals for n in (v, 1.5 * v + 1e-3, 0.5 * v, -v)]
        return _unique_by_repr([0.0, -0.75, -2.0, 1e-4, 37.5, 1e3, *around])
    if kind == "str":
        return list(mined.strings)[:40]
    if kind == "bool":
        return [True, False]
    if kind in ("list[int]", "list[float]", "list[bool]"):
        return _odd_list_values(kind, arg)
    return [-0.75, 0, 3, 37.5] if kind == "Scalar" else []  # dtypes and devices have no odd values


def _odd_list_values(kind: str, arg: Arg) -> list[Any]:
    """Return unusual values of an argument that is a list of ints, floats or bools, each as a tuple. ``kind`` is the
    type, such as ``list[int]``. The tuples differ from the default in length, order, sign and magnitude.
    """
    usual = arg.default if arg.has_default and isinstance(arg.default, (list, tuple)) else ()
    lengths_ = list(dict.fromkeys([*([len(usual)] if usual else []), 1, 2, 3, 5, 0]))
    if kind == "list[int]":
        rows: list[tuple[Any, ...]] = [
            t for n in lengths_ for t in (tuple(range(1, n + 1)), tuple(range(n, 0, -1)), (0,) * n)
        ]
        rows += [(-1,) * n for n in lengths_] + [(2, *(1,) * (n - 1)) for n in lengths_ if n]
        rows += [t for n in lengths_ if n for t in ((*range(9, 9 + n),), (*range(-9, n - 9),))]  # beyond small sizes
        return _unique_by_repr(rows)
    if kind == "list[float]":
        return _unique_by_repr(
            [t for n in lengths_ for t in (tuple(0.5 * i - 1 for i in range(n)), (0.0,) * n, (-2.0,) * n)]
        )
    return _unique_by_repr(
        [t for n in lengths_ for t in (tuple(i % 2 == 0 for i in range(n)), (True,) * n, (False,) * n)]
    )


def _unique_by_repr(values: Sequence[Any]) -> list[Any]:
    """Return ``values`` without repetitions, in order. Two values are equal if their ``repr`` is equal, so ``1`` and
    ``True`` are different.
    """
    seen: dict[str, Any] = {repr(v): v for v in values}
    return list(seen.values())
