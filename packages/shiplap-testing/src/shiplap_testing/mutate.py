"""Files that are nearly right: what fuzzers hand to the readers of files."""

from __future__ import annotations

import random

PIECES = (
    *(
        b"[",
        b"{",
        b"}",
        b"]",
        b'"',
        b"'",
        b"-",
        b",",
        b": ",
        b"\n",
        b"\n- ",
        b"\t",
        b"\0",
        b"\xff",
        b"\\ud800",
        b"\\u0000",
    ),
    *(
        b"9" * 30,
        b"1e999",
        b"null",
        b"NaN",
        b"-0",
        b"true",
        b"&a ",
        b"*a",
        b"<<: *a\n",
        b"? ",
        b"!!python/name:os.system ''",
    ),
    *(b"!!binary x", b"!!set {a}", b"2001-99-99", b"0b1", b"1:2:3", b"|\n", b">-\n", b"---\n", b"%YAML 9.9\n", b"# "),
    *(
        b"n<=",
        b"*",
        b"(",
        b"float32[",
        b"::",
        b"<script>",
        b"../../etc/passwd",
        b"__import__('os')",
        "é\u202e".encode(),
        b"\\u001b]0;x\\u0007",
    ),
)


def mutated(rng: random.Random, whole: bytes) -> bytes:
    """Return ``whole`` with one to four random changes drawn from ``rng``. A change alters a byte, removes bytes,
    repeats bytes, or inserts a byte string of ``PIECES``, which are parts of file formats.
    """
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 50)]
        elif kind == 2:
            data[at:at] = rng.choice(PIECES) * rng.choice([1, 1, 1, 2, 9, 100])
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 200)]
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)
