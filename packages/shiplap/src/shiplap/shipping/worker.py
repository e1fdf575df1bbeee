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
from typing import Any

from shiplap.errors import ShiplapError, error
from shiplap.shipping.contents import Bound, Contents, Extras, fill

__all__ = ["fill_apart"]


def fill_apart(modules: Sequence[str], unpacked: Path, extras: Extras) -> list[Contents]:
    """``contents.fill`` in a process of its own; raises what it raises."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        more = {"tuned": _absolute(extras.tuned), "calls": _absolute(extras.calls), "cubins": extras.cubins}
        asked = [str(unpacked), str(answer), json.dumps(more), *modules]
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


def _absolute(path: Path | None) -> str:
    return str(path.absolute()) if path is not None else ""


def _contents(each: dict[str, Any]) -> Contents:
    bound = [Bound(row["op"], tuple(row["devices"]), row["folder"]) for row in each["bound"]]
    pairs = {name: tuple([(str(what), value) for what, value in each[name]]) for name in ("left_out", "cubins")}
    libraries = tuple(map(str, each["libraries"]))
    return Contents(str(each["package"]), tuple(bound), libraries=libraries, choices=int(each["choices"]), **pairs)


def _main(unpacked: str, answer: str, more: str, *modules: str) -> None:
    sys.path.insert(0, unpacked)
    content: object
    try:
        asked = json.loads(more)
        tuned, calls = (Path(asked[name]) if asked[name] else None for name in ("tuned", "calls"))
        extras = Extras(tuned, tuple(asked["cubins"]), calls)
        content = [asdict(each) for each in fill(modules, Path(unpacked), extras)]
    except ShiplapError as e:
        parts = ("id", "what", "where", "got", "expected", "fix")
        content = {part: getattr(e, part) for part in parts}
    Path(answer).write_text(json.dumps(content))


if __name__ == "__main__":
    _main(*sys.argv[1:])
