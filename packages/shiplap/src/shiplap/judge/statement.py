"""The statement of a verdict: the digests of both files, the verdict and the versions of this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from shiplap.judge.result import JudgeResult
from shiplap.judge.target import JudgeTarget
from shiplap.render import facts, write_statement

PREDICATE_TYPE = "urn:shiplap:verdict:1"


def write_judge_statement(path: Path, result: JudgeResult, reference: Any, candidate: Any) -> None:
    """Write the statement of a verdict, whose subjects are the files of both targets. SL602 if that fails.

    A target without a file, such as a module that is built in, is no subject.
    """
    targets = {"reference": reference, "candidate": candidate}
    files = {role: JudgeTarget.of(target, ("",)).file for role, target in targets.items()}
    subjects = {
        f"{role}/{os.path.basename(file)}": hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for role, file in files.items()
        if file
    }
    write_statement(path, subjects, PREDICATE_TYPE, {"facts": facts(), **result.as_json()})
