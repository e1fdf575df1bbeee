"""Version ranges of the metadata: ``>=2.11,<2.14``."""

from __future__ import annotations

import operator
import re

__all__ = ["allows"]

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


def _number(version: str) -> tuple[int, ...]:
    """Release numbers only: a local or development suffix says nothing about schemas."""
    return tuple(int(n) for n in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))  # type: ignore[index]


def allows(range_: str, version: str) -> bool:
    """Whether ``version`` lies in ``range_``; an empty range allows all. Compared to the precision the range gives."""
    for part in filter(None, range_.split(",")):
        sign, bound = re.match(r"(>=|<=|==|>|<)(.*)", part.strip()).groups()  # type: ignore[union-attr]
        wanted = _number(bound)
        if not _COMPARE[sign](_number(version)[: len(wanted)], wanted):
            return False
    return True
