"""The one table of dtypes: everything that shiplap, its C++ and its kernels know of an element's type.

``include/shiplap/dtypes.h`` is generated from it (``python -m shiplap.codegen.dtypes``), and so is every other list of
dtypes. A dtype that torch has and this table has not is refused by the C ABI, never taken for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from shiplap.errors import error

Kind = Literal["bool", "unsigned", "signed", "float", "float8", "float4", "complex"]


@dataclass(frozen=True)
class Dtype:
    """The properties of one dtype.

    Attributes:
        name: torch's name of it.
        number: torch's ScalarType, which the stable ABI fixes.
        dlpack: DLPack's type code, bits and lanes.
        kind: the kind of its values, such as ``"signed"`` for signed integers.
        short: the name in command lines and tables of results, or an empty string.
        aten: the name in ATen's C++ after ``at::``. It is empty if C++ wrappers of a new backend may not use it.
        native: whether torch's stable ABI names it from torch 2.11 on, so that generated C++ may allocate it.
        sampled: rank among the dtypes of sample arguments, from 1 for the preferred one. It is 0 if no sample has it.
    """

    name: str
    number: int
    dlpack: tuple[int, int, int]
    kind: Kind
    short: str = ""
    aten: str = ""
    native: bool = True
    sampled: int = 0

    @property
    def torch(self) -> torch.dtype:
        """The ``torch.dtype`` of this name."""
        dtype = getattr(torch, self.name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def floating(self) -> bool:
        """Whether the elements are floating-point numbers of any width, including float8 and float4. Complex dtypes do
        not count.
        """
        return self.kind in ("float", "float8", "float4")

    @property
    def differentiable(self) -> bool:
        """Whether a tensor of this dtype can require a gradient, as floating-point and complex tensors can."""
        return self.floating or self.kind == "complex"

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes, computed from DLPack's bits and lanes. It is rounded down, so it is 0 below
        eight bits.
        """
        return self.dlpack[1] * self.dlpack[2] // 8


# DLPack's codes are those of dlpack.h 1.2.
_ROWS = (
    Dtype("uint8", 0, (1, 8, 1), "unsigned", "u8", "kByte", sampled=10),
    Dtype("int8", 1, (0, 8, 1), "signed", "i8", "kChar", sampled=9),
    Dtype("int16", 2, (0, 16, 1), "signed", "i16", "kShort", sampled=8),
    Dtype("int32", 3, (0, 32, 1), "signed", "i32", "kInt", sampled=7),
    Dtype("int64", 4, (0, 64, 1), "signed", "i64", "kLong", sampled=6),
    Dtype("float16", 5, (2, 16, 1), "float", "f16", "kHalf", sampled=4),
    Dtype("float32", 6, (2, 32, 1), "float", "f32", "kFloat", sampled=1),
    Dtype("float64", 7, (2, 64, 1), "float", "f64", "kDouble", sampled=2),
    Dtype("complex32", 8, (5, 32, 1), "complex", "c32", native=False),
    Dtype("complex64", 9, (5, 64, 1), "complex", "c64", sampled=5),
    Dtype("complex128", 10, (5, 128, 1), "complex", "c128"),
    Dtype("bool", 11, (6, 8, 1), "bool", "bool", "kBool", sampled=11),
    Dtype("bfloat16", 15, (4, 16, 1), "float", "bf16", "kBFloat16", sampled=3),
    Dtype("float8_e5m2", 23, (12, 8, 1), "float8", "f8e5m2"),
    Dtype("float8_e4m3fn", 24, (10, 8, 1), "float8", "f8e4m3"),
    Dtype("float8_e5m2fnuz", 25, (13, 8, 1), "float8", "f8e5m2fnuz"),
    Dtype("float8_e4m3fnuz", 26, (11, 8, 1), "float8", "f8e4m3fnuz"),
    Dtype("uint16", 27, (1, 16, 1), "unsigned", "u16", native=False),
    Dtype("uint32", 28, (1, 32, 1), "unsigned", "u32", native=False),
    Dtype("uint64", 29, (1, 64, 1), "unsigned", "u64", native=False),
    Dtype("float8_e8m0fnu", 44, (14, 8, 1), "float8", "f8e8m0", native=False),
    Dtype("float4_e2m1fn_x2", 45, (17, 4, 2), "float4", "f4e2m1x2", native=False),
)

# Older versions of torch lack the newest dtypes.
DTYPES: Mapping[str, Dtype] = MappingProxyType({row.name: row for row in _ROWS if hasattr(torch, row.name)})
_BY_TORCH = {row.torch: row for row in DTYPES.values()}


def of(dtype: torch.dtype, where: str) -> Dtype:
    """Return the row of the table of dtypes for ``dtype``. Raise ``SL214``, with ``where`` as the place, if the table
    has no such row, as for a quantised dtype.
    """
    # A dtype that is not in the table must not be passed to the C ABI as another one.
    row = _BY_TORCH.get(dtype)
    if row is None:
        raise error("SL214", where=where, got=str(dtype), expected=f"one of {', '.join(DTYPES)}")
    return row


def in_aten() -> dict[str, Dtype]:
    """Return the dtypes that C++ wrappers generated for a new backend may mention, as a mapping from short name. They
    are in the order in which generated sample arguments prefer them.
    """
    rows = sorted(DTYPES.values(), key=lambda row: row.sampled or len(DTYPES))
    return {row.short: row for row in rows if row.aten}


def preferred() -> tuple[str, ...]:
    """Return the torch names of the dtypes of generated sample arguments, with the most preferred first."""
    return tuple(row.name for row in sorted(DTYPES.values(), key=lambda row: row.sampled) if row.sampled)


def floating(*, widest: int = 64) -> tuple[str, ...]:
    """Return the torch names of the floating-point dtypes in which sample arguments are generated, with the most
    preferred first. They have at most ``widest`` bits.
    """
    return tuple(n for n in preferred() if DTYPES[n].floating and DTYPES[n].dlpack[1] <= widest)


def integers() -> tuple[str, ...]:
    """Return the torch names of the integer dtypes in which sample arguments are generated, with the most preferred
    first.
    """
    return tuple(n for n in preferred() if DTYPES[n].kind in ("signed", "unsigned"))


def integers_alone(names: Iterable[str]) -> bool:
    """Return whether ``names``, which stand for the dtypes of one tensor, are those of integers of any width. Return
    False for no names, which stand for any dtype.
    """
    given = tuple(names)
    return bool(given) and all("int" in name for name in given)


def rows(names: Iterable[str]) -> tuple[Dtype, ...]:
    """Return the rows of the table of dtypes for ``names``, torch names, in their order. Names that the table lacks are
    left out.
    """
    return tuple(DTYPES[name] for name in names if name in DTYPES)


def differentiable(names: Iterable[str]) -> bool:
    """Return whether a tensor whose dtype is one of ``names`` may require a gradient. Return True for no names, which
    stand for any dtype.
    """
    given = tuple(names)
    return not given or any(row.differentiable for row in rows(given))


def number(name: str) -> int:
    """Return torch's ``ScalarType`` number of the dtype ``name``. Return -1 if generated C++ cannot allocate the dtype
    through torch's stable ABI.
    """
    row = DTYPES.get(name)
    return row.number if row is not None and row.native else -1


def numbers(names: Iterable[str]) -> tuple[int, ...]:
    """Return torch's ``ScalarType`` numbers of those dtypes among ``names`` that generated C++ can allocate, in their
    order.
    """
    return tuple(codes for name in names if (codes := number(name)) >= 0)


# A bit set makes the test of a dtype in generated C++ one shift and one AND.
def mask(names: Iterable[str]) -> str:
    """Return a C++ ``uint64_t`` expression for a bit set of ``names``. A bit is set for the ``ScalarType`` number of
    each dtype that generated C++ can allocate.
    """
    return f"uint64_t{{{sum(1 << number for number in numbers(names))}}}"
