"""An in-toto statement: a JSON file with digests of the examined objects, and with the findings.

The form is the Statement of the in-toto attestation framework, version 1. Shiplap does not sign it: the tools of
sigstore and ``ssh-keygen -Y sign`` sign such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shiplap import safe_io
from shiplap.errors import writing

STATEMENT = "https://in-toto.io/Statement/v1"


def write_statement(path: Path, subjects: Mapping[str, str], predicate_type: str, predicate: Mapping[str, Any]) -> None:
    """Write an in-toto statement (a signable JSON file) about ``subjects`` to ``path``. If writing fails, an existing
    file is unchanged.

    Args:
        path: the file to write.
        subjects: the name of each examined object, and its SHA-256 digest as 64 hexadecimal digits.
        predicate_type: the URI that identifies the format of ``predicate``.
        predicate: the plain values that the statement says of the subjects. Infinities and NaN become null.

    Raises:
        CommandError: ``SL602`` if the file cannot be written.
    """
    statement = {
        "_type": STATEMENT,
        # Sorted, so that one result has one statement.
        "subject": [{"name": name, "digest": {"sha256": subjects[name]}} for name in sorted(subjects)],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    with writing(path, "the statement", "a path in an existing, writable directory"):
        plain = json.loads(json.dumps(msgspec.to_builtins(statement)), parse_constant=lambda name: None)
        text = json.dumps(plain, indent=1, ensure_ascii=False)
        safe_io.write_whole(path, safe_io.encode_text(text + "\n"))
