"""The judge loads what a verdict needs: sandbox, samples and comparison, and none of the rooms beside it."""

from __future__ import annotations

import json

from shiplap_testing.forked import python

LOADED = """
import json, sys
import shiplap.judge.engine, shiplap.judge.result
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "shiplap"]))
"""
ROOMS = {"judge", "sandbox", "sampling", "dispatch", "plan", "declare", "torch_private", "render", "errors"}
GROUND = {"cached_property", "dtypes", "lazy_imports", "settings"}
MOST = 160  # it loads 148: there is space for a few more modules, not for another room


def test_the_engine_loads_few_modules_and_nothing_of_the_audit() -> None:
    done = python("-c", LOADED)  # it has imported torch, and nothing of shiplap
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    rooms = {name.split(".")[1] for name in modules if "." in name}
    assert "judge" in rooms
    assert rooms <= ROOMS | GROUND | {"tuning"}
    assert [name for name in modules if name.startswith("shiplap.tuning.")] == ["shiplap.tuning.compiled_templates"]
    assert len(modules) <= MOST
