"""A choice as the store and the tables keep it, for tests that write, damage or forge one."""

from __future__ import annotations

from typing import Any

#: The fields of a key. The op does not have to exist.
FIELDS: dict[str, str] = {
    "op": "trust_test::op",
    "device": "cpu",
    "bucket": "n<=8",
    "source": "0123",
    "torch": "2",
    "dtypes": "",
}

#: What a key stands for: kernel "k" with ``tile=1``.
VALUE: dict[str, Any] = {
    "kernel": "k",
    "config": {"tile": 1},
    "time": 1.0,
    "runner_up": "",
    "runner_up_time": 0.0,
    "default_time": 0.0,
    "reason": "",
    "findings": [],
    "tried": 1,
    "sizes": "",
}
