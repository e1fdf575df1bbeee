"""The environment variables of the launcher process: those of this program, without those that may hold a secret."""

from __future__ import annotations

import os
import re
import sys

from shiplap.sandbox import load_candidate

LAUNCHER_VARIABLES = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "SHIPLAP_RECORD": "",
    "SHIPLAP_TUNED": "",
}
# Without meaning for the launcher: each process that it forks has folders of its own.
UNSHARED_VARIABLES = {"PYTEST_CURRENT_TEST", "SHIPLAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
# With these, memory of torch on a GPU may have no handle, so that no result could be read.
UNSHARED_VARIABLES |= {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
# Variables that may hold a secret. ``PWD`` is the current folder.
SECRET_VARIABLE = re.compile(
    r"key|token|secret|pass(w|p|code|$|_?file)|(^|_)pass(_(?!plugin)|\d)|(?<!^)(?<!^old)pwd|credential|(^|_)(creds?|otp)(_|$)|auth|cookie|private|session|dsn|jwt"
    r"|(^|_)pat($|_)|(database|redis|mongo\w*|broker|index)_ur[il]|webhook|conn(ection)?_?str(ing)?|salt$|netrc",
    re.IGNORECASE,
)
# Values that are a secret under any name: a URL with a password, as of a proxy, or of a webhook, a private key, a
# signed token, a setting that is named like a secret, as in the options of a program, and tokens by the marks that
# their issuers give them. A token has a digit or a capital letter, unlike most folders.
SECRET_VALUE = re.compile(
    r"\w://[^/\s:]*:(?!\d+/)\S+@|\bjdbc:\S*@|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[\w-]{8,}\.[\w-]{8,}\."
    r"|//hooks\.|[?&](?i:sig|(x-(amz|goog)-)?signature)=|AGE-SECRET-KEY-|(?i:--(password|token|secret|api-key)\s+[^\s-])"
    r"|(?i:\bpwd?[\"']?\s*[=:]\s*(?!\d{1,3}\b)[^\s/])"
    # Neither words such as "bypass" nor what is set to a flag or a small number, as in the flags of a compiler.
    r"|(?i:((?<![a-z])pass|pass(word|wd|phrase)|secret|token|(account|access|api)[_-]?key|authorization)[\"']?\s*"
    r"(=\s*(?!(\d{1,3}|on|off|true|false)(?![\w.]))\S|:\s*[^\s/]))"
    r"|(?i:\b(basic|bearer) [\w+/=.-]{8,})"
    r"|(?<![\w.]/)(?<![\w-])((gh[a-z]_|github_pat_|hf_|npm_|AKIA|ASIA)(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}"
    r"|(glpat-|sk-|xox[a-z]-|xapp-|pypi-|AIza|ya29\.|SG\.|[srp]k_(live|test)_|whsec_|dop_v1_|shp[a-z]{2}_|dckr_pat_|glsa_|ATATT|figd_|lin_api_|dapi)"
    r"(?=[a-z_-]*[A-Z0-9])[\w-]{16,})"
)


# What random tokens are made of, whoever issues them: 20 letters and digits of both cases, or 32 hexadecimal digits.
# Paths, and names that are set to something, have long words as well.
SEPARATORS = re.compile(r"[\s,;:=\"'&?|]+")
RANDOM_WORD = re.compile(
    r"(?<![A-Za-z0-9])((?=[A-Za-z]*\d)(?=[A-Z\d]*[a-z])(?=[a-z\d]*[A-Z])[A-Za-z\d]{20,}|(?=[a-f]*\d)(?=\d*[a-f])[\da-f]{32,})"
    r"(?![A-Za-z0-9])"
)


def is_secret(name: str, value: str) -> bool:
    """Return whether the name or the value of an environment variable suggests that it holds a secret."""
    if SECRET_VARIABLE.search(name) or SECRET_VALUE.search(value):
        return True
    words = SEPARATORS.split(value)
    return any(RANDOM_WORD.search(word) for word in words if not word.startswith(("/", ".", "~", "-")))


def launcher_environment() -> dict[str, str]:
    """Return the environment variables of a new launcher, which is the process that forks sandboxed processes.

    They are those of this program and the values in ``LAUNCHER_VARIABLES``. Variables whose names or values suggest a
    secret and those in ``UNSHARED_VARIABLES`` are left out. ``PYTHONPATH`` has the folders of ``sys.path``, but for
    those of judged files: Python imports ``sitecustomize`` from there before anything is sandboxed.
    """
    shown = {
        k: v for k, v in os.environ.items() if k not in UNSHARED_VARIABLES and not is_secret(k, v)
    } | LAUNCHER_VARIABLES
    return shown | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and p not in load_candidate.added_folders)}
