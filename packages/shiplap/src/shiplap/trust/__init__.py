"""The one boundary for files that are loaded as code or believed: ``files`` opens them, ``parse`` parses them.

SECURITY.md says what is trusted and what is not. Everything in ``SHIPLAP_CACHE_DIR`` is opened as ``CODE``: whoever
could have put it there could have run code as this user. A file that the user names (a frozen table, a passport, a
record) is opened as ``NAMED``. What either holds is parsed within bounds, and is data: no path, no code.
"""

from shiplap.trust.files import CODE, NAMED, OWN, Distrusted, Rule, open_file, open_folder, read_file, reason
from shiplap.trust.parse import Limits, build_yaml, compose_yaml, parse_json

__all__ = [
    "CODE",
    "NAMED",
    "OWN",
    "Distrusted",
    "Limits",
    "Rule",
    "build_yaml",
    "compose_yaml",
    "open_file",
    "open_folder",
    "parse_json",
    "read_file",
    "reason",
]
