"""``python -m shiplap.shipping.worker``: fill the packages of an unpacked wheel, in a process of its own.

The packages are imported from the wheel and from nowhere else, whatever the process that asks has imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shiplap.errors import ShiplapError, error
from shiplap.shipping.contents import Bound, Contents, fill

__all__ = ["fill_apart"]


def fill_apart(modules: Sequence[str], unpacked: Path) -> list[Contents]:
    """``contents.fill`` in a process of its own; raises what it raises."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        asked = [str(unpacked), str(answer), *modules]
        done = subprocess.run(
            [sys.executable, "-m", "shiplap.shipping.worker", *asked], capture_output=True, text=True, check=False
        )
        if not answer.exists():
            got = done.stderr.strip()[-2000:] or f"the process ended with status {done.returncode}"
            raise error("SL308", where=", ".join(modules), got=got, expected="modules that can be imported")
        content = json.loads(answer.read_text())
    if isinstance(content, dict):
        raise error(content.pop("id"), **content)
    return [_contents(each) for each in content]


def _contents(each: dict[str, list[dict[str, str]]]) -> Contents:
    bound = [Bound(row["op"], tuple(row["devices"]), row["folder"]) for row in each["bound"]]
    left_out = [(name, why) for name, why in each["left_out"]]
    return Contents(str(each["package"]), tuple(bound), tuple(left_out), tuple(map(str, each["libraries"])))


def _main(unpacked: str, answer: str, *modules: str) -> None:
    sys.path.insert(0, unpacked)
    content: object
    try:
        content = [asdict(each) for each in fill(modules, Path(unpacked))]
    except ShiplapError as e:
        parts = ("id", "what", "where", "got", "expected", "fix")
        content = {part: getattr(e, part) for part in parts}
    Path(answer).write_text(json.dumps(content))


if __name__ == "__main__":
    _main(*sys.argv[1:])
