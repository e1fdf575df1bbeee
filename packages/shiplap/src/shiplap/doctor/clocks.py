"""Which names of a program read a clock. A call that does stays where it is, since it would measure another time."""

from __future__ import annotations

import ast
import re
from collections.abc import Set as AbstractSet
from functools import lru_cache

from shiplap.doctor.edits import Source

_CLOCK = r"(time|perf_counter|monotonic|process_time|thread_time|elapsed_time|default_timer|clock_gettime)(_ns)?"
# A reading of a date counts where readings are subtracted from each other.
_READING = re.compile(rf"\b{_CLOCK}\(|\bnow\(.*-|-.*\bnow\(")
_MODULES = frozenset({"time", "timeit"})


@lru_cache(maxsize=64)
def clock_names(source: Source) -> frozenset[str]:
    """Return the names in the file that stand for clocks: what it imports from the modules of clocks, variables and
    attributes to which it assigns a clock, and functions that read one, directly or through others.
    """
    found, nodes = set[str](), list(ast.walk(source.tree))
    for n in nodes:
        if isinstance(n, ast.ImportFrom) and n.module in _MODULES:
            found |= {a.asname or a.name for a in n.names if re.fullmatch(_CLOCK, a.name)}
        elif isinstance(n, ast.Assign) and re.search(rf"\b{_CLOCK}$", ast.unparse(n.value)):
            found |= {ast.unparse(t).rpartition(".")[2] for t in n.targets}
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    while new := {f.name for f in functions if f.name not in found and _reads(ast.unparse(f), found)}:
        found |= new
    return frozenset(found)


def _reads(code: str, names: AbstractSet[str]) -> bool:
    """Return whether the source code ``code`` calls a clock, of which the file knows some by ``names``."""
    called = set(re.findall(r"\b(\w+)\(", code))
    return bool(_READING.search(code) or called & names)


def reads_clock(source: Source, code: str) -> bool:
    """Return whether the source code ``code`` of the file calls a clock, or a function of the file that does."""
    return _reads(code, clock_names(source))
