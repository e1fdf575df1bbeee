"""The judge loads what a verdict needs: sandbox, samples and comparison, and none of the rooms beside it.

A plain function is judged without the rooms of declarations, here and in the process that forks its sandboxes.
"""

from __future__ import annotations

import json

import pytest

from shiplap_testing.forked import python

LOADED = """
import json, sys
import {}
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "shiplap"]))
"""
OF_A_LAUNCHER = {"sandbox", "torch_private", "errors", "lazy_imports", "safe_io"}
OF_A_JUDGEMENT = OF_A_LAUNCHER | {"judge", "sampling", "render", "cached_property"}


# They load 95 and some 45 modules: there is space for a few more, not for another room.
@pytest.mark.parametrize(
    ("module", "rooms", "most"),
    [("shiplap.judge.engine", OF_A_JUDGEMENT, 98), ("shiplap.sandbox.launcher", OF_A_LAUNCHER, 49)],
    ids=["a judgement", "its launcher"],
)
def test_few_modules_are_loaded_and_nothing_of_declarations_or_the_audit(
    module: str, rooms: set[str], most: int
) -> None:
    done = python("-c", LOADED.format(module))  # it has imported torch, and nothing of shiplap
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    assert module in modules
    assert {name.split(".")[1] for name in modules if "." in name} <= rooms
    assert len(modules) <= most
