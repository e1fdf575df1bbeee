"""The one boundary for files that are loaded as code or relied upon: opening, parsing (``parse``) and writing."""

from shiplap.safe_io.files import (
    CODE,
    NAMED,
    NO_REGULAR_FILE,
    OWN,
    Distrusted,
    OwnershipRule,
    check_content,
    open_file,
    open_folder,
    open_for_writing,
    read_file,
    unsafe_reason,
)
from shiplap.safe_io.parse import ParseLimits, build_yaml, compose_yaml, parse_json
from shiplap.safe_io.write import append_text, copy_whole, host_name, write_bytes, write_text, write_whole

__all__ = [
    "CODE",
    "NAMED",
    "NO_REGULAR_FILE",
    "OWN",
    "Distrusted",
    "OwnershipRule",
    "ParseLimits",
    "append_text",
    "build_yaml",
    "check_content",
    "compose_yaml",
    "copy_whole",
    "host_name",
    "open_file",
    "open_folder",
    "open_for_writing",
    "parse_json",
    "read_file",
    "unsafe_reason",
    "write_bytes",
    "write_text",
    "write_whole",
]
