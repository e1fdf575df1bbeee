"""Version ranges of the metadata: ``>=2.11,<2.14``."""

from __future__ import annotations

import operator
import re

__all__ = ["allows"]

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


def _number(version: str) -> tuple[int, ...]:
    """Release numbers only: a local or development suffix says nothing about schemas."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    assert release is not None, version
    return tuple(int(n) for n in release[0].split("."))


def allows(range_: str, version: str) -> bool:
    """Whether ``version`` lies in ``range_``; an empty range allows all. Compared to the precision the range gives."""
    for part in filter(None, range_.split(",")):
        bound = re.match(r"(>=|<=|==|>|<)(.*)", part.strip())
        assert bound is not None, range_
        wanted = _number(bound[2])
        if not _COMPARE[bound[1]](_number(version)[: len(wanted)], wanted):
            return False
    return True
