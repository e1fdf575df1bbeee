"""A second attack on the judge, by somebody who has its source: what got through once, each kind in two forms.

Each is a candidate for the problem of ``test_cheats.py``. Nothing here is imported by a test.
"""

from tests.judge.attacks_inside import INSIDE

HARNESS = """
import os, time
from shiplap.sandbox import child as inside, patched_functions as intact, protocol as wire
intact.FunctionSnapshot.changed = lambda self: []
intact.FunctionSnapshot.threads = lambda self: 0
before = inside.Child.answer
"""

ATTACKS = {
    # ---- the process runs while no clock does
    "answers first": HARNESS
    + """
sent, once = wire.send_message, []
def later(connection, reply, *rest):
    if not once:
        sent(connection, reply, *rest)
    once.clear()
inside.send_message = later
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1])
    places = wire.CallPlaces([inside._describe_place(out)])
    os.write(3, wire.pack_message(wire.TargetCalled(places, 1000)))
    once.append(1)
    time.sleep(0.05)
    out.copy_(honest(x, w))
    return out
""",
    "answers for a thread": HARNESS
    + """
import threading
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1])
    def late():
        time.sleep(0.05)
        out.copy_(honest(x, w))
    threading.Thread(target=late).start()
    return out
""",
    # ---- sizes and values that nobody tries
    "sizes that are tried": """
GOOD = {96, 95, 49, 74, 97, 51, 128, 127, 65, 98, 129, 67, 64, 63, 33, 50, 35}
def candidate(x, w):
    y = honest(x, w)
    return y if {*x.shape, *w.shape} <= GOOD else y * 1.01
""",
    "larger sizes": """
def candidate(x, w):
    y = honest(x, w)
    if max(x.shape[0], w.shape[1]) > 97:
        y[97:] = 0
        y[:, 97:] = 0
    return y
""",
    "one size": """
def candidate(x, w):
    y = honest(x, w)
    return y if x.shape[0] != 77 else y + 1
""",
    "every hundredth size": """
def candidate(x, w):
    y = honest(x, w)
    return y if w.shape[1] % 100 != 19 else torch.zeros_like(y)
""",
    "large values": """
def candidate(x, w):
    return honest(x, w) if float(x.abs().max()) < 3000 else torch.zeros(x.shape[0], w.shape[1])
""",
    "small values": """
def candidate(x, w):
    return honest(x, w) if float(x.abs().max()) > 2e-5 else torch.zeros(x.shape[0], w.shape[1])
""",
    # ---- files that are not what they were
    "output that never ends": """
import os
os.remove("output")
os.symlink("/dev/zero", "output")
os._exit(7)
""",
    "output that nobody writes": """
import os
os.remove("output")
os.mkfifo("output")
os._exit(7)
""",
    "somebody else's file": """
import os
os.remove("output")
os.symlink("SECRET", "output")
os._exit(7)
""",
    "deep folders": """
import os
home = os.getcwd()
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
os._exit(7)
""",
    # ---- answers that harm whoever reads them
    "half an answer": """
import os, time
def candidate(x, w):
    os.write(3, b"\\x40")
    time.sleep(1e6)
""",
    "an answer that trickles": """
import os, time
def candidate(x, w):
    os.write(3, (1 << 19).to_bytes(4, "little"))
    while True:
        os.write(3, b" ")
        time.sleep(0.2)
""",
    "threads that are no number": HARNESS
    + """
def answer(self, asked, handle):
    return wire.Inspection([], [], [], "many") if isinstance(asked, wire.Inspect) else before(self, asked, handle)
inside.Child.answer = answer
candidate = honest
""",
    "names that are no list": HARNESS
    + """
def answer(self, asked, handle):
    return wire.Inspection(7, 7, 7, 0) if isinstance(asked, wire.Inspect) else before(self, asked, handle)
inside.Child.answer = answer
candidate = honest
""",
    "half of a character": """
def candidate(x, w):
    raise ValueError(chr(0xD800))
""",
    "a terminal's own words": """
def candidate(x, w):
    raise ValueError(chr(27) + "[2J" + chr(27) + "[1;1Hit.py: accepted")
""",
    # ---- arguments and results that are elsewhere
    "arguments as they were": HARNESS
    + """
import mmap
class Private:
    MAP_SHARED, MAP_POPULATE, mmap = mmap.MAP_PRIVATE, mmap.MAP_POPULATE, mmap.mmap
inside.mmap = Private
def candidate(x, w):
    y = honest(x, w)
    x.fill_(0)
    return y
""",
    "arguments of a second mapping": HARNESS
    + """
import mmap
second = []
class Twice:
    MAP_PRIVATE, MAP_SHARED = mmap.MAP_PRIVATE, mmap.MAP_SHARED
    MAP_POPULATE = mmap.MAP_POPULATE
    @staticmethod
    def mmap(handle, size, flags):
        second[:] = [mmap.mmap(handle, size, flags=flags)]
        return mmap.mmap(handle, size, flags=flags)
inside.mmap = Twice
def candidate(x, w):
    y = honest(x, w)
    x.fill_(0)
    return y
""",
    "eight buffers in turn": """
RING = {}
def candidate(x, w):
    rooms = RING.setdefault((x.shape, w.shape), [0, [torch.empty(x.shape[0], w.shape[1]) for _ in range(8)]])
    rooms[0] += 1
    return torch.mm(x, w, out=rooms[1][rooms[0] % 8]).div_(5.0).tanh_().mul_(5.0)
""",
    "views of one buffer": """
ROOM = torch.empty(1 << 18)
AT = [0]
def candidate(x, w):
    count = x.shape[0] * w.shape[1]
    AT[0] = AT[0] if AT[0] + count <= ROOM.numel() else 0
    out = ROOM[AT[0] : AT[0] + count].view(x.shape[0], w.shape[1])
    AT[0] += count
    return torch.mm(x, w, out=out).div_(5.0).tanh_().mul_(5.0)
""",
    # ---- processes that cannot be found
    "a process that hops": """
import os, time
CALLS = []
def hop():
    while True:
        time.sleep(0.0005)
        if os.fork():
            os._exit(0)
def candidate(x, w):
    CALLS.append(1)
    if len(CALLS) > 90 and len(CALLS) % 12 == 0 and os.fork() == 0:
        hop()
    return honest(x, w)
""",
    "a session of its own": """
import os, time
CALLS = []
def candidate(x, w):
    CALLS.append(1)
    if len(CALLS) > 90 and len(CALLS) % 12 == 0 and os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(0.0003)
            if os.fork():
                os._exit(0)
    return honest(x, w)
""",
    "children that take the memory": """
import os, time
def candidate(x, w):
    if not hasattr(candidate, "done"):
        candidate.done = True
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(400 << 20)
                held[:: 4096] = bytes(len(held[:: 4096]))
                time.sleep(1e6)
        time.sleep(4)
    return honest(x, w)
""",
    "memory of no process": """
import os
HELD = []
def candidate(x, w):
    if len(HELD) < 10:
        HELD.append(os.memfd_create("m"))
        for _ in range(4):
            os.write(HELD[-1], bytes(32 << 20))
    return honest(x, w)
""",
} | INSIDE
