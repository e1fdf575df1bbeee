"""No stale kernel is served: what compiled code depends on is part of torch's cache keys."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from jaxtyping import Float
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.compiler import config

import shiplap as sl
from shiplap.dispatch import compile_cache_key, registry
from shiplap_testing.forked import python

V = Float[Tensor, "n"]


@pytest.fixture
def restored_tag():
    former = config.cache_key_tag
    yield
    config.cache_key_tag = former


@pytest.fixture
def thread():
    """Runs a function in a thread of its own, as autograd compiles backwards."""

    def run(function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    return run


def test_every_change_changes_the_key(ns):
    tags: list[str] = []

    def changed():
        tags.append(config.cache_key_tag)
        return tags[-1] not in tags[:-1]

    def f(x: V) -> V:
        return x * 2

    op = sl.op(f"{ns}::f")(f)
    assert changed()
    op.kernel("cpu", lambda x, out: out.copy_(x * 2), name="k")
    assert changed()
    op.kernel("cpu", lambda x, out: out.copy_(x + x), name="k")
    assert changed()
    op.kernel("cpu", lambda x, out: out.copy_(x + x), name="k", workspace="n")
    assert changed()
    op.backward(lambda grad, saved, needs: {"x": grad * 2})
    assert changed()
    op.backward(lambda grad, saved, needs: {"x": grad + grad})
    assert changed()
    sl.op(f"{ns}::f", requires="n >= 1")(f)
    assert changed()
    assert all(t.count("+shiplap:") == 1 for t in tags)


def test_the_same_declarations_give_the_same_key(ns):
    def f(x: V) -> V:
        return x * 2

    sl.op(f"{ns}::f")(f)
    tag = config.cache_key_tag
    sl.op(f"{ns}::f")(f)
    assert config.cache_key_tag == tag
    assert compile_cache_key.digest() in tag


def test_the_users_own_tag_is_kept(ns, restored_tag):
    config.cache_key_tag = "mine" + config.cache_key_tag

    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x * 2

    assert config.cache_key_tag == f"mine+shiplap:{compile_cache_key.digest()}"


def test_a_tag_set_after_the_declarations_is_salted_again_before_it_is_used(ns, restored_tag, fresh_compiler):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x * 2

    config.cache_key_tag = "theirs"
    torch.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert config.cache_key_tag == f"theirs+shiplap:{compile_cache_key.digest()}"


def test_a_process_that_compiles_for_this_one_has_its_tag(ns, restored_tag, fresh_compiler, monkeypatch):
    """A worker names the files of tuned kernels after it, and a later process looks for them under its own tag."""
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "")

    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x * 2

    assert os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] == "", "declaring an op leaves the environment alone"
    torch.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert os.environ["TORCH_COMPILE_CACHE_KEY_TAG"] == config.cache_key_tag
    told = [sys.executable, "-c", "import torch; print(torch.compiler.config.cache_key_tag)"]
    assert subprocess.check_output(told, text=True).strip() == config.cache_key_tag


def test_an_earlier_tag_that_comes_back_is_salted_once(ns, restored_tag):
    """As code does that sets the tag for a while and puts it back."""
    former = config.cache_key_tag

    def f(x: V) -> V:
        return x * 2

    sl.op(f"{ns}::f")(f)
    config.cache_key_tag = "mine" + former
    sl.op(f"{ns}::g")(f)
    assert config.cache_key_tag == f"mine+shiplap:{compile_cache_key.digest()}"


def test_every_thread_sees_the_salt(ns, thread):
    """Since torch 2.13 a setting holds in the thread that made it."""

    def f(x: V) -> V:
        return x * 2

    sl.op(f"{ns}::f")(f)
    assert thread(lambda: config.cache_key_tag) == f"+shiplap:{compile_cache_key.digest()}"
    thread(lambda: sl.op(f"{ns}::g")(f))
    compile_cache_key.ensure()  # as each trace does: here a tag of this thread's own may be set
    assert config.cache_key_tag == f"+shiplap:{compile_cache_key.digest()}"


def test_a_backward_compiled_in_another_thread_has_the_salt(ns, thread, fresh_compiler, monkeypatch):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x * 2

    @f.backward(saves=[])
    def _(grad, saved, needs):
        return {"x": grad * 2}

    tags = []

    def backward(graph, inputs):
        tags.append(config.cache_key_tag)
        assert threading.current_thread() is not threading.main_thread()
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: f(x).sum(), backend=compiler, fullgraph=True)(x)
    thread(y.backward)
    assert x.grad.tolist() == [2, 2, 2]
    assert tags == [f"+shiplap:{compile_cache_key.digest()}"]


def test_ops_are_sorted(ns):
    for name in ("b", "a"):

        @sl.op(f"{ns}::{name}")
        def f(x: V) -> V:
            return x

    names = [op.spec.name for op in registry.ops()]
    assert names == sorted(names)
    assert {f"{ns}::a", f"{ns}::b"} <= set(names)
    assert registry.find("no::such") is None


PROGRAM = """
import sys, torch, shiplap as sl
from torch._dynamo.utils import counters
sys.dont_write_bytecode = True
import kernels
x = torch.zeros(3, requires_grad=True)
torch.compile(lambda x: kernels.f(x), fullgraph=True)(x).backward(torch.ones(3))  # C++ for the gradient alone
print(x.grad[0].item(), counters["aot_autograd"]["autograd_cache_hit"])
"""
KERNELS = """
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

def helper(grad):
    return grad * FACTOR

@sl.op("test_registry::f")
def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2

@f.backward(saves=[])
def _(grad, saved, needs):
    return {"x": helper(grad)}
"""


@pytest.mark.long
def test_another_process_is_served_the_same_code_and_never_stale_code(tmp_path):
    """The backward is traced into the cached artefact: a helper that changed must miss, an unchanged one may hit."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{tmp_path}:src"}
    seen = []
    for factor in ("2", "2", "5"):
        (tmp_path / "kernels.py").write_text(KERNELS.replace("FACTOR", factor))
        done = python("-c", PROGRAM, env=env)
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.split())
    assert seen == [["2.0", "0"], ["2.0", "1"], ["5.0", "0"]]
