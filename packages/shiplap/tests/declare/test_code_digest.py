"""Digests of loaded code: they see helpers and constants, and are the same in every process."""

import functools
import subprocess
import sys

from shiplap.declare import code_digest
from shiplap.declare.code_digest import source_digest

CODE = """
import math
{extra}
SIZE = {size}
TABLE = {{"a", "b", "c"}}
def helper(x):
    return x * {helper}   # {comment}
class Config:
    pass
config = Config()
def target(x, k={default}):
    names = x in {{"p", "q", "r"}}
    inner = lambda y: helper(y) + math.pi
    return [inner(v) for v in x], SIZE, TABLE, config, target
"""


def load(**changes):
    values = {"extra": "", "size": 1, "helper": 2, "comment": "c", "default": 3, **changes}
    scope = {"__name__": "package.module"}
    exec(compile(CODE.format(**values), "f.py", "exec"), scope)
    return scope["target"]


def test_what_changes_behaviour_changes_the_digest():
    base = source_digest(load())
    assert base == source_digest(load())
    assert base == source_digest(load(comment="another comment"))
    assert base == source_digest(load(extra="unrelated = 5"))
    changed = [source_digest(load(**c)) for c in ({"size": 2}, {"helper": 3}, {"default": 4})]
    assert len({base, *changed}) == 4


def test_closures_partials_and_objects():
    def make(k):
        return lambda x: x * k

    assert source_digest(make(2)) == source_digest(make(2)) != source_digest(make(3))
    assert source_digest(functools.partial(make, 2)) != source_digest(functools.partial(make, 3))

    class Callable:
        def __call__(self, x):
            return x

    assert source_digest(Callable()) == source_digest(Callable())
    assert source_digest(len)


def test_the_digest_is_the_same_in_another_process():
    code = CODE.format(extra="", size=1, helper=2, comment="c", default=3)
    program = "\n".join(
        [
            "import runpy",
            f"digest = runpy.run_path({code_digest.__file__!r})['source_digest']",
            "scope = {'__name__': 'package.module'}",
            f"exec(compile({code!r}, 'f.py', 'exec'), scope)",
            "print(digest(scope['target']))",
        ]
    )
    run = functools.partial(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=True)
    digests = {run(env={"PYTHONHASHSEED": seed}).stdout.strip() for seed in ("1", "2", "3")}
    assert digests == {source_digest(load())}


def test_of_several_functions_each_counts_and_a_helper_that_they_share_does():
    def made(**changes):
        first, second = load(**changes), load(default=4, **changes)
        return source_digest(first, second)

    assert made() == made() != made(helper=3)
    assert made() != source_digest(load(), load(default=5))
    assert source_digest(load()) != source_digest(load(), load(default=5))
