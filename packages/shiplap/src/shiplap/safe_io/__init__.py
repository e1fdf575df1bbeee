"""The one boundary for files that are loaded as code or relied upon: opening, parsing (``parse``) and writing."""

from shiplap.safe_io.files import (
    CODE,
    NAMED,
    OWN,
    Distrusted,
    OwnershipRule,
    check_content,
    open_file,
    open_folder,
    read_file,
    unsafe_reason,
)
from shiplap.safe_io.parse import ParseLimits, build_yaml, compose_yaml, parse_json
from shiplap.safe_io.write import host_name, write_whole

__all__ = [
    "CODE",
    "NAMED",
    "OWN",
    "Distrusted",
    "OwnershipRule",
    "ParseLimits",
    "build_yaml",
    "check_content",
    "compose_yaml",
    "host_name",
    "open_file",
    "open_folder",
    "parse_json",
    "read_file",
    "unsafe_reason",
    "write_whole",
]
