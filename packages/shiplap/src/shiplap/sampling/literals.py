"""Literals in the text of source code, which is read and not run."""

import re

SOURCE_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
# Floats of C++ and of Triton.
FLOAT_LITERAL = re.compile(r"(?<![\w.])(\d{1,6}\.\d{0,17}(?:e[+-]?\d{1,2})?)(?=[fF]?\b|\b|\W)")


def integers_in_text(text: str) -> list[int]:
    """Return the decimal integers in the string ``text`` of source code, and the values of expressions that shift 1 to
    the left (``1 << 10``).
    """
    plain = [int(v) for v in re.findall(r"(?<![\w.])(\d{1,7})(?![\w.])", text)]
    return plain + [1 << int(v) for v in re.findall(r"\b1[uUlL]*\s*<<\s*(\d{1,2})\b", text) if int(v) < 24]
