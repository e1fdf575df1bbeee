"""Children forked at random moments of a storm: ``python forks.py COUNT THREADS FOLDER SEED``.

Sixteen threads call an op, and one declares it again, attaches native code, tunes and clears, while another thread
forks. Each child does with the op what a worker of a data loader might: it calls, is refused, looks up, stores,
attaches. A child that takes longer than two minutes hangs: its stack is printed, and the status is 1.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
from storm import SOURCE, Storm, declare

import shiplap as sl
from shiplap.bind import native
from shiplap.errors import ShiplapError, notice
from shiplap.op import choices, registry
from shiplap.op.config import Config
from shiplap.selection import thaw
from shiplap.selection.key import Key
from shiplap.selection.store import Store
from shiplap_testing.build import compile_c
from shiplap_testing.choices import FIELDS, VALUE

PATIENCE = 120.0


def child(storm: Storm, seed: int) -> None:
    """Everything that takes a lock of ours."""
    x = torch.arange(64.0) + seed
    for door in (storm.through_op, storm.through_torch, storm.through_held, storm.into, storm.refused):
        assert torch.equal(door(x), 2 * x), door.__name__
    notice(f"fork {seed}", "a child says something")
    key = ("cpu", *storm.op.rule.key(storm.op.bind([x])))
    choices.install([choices.Entry(storm.op.spec.name, storm.op.identity, key, "twice", Config.of({"tile": 2}))])
    assert torch.equal(storm.op(x), 2 * x)
    thaw()
    assert registry.find("storm::twice") is not None
    Store().put(Key.of(FIELDS), VALUE)
    native.state(storm.op)
    try:
        native.build(storm.op)
    except ShiplapError as e:
        if e.id != "SL404":  # declared again in the parent, and its kernel not yet
            raise
    assert torch.equal(storm.op(x), 2 * x)


def fork(storm: Storm, seed: int) -> str:
    """What went wrong in a child, or nothing."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            faulthandler.dump_traceback_later(PATIENCE - 10, exit=True)
            child(storm, seed)
            status = 0
        except BaseException:
            sys.stderr.write(f"child {seed}: {traceback.format_exc()}\n")
        finally:
            os._exit(status)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return f"child {seed} ended with {code}" if code else ""
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return f"child {seed} hangs"


def main(count: int, threads: int, folder: Path, seed: int) -> int:
    warnings.simplefilter("ignore")
    plain = declare(None)
    library = compile_c(folder, "storm", {"twice": plain}, SOURCE, configs={"twice": ["tile"]})
    native.build(declare(library))
    storm, wrong = Storm(library, 1e9), list[str]()
    callers = [threading.Thread(target=storm.call, args=(n,), daemon=True) for n in range(threads)]

    def forks() -> None:
        rng = random.Random(seed)
        for number in range(count):
            time.sleep(rng.random() * 0.02)
            if problem := fork(storm, number):
                wrong.append(problem)
                break
        storm.until = 0.0

    callers.append(threading.Thread(target=forks))
    for each in callers:
        each.start()
    changes = 0
    while storm.going():
        storm.everything()
        changes += 1
    for each in callers:
        each.join()
    print(f"{count} forks of seed {seed}, {storm.calls} calls, {changes} changes, {wrong + storm.wrong}")
    assert isinstance(storm.op, sl.Op)
    return int(bool(wrong or storm.wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
