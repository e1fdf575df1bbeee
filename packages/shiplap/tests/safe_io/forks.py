"""Children forked at random moments of a storm: ``python forks.py COUNT THREADS FOLDER SEED``.

Sixteen threads call an op, and one declares it again, attaches native code, tunes and clears, while another thread
forks. Each child does with the op what a worker of a data loader might: it calls, is refused, looks up, stores,
attaches. A child may have to wait for a compiler, for as long as ``bind.build.WAIT`` says: one that takes longer hangs,
its stack is printed, and the status is 1. Of one that takes long it is said who holds which lock.
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
from shiplap.declare.config import Config
from shiplap.dispatch import registry, tuned_choices
from shiplap.errors import ShiplapError, notice
from shiplap.kernels.native import binding
from shiplap.kernels.native.build import LOCK_WAIT_S
from shiplap.tuning import thaw
from shiplap.tuning.key import Key
from shiplap.tuning.store import ChoiceStore
from shiplap_testing.build import compile_c
from shiplap_testing.choices import FIELDS, VALUE

PATIENCE = LOCK_WAIT_S + 120.0
SLOW = 60.0


def child(storm: Storm, seed: int) -> None:
    """Everything that takes a lock of ours."""
    x = torch.arange(64.0) + seed
    for door in (storm.through_op, storm.through_torch, storm.through_held, storm.into, storm.refused):
        assert torch.equal(door(x), 2 * x), door.__name__
    notice(f"fork {seed}", "a child says something")
    key = ("cpu", *storm.op.rule.key(storm.op.bind([x])))
    tuned_choices.install_choice_entries(
        [tuned_choices.ChoiceEntry(storm.op.spec.name, storm.op.identity, key, "twice", Config.of({"tile": 2}))]
    )
    assert torch.equal(storm.op(x), 2 * x)
    thaw()
    assert registry.find_declared_op("storm::twice") is not None
    ChoiceStore().put(Key.of(FIELDS), VALUE)
    binding.state(storm.op)
    try:
        binding.build(storm.op)
    except ShiplapError as e:
        if e.id != "SL404":  # declared again in the parent, and its kernel not yet
            raise
    assert torch.equal(storm.op(x), 2 * x)


def holders() -> str:
    """Which process holds the lock of which build, and what it is doing."""
    locks = []
    for line in Path("/proc/locks").read_text().splitlines():
        _, kind, _, _, pid, file, *_ = [word for word in line.split() if word != "->"]
        for path in Path(os.environ["SHIPLAP_CACHE_DIR"], "native").glob("*.lock"):
            if kind == "FLOCK" and int(file.rpartition(":")[2]) == path.stat().st_ino:
                children = Path(f"/proc/{pid}/task/{pid}/children")
                builds = children.read_text() if children.exists() else "it has ended, "
                locks.append(f"{path.name} {'waited for' if '->' in line else 'held'} by {pid}, children {builds}")
    return "; ".join(locks) or "nobody holds a lock"


class Forked(Storm):
    """A storm with children: ``slowest`` is the longest that one took, in seconds."""

    slowest = 0.0


def fork(storm: Forked, seed: int) -> str:
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
    started = asked = time.monotonic()
    while (now := time.monotonic()) < started + PATIENCE:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            storm.slowest = max(storm.slowest, now - started)
            return f"child {seed} ended with {code}" if code else ""
        if now > asked + SLOW:
            asked = now
            print(f"child {seed} takes {now - started:.0f} s; {holders()}", flush=True)
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return f"child {seed} hangs"


def main(count: int, threads: int, folder: Path, seed: int) -> int:
    warnings.simplefilter("ignore")
    plain = declare(None)
    library = compile_c(folder, "storm", {"twice": plain}, SOURCE, configs={"twice": ["tile"]})
    binding.build(declare(library))
    storm, wrong = Forked(library, 1e9), list[str]()
    callers = [threading.Thread(target=storm.call, args=(n,), daemon=True) for n in range(threads)]

    def forks() -> None:
        rng = random.Random(seed)
        for number in range(count):
            time.sleep(rng.random() * 0.02)
            if problem := fork(storm, number):
                wrong.append(problem)
                break
            if number % 50 == 49:
                print(f"{number + 1} forks, the slowest child {storm.slowest:.0f} s", flush=True)
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
    what = f"{storm.calls} calls, {changes} changes, the slowest child {storm.slowest:.0f} s"
    print(f"{count} forks of seed {seed}, {what}, {wrong + storm.wrong}")
    assert isinstance(storm.op, sl.Op)
    return int(bool(wrong or storm.wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
