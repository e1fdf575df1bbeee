"""What stands in a graph after a rewrite: metadata, symbolic sizes, order, training, and results that are right."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shiplap as sl
from shiplap.rewrite import Match, Rewrite, place_replacement, rewrite
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_testing.effort import sampled
from shiplap_testing.paths import REPOSITORY
from tests.rewrite.specimens import linear_gelu, outcomes, pattern

X, W, B = torch.randn(4, 6), torch.randn(8, 6), torch.randn(8)


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint", "post-grad"], 2))
def test_new_nodes_have_what_later_passes_read(level):
    graph = capture_graph(lambda x, w, b: pattern(x, w, b) + 1, [X, W, B], level, dynamic=False).graph
    (match,) = linear_gelu(level=level).apply(graph)
    assert isinstance(match, Match)
    new = [n for n in graph.nodes if n.name in match.made]
    assert new
    key = "example_value" if level == "pre-grad" else "val"
    assert all(isinstance(n.meta[key], Tensor) for n in new)
    assert all(__file__ in n.meta["stack_trace"] for n in new)
    last = next(n for n in reversed(list(graph.nodes)) if n.name in match.made)
    assert tuple(last.meta[key].shape) == (4, 8)
    assert len({n.name for n in graph.nodes}) == len(graph.nodes)


def test_symbolic_sizes_stay_symbols():
    graph = capture_graph(pattern, [X, W, B], "pre-grad", dynamic=True).graph
    (match,) = linear_gelu().apply(graph)
    assert isinstance(match, Match)
    made = next(n for n in graph.nodes if n.name == match.made[-1])
    assert all(isinstance(n, torch.SymInt) for n in made.meta["example_value"].shape)


def test_sizes_that_the_replacement_computes_with():
    made = rewrite(lambda x: x.sum(0) / x.shape[0], lambda x: x.mean(0), name="mean", samples=lambda: [(X.double(),)])
    back = rewrite(lambda x: x.mean(0), lambda x: x.sum(0) / x.shape[0], name="back", samples=lambda: [(X.double(),)])
    for one in (made, back):
        assert {f.verdict for f in one.findings} == {"ok"}
        graph = capture_graph(one.pattern, [X], "pre-grad", dynamic=True).graph
        (match,) = one.apply(graph)
        assert isinstance(match, Match), match
        graph.lint()


def test_places_that_overlap_are_taken_once():
    made = rewrite(lambda x: torch.relu(torch.relu(x)), lambda x: torch.relu(x), name="once", samples=lambda: [(X,)])
    matches = outcomes(made, lambda x: torch.relu(torch.relu(torch.relu(x))), X)
    assert [o.nodes[-1:] for o in matches] == [("relu_1",), ("relu_2",)]


def test_several_results():
    made = rewrite(
        lambda x: (torch.sin(x), torch.cos(x)),
        lambda x: (x.sin(), torch.sin(x + torch.pi / 2)),
        name="both",
        samples=lambda: [(X.double(),)],
    )
    assert {f.verdict for f in made.findings} == {"ok"}
    (outcome,) = outcomes(made, lambda x, y: torch.cos(x) * torch.sin(x) + torch.cos(y), X, W[:4])
    assert isinstance(outcome, Match)
    assert outcome.operators == ("cos", "sin")


def test_nodes_are_put_where_their_inputs_are_known():
    """The result of the first is used before the second's input is computed."""

    def model(x, w):
        first = torch.sin(x)
        later = (first * 2) @ w.t()
        return torch.cos(later), first

    graph = capture_graph(model, [X, W], "pre-grad", dynamic=False).graph
    sin, cos = (next(n for n in graph.nodes if n.target is f) for f in (torch.sin, torch.cos))
    given, olds = [sin.args[0], cos.args[0]], [sin, cos]
    placed = place_replacement(graph, "pre-grad", "pair", lambda a, b: (a.sin() + b.sum(), b.cos()), given, olds)
    assert placed.obstacle == "argument"
    assert placed.reason == "later is computed from what would be replaced"
    placed = place_replacement(graph, "pre-grad", "pair", lambda a, b: (a.sin(), b.cos()), given, olds)
    assert isinstance(placed, Match)
    graph.lint()


class Net(nn.Module):
    """Two products: no loops, so no C++ is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint"], 1))
def test_training_is_as_in_eager(level, fresh_compiler):
    """In the joint graph, the first product's gradient comes from the second's result."""
    net, x = Net(), torch.randn(5, 6)
    made = rewrite(
        lambda x, w: F.linear(x, w),
        lambda x, w: torch.mm(x, w.t()),
        name="product",
        level=level,
        samples=lambda: [(X, W)],
    )
    scope = sl.rewrites(made)
    compiled = torch.compile(net, options=scope.options(), fullgraph=True)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    got = torch.autograd.grad(compiled(x).square().sum(), list(net.parameters()))
    assert len(scope.matches) == 2
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_by_name(fresh_compiler, monkeypatch):
    """Those that ship, attention among them, unless others are given."""
    from shiplap.rewrite import backend, shipped

    names = [r.name for r in shipped.everything]
    assert len(names) == len(set(names))
    assert names[0] == "no_ops"
    assert {"attention", "rms_norm", "shared_input_linears", "batch_linear", "conv_norm"} <= set(names)
    assert set(names) == {
        r.name for v in vars(shipped).values() for r in (v if isinstance(v, tuple) else (v,)) if isinstance(r, Rewrite)
    }
    given, default = (
        rewrite(lambda x, w: F.linear(x, w), lambda x, w: x @ w.t(), name=name, samples=lambda: [(X, W)])
        for name in ("given", "default")
    )
    scope = sl.rewrites(given)
    monkeypatch.setattr(shipped, "everything", (default,))
    backend._load_shipped_rewrites.cache_clear()
    try:
        with torch.no_grad():
            for options in ({"rewrites": scope}, None):
                assert torch.compile(Net(), backend=backend.shiplap, options=options)(X).shape == (4, 4)
        assert len(scope.matches) == len(backend._load_shipped_rewrites().matches) == 2
    finally:
        backend._load_shipped_rewrites.cache_clear()


def test_the_name_is_an_entry_point_of_torch():
    """Read by torch when the name is asked for; nothing is registered before."""
    import tomllib
    from importlib import import_module

    project = tomllib.loads((REPOSITORY / "packages/shiplap/pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["shiplap"].partition(":")
    assert callable(getattr(import_module(module), name))
