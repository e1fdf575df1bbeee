"""The program text and the environment variables with which a launcher starts."""

from __future__ import annotations

import os
import re
import sys

LAUNCHER_VARIABLES = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SHIPLAP_RECORD": "",
    "SHIPLAP_TUNED": "",
}
# Imported objects stay, so collecting garbage meanwhile is wasted time. An interrupt from the shared terminal is for
# the program that uses the launcher, and must not end the launcher.
LAUNCHER_PROGRAM = (
    "import gc, signal; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from shiplap.sandbox.launcher import main; main()"
)
# Without meaning for the launcher: each process that it forks has folders of its own.
UNSHARED_VARIABLES = {"PYTEST_CURRENT_TEST", "SHIPLAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
# Variables that may hold a secret.
SECRET_VARIABLE = re.compile("key|token|secret|passw|credential|auth", re.IGNORECASE)


def launcher_environment() -> dict[str, str]:
    """Return the environment variables with which a launcher of this program starts."""
    shown = {
        k: v for k, v in os.environ.items() if k not in UNSHARED_VARIABLES and not SECRET_VARIABLE.search(k)
    } | LAUNCHER_VARIABLES
    return shown | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
