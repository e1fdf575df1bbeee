"""The printer of ``shiplap/dtypes.h``, the table of dtypes for C and C++.

Usage: ``python -m shiplap.codegen.dtypes [--check]``.
"""

from __future__ import annotations

import sys

from shiplap.codegen.environment import render_source
from shiplap.dtypes import DTYPES
from shiplap.safe_io import write_text
from shiplap_headers import include_dir


def dtypes_header() -> str:
    """Return the source code of the C header ``shiplap/dtypes.h``. It lists the dtypes in the order of their
    ``ScalarType`` numbers.
    """
    return render_source("dtypes.h.jinja", dtypes=sorted(DTYPES.values(), key=lambda row: row.number))


def write_or_compare(arguments: list[str]) -> str:
    """Write ``shiplap/dtypes.h``. With the arguments ``["--check"]``, leave the file unchanged and compare it with the
    source code that would be written.

    Return a message if the file is out of date or the arguments are wrong, and otherwise an empty string.
    """
    if arguments not in ([], ["--check"]):
        return "usage: python -m shiplap.codegen.dtypes [--check]"
    # The header is committed, because C++ code that includes it is compiled without Python.
    path, text = include_dir() / "shiplap" / "dtypes.h", dtypes_header()
    if not arguments:
        write_text(path, text)
    return "" if path.read_text() == text else f"{path} is not what shiplap/dtypes.py says: write it anew"


if __name__ == "__main__":
    sys.exit(write_or_compare(sys.argv[1:]) or None)
