"""The version ranges of the metadata: ``>=2.11,<2.14``."""

from __future__ import annotations

import operator
import re

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}


def _release_number(version: str) -> tuple[int, ...]:
    """Return the release numbers of ``version``, such as ``(2, 13, 0)`` for ``2.13.0+cpu``.

    Suffixes are ignored, because they do not change operator schemas.
    """
    release = re.match(r"\d+(?:\.\d+)*", version)
    assert release is not None, version
    return tuple(int(n) for n in release[0].split("."))


def range_allows(range_: str, version: str) -> bool:
    """Return whether ``version`` lies in ``range_``, such as ``>=2.11,<2.14``.

    A version is compared to the precision of each bound. If ``range_`` is an empty string, all versions lie in it.
    """
    for part in filter(None, range_.split(",")):
        bound = re.match(r"(>=|<=|==|>|<)(.*)", part.strip())
        assert bound is not None, range_
        wanted = _release_number(bound[2])
        # Cut to the bound's precision: 2.11.1 is in ``<=2.11``.
        if not _COMPARE[bound[1]](_release_number(version)[: len(wanted)], wanted):
            return False
    return True


def is_range(text: str) -> bool:
    """Return whether ``text`` is a version range, such as ``>=2.11,<2.14``."""
    bound = r"(?:>=|<=|==|>|<)\d+(?:\.\d+)*"
    return re.fullmatch(rf"{bound}(?:,{bound})*", text) is not None


def empty_range(range_: str) -> bool:
    """Return whether no version lies in ``range_``.

    Versions at each bound and next to it are tried.
    """
    bounds = [_release_number(re.sub(r"[<>=]", "", part)) for part in range_.split(",")]
    # Bounds split the versions into intervals, of which these points hit every one.
    near = [(0,)] + [n for b in bounds for n in (b, (*b, 1), (*b[:-1], b[-1] - 1, 999))]
    return not any(range_allows(range_, ".".join(map(str, n))) for n in near if min(n) >= 0)
