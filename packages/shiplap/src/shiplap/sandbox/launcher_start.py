"""How the process of a launcher starts: its program, and the variables that it sees."""

from __future__ import annotations

import os
import re
import sys

QUIET = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SHIPLAP_RECORD": "",
    "SHIPLAP_TUNED": "",
}
# What is imported stays. An interrupt is for the program that asks, which may go on; the launcher shares its terminal.
START = (
    "import gc, signal; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from shiplap.sandbox.launcher import main; main()"
)
# Nothing to the launcher: each process that it forks has folders of its own.
OWN = {"PYTEST_CURRENT_TEST", "SHIPLAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
SECRET = re.compile("key|token|secret|passw|credential|auth", re.IGNORECASE)  # variables that nobody there needs


def environment() -> dict[str, str]:
    """The variables with which a launcher of this program starts."""
    shown = {k: v for k, v in os.environ.items() if k not in OWN and not SECRET.search(k)} | QUIET
    return shown | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
