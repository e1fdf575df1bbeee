"""The one boundary for files that are loaded as code or relied upon: opening, parsing (``parse``) and writing."""

from shiplap.safe_io.files import (
    CODE,
    NAMED,
    OWN,
    Distrusted,
    Rule,
    check_content,
    open_file,
    open_folder,
    read_file,
    reason,
)
from shiplap.safe_io.parse import Limits, build_yaml, compose_yaml, parse_json
from shiplap.safe_io.write import host, write_whole

__all__ = [
    "CODE",
    "NAMED",
    "OWN",
    "Distrusted",
    "Limits",
    "Rule",
    "build_yaml",
    "check_content",
    "compose_yaml",
    "host",
    "open_file",
    "open_folder",
    "parse_json",
    "read_file",
    "reason",
    "write_whole",
]
