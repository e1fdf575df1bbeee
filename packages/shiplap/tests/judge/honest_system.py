"""Honest candidates for the problem of ``test_cheats.py`` that use the operating system as programs do: files in the
scratch folder, maps, pipes, timers, processes. The sandbox allows all of it.
"""

SYSTEM = {
    "a mapped file of its own": """
import mmap, tempfile
FILE = tempfile.TemporaryFile()
FILE.truncate(1 << 24)
MAP = mmap.mmap(FILE.fileno(), 1 << 24)
def candidate(x, w):
    out = torch.frombuffer(MAP, dtype=torch.float32, count=x.shape[0] * w.shape[1]).view(x.shape[0], w.shape[1])
    torch.mm(x, w, out=out).div_(5.0).tanh_()
    return out * 5.0
""",
    "an array of numpy in a file": """
import os, tempfile
import numpy
FOLDER = tempfile.mkdtemp()
FIVE = numpy.lib.format.open_memmap(os.path.join(FOLDER, "five.npy"), mode="w+", dtype=numpy.float32, shape=(1,))
FIVE[0] = 5.0
FIVE.flush()
def candidate(x, w):
    by = torch.from_numpy(numpy.array(FIVE))
    return (x @ w).div_(by).tanh_().mul_(by)
""",
    "settings saved and loaded": """
import json, os, pickle, shutil, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "settings.json")
    with open(path, "w") as file:
        json.dump({"by": 5.0}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path, path + ".new")
    shutil.copyfile(path + ".new", path)
    os.symlink(path, path + ".link")
    with open(path + ".link") as file:
        BY = pickle.loads(pickle.dumps(json.load(file)))["by"]
def candidate(x, w):
    return (x @ w).div_(BY).tanh_().mul_(BY)
""",
    "a database in memory": """
import sqlite3, zlib
with sqlite3.connect(":memory:") as base:
    base.execute("create table settings (name text, value real)")
    base.execute("insert into settings values ('by', 5.0)")
    BY = base.execute("select value from settings").fetchone()[0]
base.close()
def candidate(x, w):
    return (x @ w).div_(BY).tanh_().mul_(BY)
""",
    "a pipe to a thread": """
import os, threading
def candidate(x, w):
    reading, writing = os.pipe()
    made = []
    def work():
        os.read(reading, 1)
        made.append((x @ w).div_(5.0).tanh_().mul_(5.0))
    thread = threading.Thread(target=work)
    thread.start()
    os.write(writing, b"1")
    thread.join()
    os.close(reading)
    os.close(writing)
    return made[0]
""",
    "an event loop": """
import asyncio
async def part(x, w):
    await asyncio.sleep(0)
    return (x @ w).div_(5.0).tanh_().mul_(5.0)
async def parts(x, w):
    return torch.cat(await asyncio.gather(*(part(p, w) for p in x.split(48))))
def candidate(x, w):
    return asyncio.run(parts(x, w))
""",
    "a pair of sockets and a selector": """
import selectors, socket
def candidate(x, w):
    one, two = socket.socketpair()
    with one, two, selectors.DefaultSelector() as selector:
        selector.register(two, selectors.EVENT_READ)
        one.sendall(b"5")
        ((key, _),) = selector.select(1.0)
        by = float(key.fileobj.recv(1))
    return (x @ w).div_(by).tanh_().mul_(by)
""",
    "a program that is asked": """
import subprocess, sys
COMMAND = [sys.executable, "-I", "-c", "print(5.0)"]
BY = float(subprocess.run(COMMAND, capture_output=True, check=True, text=True).stdout)
def candidate(x, w):
    return (x @ w).div_(BY).tanh_().mul_(BY)
""",
    "a forked child that is waited for": """
import os
def asked():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"5.0")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        by = float(file.read())
    assert os.waitpid(child, 0)[1] == 0
    return by
BY = asked()
def candidate(x, w):
    return (x @ w).div_(BY).tanh_().mul_(BY)
""",
    "what the machine has": """
import os, platform, resource, shutil, sys, time
THREADS = len(os.sched_getaffinity(0)) + os.cpu_count() + os.getpid() * 0
LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0] + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
WHAT = (platform.machine(), platform.libc_ver(), os.uname().sysname, shutil.disk_usage(".").free, os.times().user)
NOW = time.monotonic() + time.thread_time() + time.process_time() + len(time.tzname)
def candidate(x, w):
    pieces = 2 if THREADS > 1 and LIMIT > 0 and NOW > 0 and WHAT else 1
    return torch.cat([(p @ w).div_(5.0).tanh_().mul_(5.0) for p in x.chunk(pieces)])
""",
    "random bytes and digests": """
import hashlib, os, secrets, uuid
NAME = hashlib.sha256(os.urandom(16) + secrets.token_bytes(16) + uuid.uuid4().bytes).hexdigest()
def candidate(x, w):
    return (x @ w).div_(5.0).tanh_().mul_(5.0 if len(NAME) == 64 else 0.0)
""",
    "a process that computes and ends": """
import multiprocessing
def five(pipe):
    pipe.send(5.0)
    pipe.close()
def asked():
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=five, args=(there,))
    process.start()
    by = here.recv()
    process.join()
    return by
BY = asked()
def candidate(x, w):
    return (x @ w).div_(BY).tanh_().mul_(BY)
""",
    "a timer that is switched off": """
import signal
def late(*_):
    raise TimeoutError
def candidate(x, w):
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 30.0)
    try:
        return (x @ w).div_(5.0).tanh_().mul_(5.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
""",
}
