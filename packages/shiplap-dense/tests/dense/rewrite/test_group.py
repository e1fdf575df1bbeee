"""Groups: what may be merged, what is not, and what the merged call leaves to be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
from shiplap.declare.batch import read_batching
from shiplap.errors import ShiplapError
from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.group import JoinedCalls, StackedChains, StackedLinears, StackedNorms, WideLinears
from shiplap.rewrite.group.cost import MACHINES, MergePrice
from shiplap.rewrite.normalize_call import canonical_name
from shiplap.rewrite.program import proving
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_dense import ops as dense
from shiplap_testing.effort import sampled

W = [torch.randn(4, 4) for _ in range(6)]


def applied(rewrite: Any, fn: Callable[..., Any], *args: Tensor) -> tuple[list[Any], torch.fx.GraphModule]:
    captured = capture_graph(fn, list(args), rewrite.level, dynamic=False)
    graph = captured.graph
    outcomes = list(rewrite.apply(graph))
    graph.lint()
    module = torch.fx.GraphModule({}, graph)
    with torch.no_grad():
        got = module(*[args[r] for r in captured.roles.values()])  # type: ignore[index]
    for g, e in zip(
        got if isinstance(got, (tuple, list)) else [got], torch.utils._pytree.tree_leaves(fn(*args)), strict=True
    ):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)
    return outcomes, module


def names(module: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op.startswith("call")]


def calls(module: torch.fx.GraphModule) -> list[str]:
    return [canonical_name(n) for n in module.graph.nodes if n.op.startswith("call")]


def test_dependent_calls_are_not_merged_and_the_rest_is() -> None:
    """a and b are independent, c needs a: two groups would be a cycle."""

    def fn(x: Tensor, y: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        a, b = F.linear(x, w), F.linear(y, u)
        return F.linear(a, v) + b

    outcomes, module = applied(StackedLinears(always=True), fn, torch.randn(3, 4), torch.randn(3, 4), *W[:3])
    assert [type(o) for o in outcomes] == [Match]
    assert outcomes[0].operators == ("linear", "linear")
    assert calls(module).count("bmm") == 1


@pytest.mark.parametrize(
    ("pick", "stacked"),
    sampled(
        [
            pytest.param(*case)
            for case in [
                (lambda x: [x[0], x[1], x[2]], 1),
                (lambda x: x.unbind(), 1),
                (lambda x: [x.select(0, i) for i in range(3)], 1),
                (lambda x: [x[1], x[0], x[2]], 2),
                (lambda x: [x[0], x[1], x[1]], 2),
                (lambda x: x.unbind(1), 2),
                (lambda x: [x[0], x[1], x[2] * 2], 2),
                (lambda x: (*x[:2].unbind(), x[2]), 2),
            ]
        ],
        4,
    ),
)
def test_inputs_that_are_one_tensor_are_not_stacked(pick: Any, stacked: int) -> None:
    """The other stack is that of the weights."""

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.cat([F.linear(a, w).relu() for a, w in zip(pick(x), weights, strict=True)])

    (outcome,), module = applied(StackedLinears(always=True), fn, torch.randn(3, 3, 4), *W[:3])
    assert isinstance(outcome, Match)
    assert calls(module).count("stack") == stacked


def test_two_groups_that_would_make_a_cycle() -> None:
    """p1 -> q1 and q2 -> p2: merging the ps makes the qs depend on each other."""

    def fn(x: Tensor, w: Tensor, u: Tensor, n: Tensor, m: Tensor) -> Tensor:
        q1 = F.layer_norm(F.linear(x, w), (4,), n)
        p2 = F.linear(F.layer_norm(x, (4,), m), u)
        return q1 + p2

    x = torch.randn(3, 4)
    rewrite, norms = StackedLinears(always=True), StackedNorms(always=True)
    captured = capture_graph(fn, [x, *W[:2], W[2][0], W[3][0]], "pre-grad", dynamic=False)
    first = list(rewrite.apply(captured.graph))
    second = list(norms.apply(captured.graph))
    captured.graph.lint()
    assert [type(o) for o in first] == [Match]
    (miss,) = second
    assert isinstance(miss, NearMiss)
    assert miss.obstacle == "argument"
    assert "is computed from" in miss.reason


def test_calls_with_and_without_gradients_are_kept_apart() -> None:
    def fn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        a = F.linear(x, w)
        with torch.no_grad():
            b = F.linear(x, u)
        return a + b

    ((miss,), _) = applied(WideLinears(always=True), fn, torch.randn(3, 4), *W[:2])
    assert miss.obstacle == "mode"
    assert "switches gradients, autocast or a transform between a and b" in miss.reason


def test_a_write_in_between_keeps_calls_apart() -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor, u: Tensor) -> Tensor:
        a = F.linear(x, w)
        y = y.clone()
        y.add_(1)
        return a + F.linear(y, u)

    ((miss,), _) = applied(StackedLinears(always=True), fn, torch.randn(3, 4), torch.randn(3, 4), *W[:2])
    assert miss.obstacle == "mutation"
    assert "writes to a tensor between" in miss.reason


@pytest.mark.parametrize("change", ["rows", "dtype", "bias", "weight"])
def test_calls_of_another_form_are_not_merged(change: str) -> None:
    x, y, w, u = torch.randn(3, 4), torch.randn(3, 4), W[0], W[1]
    bias = torch.randn(4) if change == "bias" else None
    y = torch.randn(5, 4) if change == "rows" else y.double() if change == "dtype" else y
    u = torch.randn(5, 4) if change == "weight" else u.double() if change == "dtype" else u

    def fn(x: Tensor, y: Tensor, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w, *b).sin(), F.linear(y, u).sin()

    outcomes, _ = applied(StackedLinears(always=True), fn, x, y, w, u, *([bias] if bias is not None else []))
    assert outcomes == []


@pytest.mark.parametrize("layout", ["one row", "transposed", "expanded", "offset", "no rows"])
def test_any_layout_of_the_input(layout: str) -> None:
    x = {
        "one row": torch.randn(1, 4),
        "transposed": torch.randn(4, 3).t(),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "offset": torch.randn(5, 8)[1:4, 2:6],
        "no rows": torch.randn(0, 4),
    }[layout]

    def fn(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w), F.linear(x, u).sin()

    outcomes, _ = applied(WideLinears(always=True), fn, x, *W[:2])
    assert [type(o) for o in outcomes] == [Match]


def test_new_nodes_say_where_they_come_from_and_what_they_are() -> None:
    def fn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return F.linear(x, w).sin() + F.linear(x, u)

    (match,), module = applied(WideLinears(always=True), fn, torch.randn(3, 4), *W[:2])
    made = [n for n in module.graph.nodes if n.name in match.made]
    assert made
    assert all("stack_trace" in n.meta for n in made)
    wide = next(n for n in made if "linear" in str(n.target))
    assert tuple(fake_value(wide).shape) == (3, 8)
    assert match.where
    assert all("test_group.py" in line for line in match.where)


def test_results_that_leave_the_graph_have_memory_of_their_own() -> None:
    def fn(x: Tensor, y: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w).view(4, 3), F.linear(y, u)

    captured = capture_graph(fn, [torch.randn(3, 4), torch.randn(3, 4), *W[:2]], "pre-grad", dynamic=False)
    assert any(isinstance(o, Match) for o in StackedLinears(always=True).apply(captured.graph))
    module = torch.fx.GraphModule({}, captured.graph)
    args = [torch.randn(3, 4), torch.randn(3, 4), *W[:2]]
    a, b = module(*[args[r] for r in captured.roles.values()])  # type: ignore[index]
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_calls_of_a_declared_op_are_joined() -> None:
    def fn(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return dense.mm(x, w).sin() + dense.mm(x, u) + dense.mm(x, v)

    (match,), module = applied(JoinedCalls(dense.mm, "n", always=True), fn, torch.randn(3, 4), *W[:3])
    assert match.operators == ("dense::mm",) * 3
    assert names(module).count("dense.mm.default") == 1


def test_a_dim_along_which_calls_cannot_be_joined() -> None:
    with pytest.raises(ShiplapError, match=r"(?s)SL117.*dense::mm, batches\('k'\).*missing in an output") as caught:
        read_batching(dense.mm.spec, "k")
    assert "a dim of an argument and of every output" in str(caught.value)
    with pytest.raises(ShiplapError, match=r"(?s)JoinedCalls\(dense::conv2d, 'co'\).*call op.batches\('co'\)"):
        JoinedCalls(dense.conv2d, "co")


def test_chains_on_the_cpu_are_left_to_the_code_generator() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(x * 2 + 1).cumsum(0), torch.tanh(y * 2 + 1).cumsum(0)

    args = [torch.randn(3, 4), torch.randn(3, 4)]
    ((miss,), _) = applied(StackedChains(), fn, *args)
    assert miss.obstacle == "cost"
    assert "one kernel by itself" in miss.reason
    ((match,), _) = applied(StackedChains(always=True), fn, *args)
    assert len(match.nodes) == 6


def test_many_small_layers_pay_and_large_ones_do_not() -> None:
    def towers(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([F.linear(a, b).relu() for a, b in zip(x.unbind(0), w.unbind(0), strict=True)])

    ((match,), _) = applied(StackedLinears(), towers, torch.randn(16, 4, 32), torch.randn(16, 32, 32))
    assert isinstance(match, Match)
    ((miss,), _) = applied(StackedLinears(), towers, torch.randn(4, 4, 256), torch.randn(4, 256, 256))
    assert miss.obstacle == "cost"
    assert "stacking operands costs about" in miss.reason


def test_weights_that_are_no_constants_are_not_put_side_by_side() -> None:
    def fn(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return F.linear(x, q).sin() + F.linear(x, k)

    ((miss,), _) = applied(WideLinears(), fn, torch.randn(4, 256), torch.randn(256, 256), torch.randn(256, 256))
    assert miss.obstacle == "cost"
    assert "2 calls of linear: merging saves about" in miss.reason
    assert "putting the weights side by side costs about" in miss.reason


def test_a_price_near_its_margin_declines() -> None:
    assert MergePrice(total=1000, saved=200, added=50).pays
    assert not MergePrice(total=1000, saved=140, added=50).pays
    assert MACHINES.keys() == {"cpu", "cuda"}


def test_a_digest_follows_options_and_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [StackedLinears(), StackedLinears(), StackedLinears(least=3), StackedLinears(always=True), WideLinears()]
    digests = [m.digest for m in made]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    monkeypatch.setitem(MACHINES, "cpu", MACHINES["cuda"])
    assert made[0].digest != digests[0]


class Wrong(WideLinears):
    """Gives the results in another order."""

    name = "wrong"

    def merge(self, members: Any) -> Any:
        fn, args = super().merge(members)
        return (lambda *given: fn(*given)[::-1]), args


def test_a_wrong_merge_is_refused() -> None:
    with pytest.raises(ShiplapError, match=r"(?s)SL801.*rewrite 'wrong'"):
        sl.rewrites(Wrong())


@pytest.mark.parametrize(
    "made",
    sampled(
        [
            StackedLinears(),
            WideLinears(),
            StackedNorms(),
            StackedChains(),
            JoinedCalls(dense.mm, "n"),
            JoinedCalls(dense.int8_mm, "m"),
        ],
        3,
    ),
    ids=lambda r: r.name,
)
def test_groups_are_proven(made: Any) -> None:
    verdicts = {f.check: f.verdict for f in made.findings}
    assert verdicts.pop("gradients") == ("skip" if made.level == "post-grad" else "ok")
    assert set(verdicts.values()) == {"ok"}
    assert not proving.get()


def on_cuda(fn: Callable[..., Any], *args: Tensor, dynamic: list[int] | None = None) -> list[MergePrice]:
    """What merging the linear layers of ``fn`` gains and costs on CUDA, by the shape of the graph; a price a family."""
    results: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        rewrite = StackedLinears()
        families: dict[Any, list[Any]] = {}
        for node in gm.graph.nodes:
            families.setdefault(rewrite.key(node), []).append(node)
        results[:] = [rewrite.price(nodes, MACHINES["cuda"]) for key, nodes in families.items() if key and nodes[1:]]
        return gm.forward

    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], dynamic)
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=None if dynamic else False)(*args)
    return results


def encoders(count: int, *, turned: bool = False, sums: bool = False) -> Callable[..., Tensor]:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        inputs = [x[i] for i in range(count)][:: -1 if turned else 1]
        inputs = [a.cumsum(0) for a in inputs] if sums else inputs
        return torch.cat([F.linear(a, w).relu() for a, w in zip(inputs, weights, strict=True)], 1)

    return fn


def layers(count: int, rows: int, size: int) -> list[Tensor]:
    return [torch.zeros(count, rows, size), *(torch.zeros(size, size) for _ in range(count))]


@pytest.mark.parametrize(
    ("sizes", "how", "dynamic", "kernels", "pays"),
    [
        ((16, 4, 64), {}, None, 1, True),  # one kernel stacks the weights
        ((16, 4, 64), {"turned": True}, None, 2, True),  # one the inputs, too
        ((16, 4, 64), {}, [1], 1, True),  # the number of rows varies
        ((16, 4, 64), {}, [0, 1], 17, False),  # so does the number of entries: each is copied by a kernel of its own
        ((16, 4, 64), {"sums": True}, None, 17, False),  # and so is what another kernel computed
        ((6, 4, 64), {"sums": True}, None, 2, True),  # unless they are few
    ],
)
def test_on_gpus_a_merge_costs_the_kernels_that_lay_operands_side_by_side(
    sizes: Any, how: Any, dynamic: list[int] | None, kernels: int, pays: bool
) -> None:
    (price,) = on_cuda(encoders(sizes[0], **how), *layers(*sizes), dynamic=dynamic)
    assert int(price.added // MACHINES["cuda"].launch) == kernels
    assert price.pays == pays


def test_on_gpus_long_products_hide_their_launches() -> None:
    def saved(rows: int) -> float:
        (price,) = on_cuda(encoders(4), *layers(4, rows, 256))
        return price.saved

    assert saved(4) > 0.98 * 3 * MACHINES["cuda"].launch > saved(1024) > saved(4096) == 0


def test_on_gpus_what_is_computed_where_it_is_needed_is_not_copied() -> None:
    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        inner = [F.linear(x[i], w).relu() for i, w in enumerate(weights)]
        return torch.cat([F.linear(a, w[:32]) for a, w in zip(inner, weights, strict=True)], 1)

    first, second = on_cuda(deep, *layers(16, 4, 64))
    assert first.pays
    assert second.pays
