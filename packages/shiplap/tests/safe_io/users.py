"""Two users on one cache, at the same time: ``python users.py ROUNDS``, as root, who becomes another user in a fork.

Both compile another library under the same name, load it, and store another choice under the same key, in folders of
either of them with several modes. Each row says what each user got. It is wrong if one got what the other one has made,
if an error is not of the catalogue, or if a user has replaced a file of the other one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

from shiplap.errors import ShiplapError
from shiplap.kernels.native import build, cache
from shiplap.tuning.key import Key
from shiplap.tuning.store import ChoiceStore

OTHER = 65534
COMPILER = ["c++", "-shared", "-fPIC", "-O0"]
KEY = Key.of({"op": "users::op", "device": "cpu", "bucket": "", "dtypes": "", "source": "0", "torch": "2"})
# The owner of the cache folder, or nobody where it is missing, its mode, and the mode of the folder above it.
FOLDERS = {
    "of root, for root alone": (0, 0o700, 0o755),
    "of root, shown to all": (0, 0o755, 0o755),
    "of root, open to all": (0, 0o777, 0o755),
    "of root, open to all, and sticky": (0, 0o1777, 0o755),
    "of the other, for the other alone": (OTHER, 0o700, 0o755),
    "of the other, shown to all": (OTHER, 0o755, 0o755),
    "of the other, open to all": (OTHER, 0o777, 0o755),
    "missing, below a sticky folder": (None, 0, 0o1777),
    "missing, below an open folder": (None, 0, 0o777),
}


def one_user(user: int, place: Path, home: Path, rounds: int) -> Counter[str]:
    """What ``user`` got in so many rounds."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ.update(SHIPLAP_CACHE_DIR=str(place), XDG_DATA_HOME=str(home), HOME=str(home), TMPDIR=str(home))
    tempfile.tempdir = str(home)
    got = Counter[str]()
    source = f'extern "C" int answer() {{ return {user}; }}\n'
    for number in range(rounds):
        try:
            root = cache.cache_folder("users::op")
            if problem := build.build_once(root, f"round{number // 2}", source, COMPILER):
                got[f"not compiled: {problem[:60]}"] += 1
            answer = cache.load_library(root / f"round{number // 2}", "users::op").answer()
            got["its own library" if answer == user else f"WRONG library of {answer}"] += 1
        except ShiplapError as e:
            got[e.id] += 1
        except BaseException:
            got[f"WRONG {traceback.format_exc(limit=-2)[-300:]}"] += 1
        try:
            store = ChoiceStore(keyed=True)
            store.put(KEY, {"kernel": str(user)})
            value = store.get(KEY)
            found = (
                "no choice" if value is None else "its own choice" if value["kernel"] == str(user) else "WRONG choice"
            )
            got[found] += 1
        except BaseException:
            got[f"WRONG {traceback.format_exc(limit=-2)[-300:]}"] += 1
    return got


def both_users(name: str, rounds: int) -> bool:
    """Print the row of one kind of folder. Return whether it is right."""
    owner, mode, above = FOLDERS[name]
    base = Path(tempfile.mkdtemp(prefix="users-"))
    base.chmod(0o755)
    (base / "above").mkdir()
    (base / "above").chmod(above)
    place = base / "above" / "cache"
    if owner is not None:
        place.mkdir()
        os.chown(place, owner, owner)
        place.chmod(mode)
    pipes = {}
    for user in (0, OTHER):
        home = base / f"home{user}"
        home.mkdir(mode=0o700)
        os.chown(home, user, user)
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            told = one_user(user, place, home, rounds)
            os.write(writing, repr(dict(told)).encode())
            os._exit(0)
        os.close(writing)
        pipes[user] = reading
    told = {user: os.fdopen(pipe).read() or "WRONG ended" for user, pipe in pipes.items()}
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    # Below a folder of one user there is nothing of the other one, but in one that is open to all.
    owners = {p.stat().st_uid for p in place.rglob("*")} if place.exists() else set()
    right = not any("WRONG" in text for text in told.values())
    print(
        f"{'right' if right else 'WRONG':6} {name:36} owners {sorted(owners)} root {told[0]} other {told[OTHER]}",
        flush=True,
    )
    shutil.rmtree(base)
    return right


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if os.geteuid():
        sys.exit("two users: only root can become another one")
    os.umask(0o022)
    ROWS = [both_users(name, int(sys.argv[1])) for name in FOLDERS]
    print(f"{len(ROWS)} kinds of folders, {ROWS.count(False)} wrong")
    sys.exit(not all(ROWS))
