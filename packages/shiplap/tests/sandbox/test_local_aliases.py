"""Counts and caches that code reaches by other names are found as those that it reaches by their own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shiplap.sandbox.local_aliases import resolve_aliases
from shiplap.sandbox.unsteady_source import TOO_DEEP, find_unsteady_decisions

COUNTS = {
    "another name": """
STATE = {"n": 0}
def candidate(x):
    s = STATE
    s["n"] += 1
    k = s["n"]
    return x * 0 if k > 20000 else x
""",
    "a name of a name": """
STATE = {"n": [0]}
def candidate(x):
    s = STATE
    t = s["n"]
    t[0] = t[0] + 1
    return x * (t[0] < 20000)
""",
    "a list that a helper gets": """
SEEN = [0]
def step(box):
    b = box
    b[0] = b[0] + 1
    return b[0]
def candidate(x):
    return x * (step(SEEN) < 20000)
""",
    "a method that counts": """
class C:
    def __init__(self): self.n = 0
    def tick(self):
        me = self
        me.n = me.n + 1
        return me.n
TICK = C().tick
def candidate(x):
    t = TICK()
    return x if t < 20000 else x * 0
""",
    "a name that a function gets": """
STATE = {"n": 0}
def candidate(x):
    s = STATE
    id(s)
    use(s)
    s["n"] += 1
    return x * (s["n"] < 20000)
""",
    "a call by whose truth code decides": """
N = [20000]
def step():
    N[0] -= 1
    return N[0]
def candidate(x):
    return x if step() else x * 0
""",
    "a function that counts in its default": """
class S: f = lambda: 0
def candidate(x):
    S.f = lambda v=S.f(): v + 1
    return x * (S.f() < 20000)
""",
    "a function of a library that counts by another name": """
import types
T = types
T.f = lambda: 0
def candidate(x):
    T.f = lambda v=types.f(): v + 1
    return x * (types.f() < 20000)
""",
    "a part of a list that gets longer": """
SEEN = {0: []}
def candidate(x):
    SEEN[0].append(1)
    SEEN[1] = 1
    return x * 0 if SEEN[0][20000:] else x
""",
}
SOUND = {
    "a cache": """
PLANS = {}
def candidate(x):
    plans = PLANS
    if x.shape not in plans: plans[x.shape] = make(x)
    return plans[x.shape](x)
""",
    "a plan that keeps a table": """
def candidate(x):
    plan = PLANS.get(x.shape[1])
    if plan is None:
        plan = Plan(); plan.ones = torch.ones(x.shape[1], 1)
    return x @ plan.ones
""",
    "room that is used again": """
ROOM = {}
def candidate(x, w):
    key = x.shape[0], w.shape[1]
    if key not in ROOM:
        ROOM[key] = x.new_empty(key)
    total = ROOM[key]
    total.zero_()
    total.addmm_(x, w)
    return torch.tanh(total / 4)
""",
    "room in a tuple": """
PLANS = {}
def candidate(x, w):
    if x.shape not in PLANS: PLANS[x.shape] = torch.empty(x.shape[0], w.shape[1]), 2
    room = PLANS[x.shape][0]
    torch.mm(x, w, out=room)
    return room.mul_(0.2) * 5.0
""",
    "parts of room": """
ROOM = {}
def candidate(x):
    if x.shape not in ROOM: ROOM[x.shape] = torch.empty(8192)
    room = ROOM[x.shape]
    q = room[:4096]
    k = room[4096:]
    return q + k
""",
    "room that is only cut": """
ROOM = {}
def candidate(x, s):
    acc = ROOM[x.shape]
    acc[:] = x
    acc[:, ::2] += s
    return acc * 2
""",
    "a method that is called as one of torch": """
class Layout:
    def add(self, n):
        at = self.total
        self.total += n
        return at
    def size(self):
        return self.total
def candidate(x):
    n = x.size(0)
    return torch.add(x, n) * 2 + x.size(0) * 2
""",
    "an attribute with the name of a function of Python": """
import inspect
class Kernel:
    def __init__(self, kernel):
        self.signature = inspect.signature(kernel)
    def default(self, name):
        return self.signature[name].default
""",
    "a list of its own with the name of another": """
SEEN = [0]
def step(box):
    box[0] = box[0] + 1
    return x * (box[0] < 20000)
def candidate(x):
    SEEN = [x]
    return step(SEEN)
""",
    "a list of its own": """
def candidate(x):
    made = []
    made.append(x)
    return made[0] if len(made) < 20000 else x
""",
    "a state that is only read": """
class Model:
    def forward(self, x):
        scale = self.scale
        return x * scale if scale > 2000 else x
""",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_by_another_name_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(COUNTS[name])
    assert find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize("name", SOUND)
def test_what_counts_nothing_is_found_by_no_other_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(SOUND[name])
    assert find_unsteady_decisions(str(tmp_path / "it.py")) == []


@pytest.mark.parametrize("value", ["tick(b{0}, b{0})", "b{0}[b{0}, b{0}]"])
def test_names_that_stand_for_ever_more_do_not_use_up_the_memory(tmp_path: Path, value: str) -> None:
    lines = [f"    b{n + 1} = {value.format(n)}" for n in range(40)]
    counting = "N = [0]\ndef tick(a, b):\n    N[0] += 1\n    return N[0]\n"
    (tmp_path / "it.py").write_text(counting + "def f(b0):\n" + "\n".join(lines) + "\n    return b40 < 20000\n")
    assert set(find_unsteady_decisions(str(tmp_path / "it.py"))) in ({"line 46: tick"}, {TOO_DEEP})


def test_names_are_resolved_without_recursion_and_keep_their_lines() -> None:
    tree = ast.parse("def f(x):\n    s = A.b[0]\n    t = s.c\n    return " + " + ".join(["t.d"] * 700) + "\n")
    resolve_aliases(tree)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    names = [n for n in ast.walk(function.body[-1]) if isinstance(n, ast.Name)]
    assert {n.id for n in names} == {"A"}
    assert {n.lineno for n in names} == {4}
