"""Hostile YAML is SL901 at once: aliases that stand for millions of values, depth, numbers, names that are no text."""

from __future__ import annotations

import time

import pytest

from shiplap import ShiplapError
from shiplap_backend.metadata import load_metadata

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
MAPS = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 40))
HOSTILE = {
    "alias bomb": BOMB,
    "alias bomb of mappings": MAPS,
    "circle": "a: &a [*a]\n",
    "circle of mappings": "a: &a {b: *a}\n",
    "deep": "[" * 100_000,
    "deep mapping": "".join(" " * n + f"a{n}:\n" for n in range(500)),
    "huge number": "ops: " + "9" * 300_000,
    "NUL": "a: b\0c\n",
    "a list as a name": "? [a, b]\n: 1\n",
    "no time": "a: 2001-99-99\n",
    "a tag of Python": "a: !!python/object/apply:os.system ['true']\n",
    "not UTF-8": b"\xff\xfe",
    "too long": "# " + "x" * (1 << 20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_an_error_at_once(tmp_path, name):
    content = HOSTILE[name]
    path = tmp_path / "ops.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o600)
    started = time.process_time()
    with pytest.raises(ShiplapError, match="SL901"):
        load_metadata(path)
    assert time.process_time() - started < 1
