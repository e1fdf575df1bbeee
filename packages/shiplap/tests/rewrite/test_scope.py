"""Scopes: in force for a block or for one function, in one thread, on top of the user's own passes; nothing is left."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import shiplap as sl
from shiplap.rewrite.match import NearMiss
from shiplap.torch_private.inductor_passes import EARLY, PLACES
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_VERBS, python

CACHED = Path(__file__).with_name("cached.py")
X, W = torch.randn(5, 3), torch.randn(7, 3)


def product(x, w):
    return F.linear(x, w)  # no loops are generated for a product: these tests compile no C++


def made(name="product", level="pre-grad", by=lambda x, w: torch.mm(x, w.t()), **options):
    return sl.rewrite(product, by, name=name, level=level, samples=lambda: [(X, W)], **options)


PLAIN = made()


def fresh(fn=product, **options):
    """``fn`` as a function of its own: nothing was compiled from it."""
    run = eval("lambda x, w: fn(x, w)", {"fn": fn})
    return torch.compile(run, **options)


class UserPass(CustomGraphPass):
    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append([n.name for n in graph.nodes if n.op.startswith("call")])

    def uuid(self):
        return "the user's"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, fresh_compiler):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = [getattr(config, place) for place in PLACES.values()]
    yield
    assert [getattr(config, place) for place in PLACES.values()] == before


def test_a_block():
    with sl.rewrites(PLAIN) as placed, torch.no_grad():
        y = fresh()(X, W)
    torch.testing.assert_close(y, product(X, W))
    (match,) = placed.matches
    assert (match.rewrite, match.level, match.operators) == ("product", "pre-grad", ("linear",))
    assert match.where[0].startswith(__file__)
    assert counters["inductor"]["shiplap_product"] == 1 <= counters["inductor"]["pattern_matcher_count"]
    fresh()(X, W)
    assert len(placed.matches) == 1  # outside of the block nothing happens


def test_matches_and_near_misses_are_apart():
    placed = sl.rewrites(PLAIN)
    near = [NearMiss("product", "pre-grad", f"node_{i}", "", "shape", "another shape") for i in range(2)]
    placed.outcomes += [near[0], "neither", near[1]]
    assert placed.near_misses == near
    assert placed.matches == []


@pytest.mark.parametrize("level", sampled(PLACES, 1, long=["joint"]))
def test_options_of_one_function(level):
    """Compiled later, and again for another size, backward included."""
    scope = sl.rewrites(made(level=level))
    compiled = fresh(options=scope.options())
    x = X.clone().requires_grad_()
    compiled(x, W).sum().backward()
    torch.testing.assert_close(x.grad, W.sum(0).expand_as(X))
    compiled(torch.randn(6, 3), W)
    placed = len(scope.matches)
    assert placed == 2  # post-grad, the transposed weight is kept for the way back: a view, which hinders nothing
    fresh()(X, W)
    assert len(scope.matches) == placed


@pytest.mark.long
def test_blocks_nest():
    outer, inner = sl.rewrites(made("outer", by=lambda x, w: x @ w.t())), sl.rewrites(made("inner", level="post-grad"))
    with outer, inner:
        fresh()(X, W)
    assert [len(s.matches) for s in (outer, inner)] == [1, 1]  # what the one has placed, the other finds
    with outer:
        with inner:
            pass
        fresh()(X, W)
    assert len(outer.matches) == 2


def test_the_same_scope_twice():
    scope = sl.rewrites(PLAIN)
    with scope, scope:
        fresh()(X, W)
    with scope:
        fresh()(X, W)
    assert len(scope.matches) == 2


def test_an_error_inside_leaves_nothing():
    with pytest.raises(KeyError), sl.rewrites(PLAIN):
        raise KeyError


def test_two_rewrites_of_one_name():
    """Both are in force, the first one first; what the second did has a name of its own."""
    other = made(by=lambda x, w: torch.matmul(x, w.t()))
    scope = sl.rewrites(PLAIN, other)
    assert list(scope.labels.values()) == [PLAIN.name, f"{PLAIN.name}_2"]
    with scope:
        fresh()(X, W)
    assert [m.rewrite for m in scope.matches] == [PLAIN.name]


def test_any_two_shipped_sets_and_a_rewrite_of_a_name_that_ships():
    from shiplap.rewrite.shipped import attention, everything

    mine = made(by=lambda x, w: torch.matmul(x, w.t()), name="attention")
    scope = sl.rewrites(*everything, *attention, *everything, mine)
    assert len(scope.rewrites) == len(everything) + 1
    assert len({*scope.labels.values()}) == len(scope.rewrites)


def test_the_same_rewrite_may_come_twice():
    assert len(sl.rewrites(PLAIN, PLAIN).rewrites) == 1


@pytest.mark.parametrize("level", sampled(PLACES, 1, long=["joint"]))
def test_the_users_pass_runs_as_well(level):
    user = UserPass()
    scope = sl.rewrites(made(level=level))
    with config.patch({PLACES[level]: user}), torch.no_grad():
        with scope:
            fresh()(X, W)
            assert len(user.seen) == len(scope.matches) == 1
        assert getattr(config, PLACES[level]) is user
    with torch.no_grad():
        fresh(options=scope.options(**{PLACES[level]: user}))(torch.randn(4, 3), W)
    assert len(user.seen) == len(scope.matches) == 2


def test_a_pass_without_uuid_still_runs_and_is_not_cached():
    seen = []
    for _ in range(2):
        user = config.patch({PLACES["post-grad"]: lambda graph: seen.append(1)})
        with user, sl.rewrites(made(level="post-grad")) as placed, torch.no_grad():
            fresh()(X, W)
        assert len(placed.matches) == 1
    assert len(seen) == 2


def test_graphs_that_torch_leaves_unsorted():
    """Its own fusion of linear layers runs before, and puts nodes in order at the end of all passes."""

    def two(x, w):
        return F.linear(x[0], w[0]), F.linear(x[1], w[1])

    x, w = torch.randn(2, 5, 3), [W, torch.randn(7, 3)]
    own = {"pre_grad_fusion_options": {"batch_linear": {"min_fuse_set_size": 2}}}
    scope = sl.rewrites(PLAIN)
    with torch.no_grad(), config.patch(own), scope:
        got = fresh(two)(x, w)
    for g, e in zip(got, two(x, w), strict=True):
        torch.testing.assert_close(g, e)
    assert counters["inductor"]["batch_linear"] == 1
    assert scope.graphs > 0
    assert scope.matches == []  # torch has left none


def test_threads_do_not_see_each_other():
    """Each compiles inside its own scope at the same time; a third one compiles with none."""
    matches, barrier = {}, threading.Barrier(3)

    def work(name):
        scope = sl.rewrites(made(name, level="post-grad", by=lambda x, w: torch.mm(x, w.t()).clone())) if name else None
        barrier.wait()
        with torch.no_grad():
            if scope is None:
                fresh()(X, W)
                matches[name] = []
            else:
                with scope:
                    barrier_inside.wait()
                    fresh()(X, W)
                matches[name] = [m.rewrite for m in scope.matches]

    barrier_inside = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two", "")]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert matches == {"one": ["one"], "two": ["two"], "": []}


def test_threads_may_share_a_scope():
    """Entered in one order and left in the same: a stack of all threads together would mix them up."""
    scope, entered, left, failures = sl.rewrites(PLAIN), threading.Barrier(2), threading.Event(), []

    def work(first):
        try:
            with scope:
                entered.wait()
                if not first:
                    left.wait()
            left.set()
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def caches():
    hits = [counters[g][f"{n}_cache_hit"] for g, n in (("inductor", "fxgraph"), ("aot_autograd", "autograd"))]
    counters.clear()
    return hits


@pytest.mark.parametrize("level", sampled(PLACES, 1))
def test_caches_hit_until_the_rewrite_is_edited(level):
    """``torch._dynamo.reset`` is as good as a new process here: only files are left."""

    def compiled(**options):
        torch._dynamo.reset()
        scope = sl.rewrites(made(level=level, **options))
        with torch.no_grad():
            fresh(options=scope.options())(X, W)
        return len(scope.matches), caches()

    counters.clear()
    always = level == "pre-grad"  # it runs ahead of the look-up
    by_graph = int(always and bool(EARLY))  # the key then has the graph that the pass leaves, and not the pass
    assert compiled() == (1, [0, 0])
    assert compiled() == (int(always), [1, 1])
    assert compiled(where="x.ndim == 2") == (1, [by_graph, by_graph])
    edited = {"by": lambda x, w: torch.mm(x, w.T)}
    assert compiled(**edited) == (1, [by_graph, 0])  # behind autograd the graph is the same
    assert compiled(**edited) == (int(always), [1, 1])


def test_a_digest_sees_helpers():
    def through(helper):
        return made(by=lambda x, w: helper(torch.mm(x, w.t())))

    one, same, other = (through(h) for h in (lambda y: y * 1.0, lambda y: y * 1.0, lambda y: y * 2.0))
    assert one.digest == same.digest != other.digest


@pytest.mark.long
@pytest.mark.slow
def test_a_second_process_hits(tmp_path):
    """The second one hashes text by another seed: nothing may depend on the order of a set."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = python("-W", "ignore", CACHED, "plain", env=env, imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr[-3000:]
    repeated = subprocess.run(
        [sys.executable, "-W", "ignore", str(CACHED), "plain", "edited"],
        env=env | {"PYTHONHASHSEED": "2"},
        check=True,
        capture_output=True,
        text=True,
    )
    first, second = (json.loads(p.stdout.splitlines()[-1]) for p in (done, repeated))
    missed = {"matches": 1, "user": 1, "fx": [0, 2], "aot": [0, 1]}
    assert first == [missed]
    # Pre-grad passes run ahead of the look-up. Behind autograd the edited graph is the same.
    edited = missed | {"fx": [2, 0] if EARLY else [0, 2]}
    assert second == [{"matches": 1, "user": 1, "fx": [2, 0], "aot": [1, 0]}, edited]
