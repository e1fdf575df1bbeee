"""Each use of private torch does what it is for, on the installed torch: these tests write the table of capabilities.

``shiplap_testing.capabilities`` runs them, and notes the capabilities of which a test passed and none failed.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap.doctor import registry
from shiplap.inductor import explain, fusion_choices
from shiplap.torch_private import graph_keys, graph_nodes, graph_objects, inductor_lowering
from shiplap.torch_private.dispatcher_calls import builtin_of, is_plain_call, is_recorded_call
from tests.inductor.targets import qmm

V = Float[Tensor, "n"]
capability = pytest.mark.capability  # mark.capability(name)


@pytest.fixture
def double(ns: str) -> Any:
    @sl.op(f"{ns}::double")
    def double(x: V) -> V:
        return x * 2

    @double.kernel("cpu")
    def kernel(x, *, out):
        torch.mul(x, 2, out=out)

    @double.backward
    def gradient(grad, saved, needs):
        return {"x": 2 * grad}

    return double


X = torch.ones(3)
TABLE = torch.ones(4, 5)


@capability("autocast rules")
def test_autocast_converts_arguments_by_the_rule(ns: str) -> None:
    @sl.op(f"{ns}::same", autocast="autocast")
    def same(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.clone()

    with torch.autocast("cpu", torch.bfloat16):
        assert same(X).dtype == torch.bfloat16
    assert same(X).dtype == torch.float32


@capability("calls below autograd")
def test_a_call_goes_below_autograd_where_nothing_has_to_see_it(double: Any) -> None:
    leaf = X.clone().requires_grad_()
    assert double.can_skip_dispatcher
    assert is_plain_call((X,), {})
    assert is_recorded_call((leaf,))
    assert not is_plain_call((leaf,), {})
    double(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 3
    with torch.autocast("cpu"):
        assert not is_plain_call((X,), {})
    assert torch.func.vmap(lambda x: torch.full_like(x, is_plain_call((x,), {})))(torch.ones(2, 3)).sum() == 0


@capability("transforms of torch.func, forward-mode AD")
def test_transforms_see_a_call(double: Any) -> None:
    assert torch.func.grad(lambda x: double(x).sum())(X).tolist() == [2.0] * 3
    assert torch.func.vmap(double)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sl.ShiplapNotice)
        assert torch.func.jvp(double, (X,), (X,))[1].tolist() == [2.0] * 3


@capability("calls past OpOverload.__call__")
def test_the_c_function_behind_an_overload_is_called(double: Any) -> None:
    behind = builtin_of(double.overload)
    assert type(behind).__name__ == "builtin_function_or_method"
    assert behind(X).tolist() == double.overload(X).tolist() == [2.0] * 3
    assert torch.jit.trace(lambda x: double.overload(x), X)(2 * X).tolist() == [4.0] * 3


@capability("templates in Inductor's lowering")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_template_is_proven_and_takes_its_neighbour_in(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    arguments = torch.randn(5, 8), torch.ones(8, 4, dtype=torch.int8), torch.ones(4)
    explanation = explain(lambda *args: torch.relu(qmm(*args)), *arguments, fullgraph=True)
    (kernel,) = explanation.kernels
    assert (kernel.kind, kernel.operators) == ("template", ("fusetest::qmm", "aten.relu"))
    assert [v.status for v in fusion_choices("fusetest::qmm")[-1].verdicts][:1] == ["ok"]


@capability("calls from Inductor's code")
@pytest.mark.usefixtures("fresh_compiler")
def test_code_of_inductor_calls_an_op_by_a_name(double: Any) -> None:
    from torch._inductor.utils import run_and_get_code

    result, (code,) = run_and_get_code(torch.compile(lambda x: double(x) + 1, fullgraph=True), X)
    assert result.tolist() == [3.0] * 3
    assert code.count("in_code(torch.ops.") == 1


@capability("redeclaring an op")
def test_an_op_of_another_schema_takes_the_name(ns: str) -> None:
    def first(x: V) -> V:
        return x * 2

    def second(x: V, y: V) -> V:
        return x + y

    first.__qualname__ = second.__qualname__ = "f"
    first.__name__ = second.__name__ = "f"
    sl.op(f"{ns}::f")(first)
    sl.op(f"{ns}::f")(second)
    assert getattr(torch.ops, ns).f(X, X).tolist() == [2.0] * 3


@capability("cache keys of graphs")
@pytest.mark.usefixtures("fresh_compiler")
def test_the_keys_of_torchs_caches_are_asked_for_the_ops_of_a_graph(
    double: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    found = graph_keys.operators_of

    def noted(details: Any) -> Any:
        operators = found(details)
        seen.update(operators.names)
        return operators

    monkeypatch.setattr(graph_keys, "operators_of", noted)
    torch.compile(lambda x: double(x), fullgraph=True)(X)
    assert seen & double.operator_names()


@capability("symbolic fakes")
def test_a_fake_has_symbols_for_sizes() -> None:
    with torch_private.fake_mode(symbolic=True) as mode:
        fake = torch_private.make_fake_tensor(mode, TABLE, dynamic=True)
        assert [type(s) for s in fake.shape] == [torch.SymInt] * 2
        assert (fake + 1).shape == fake.shape


@capability("symbolic sizes")
def test_a_symbolic_size_has_a_value_a_range_and_no_constant() -> None:
    with torch_private.fake_mode(symbolic=True) as mode:
        size = torch_private.make_fake_tensor(mode, TABLE, dynamic=True).shape[0]
        low, high = torch_private.size_range(2 * size)
        assert torch_private.size_value(2 * size, {}) == 8
        assert torch_private.size_constant(2 * size) is None
        assert low >= 0
        assert high > 2**40


@capability("data-dependent sizes")
def test_an_op_of_data_dependent_size_stays_in_the_graph() -> None:
    torch_private.reset_compiler()
    with torch_private.data_dependent_sizes():
        compiled = torch.compile(lambda x: x.nonzero() + 1, backend="eager", fullgraph=True)
        assert compiled(X).shape == (3, 1)


@capability("storage identity")
def test_views_share_a_storage() -> None:
    assert torch_private.same_storage(X, X[1:])
    assert not torch_private.same_storage(X, X.clone())


@capability("compile counters")
def test_graphs_and_breaks_are_counted() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch_private.reset_compiler()
    torch.compile(broken, backend="eager")(X)
    counts = torch_private.compile_counts()
    assert (counts.graphs, counts.graph_breaks, counts.recompiles) == (2, 1, 0)


@capability("dynamic dims")
def test_a_marked_dim_does_not_recompile() -> None:
    torch_private.reset_compiler()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    x = torch.ones(7)
    torch_private.mark_dynamic(x, 0)
    compiled(x), compiled(torch.ones(9)), compiled(torch.ones(11))
    assert torch_private.compile_counts().recompiles == 0


@capability("graph-break registry")
def test_the_registry_explains_a_break_by_its_id() -> None:
    entry = registry.entry_by_id("GB0007")
    assert entry is not None
    assert entry.explanation


@capability("abandoned captures")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_allocated_after_an_abandoned_capture() -> None:
    graph, pool, x = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.ones(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        result, failure = torch_private.capture_graph(graph, lambda: (x * 2).sum().item(), pool)
    torch.cuda.synchronize()
    assert (result, isinstance(failure, RuntimeError)) == (None, True)
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert torch.rand(3, device="cuda").isfinite().all()


@capability("tuning keys and guards")
def test_a_backward_is_noticed() -> None:
    seen: list[bool] = []
    x = X.clone().requires_grad_()
    x.register_hook(lambda grad: seen.append(torch_private.in_backward()))
    (x * 2).sum().backward()
    assert (seen, torch_private.in_backward()) == ([True], False)
    assert isinstance(torch_private.cuda_driver_version(), str)


@capability("fused groups and reasons")
@pytest.mark.usefixtures("fresh_compiler")
def test_kernels_are_explained_with_their_operators() -> None:
    (kernel,) = explain(lambda x: torch.relu(x + 1), X).kernels
    assert (kernel.kind, kernel.operators) == ("generated", ("aten.add", "aten.relu"))
    assert kernel.name


@capability("nested arguments")
def test_leaves_of_a_tree() -> None:
    assert graph_objects.leaves({"a": (1, [2, 3])}) == [1, 2, 3]
    assert graph_objects.map_leaves(lambda v: v + 1, {"a": (1, [2])}) == {"a": (2, [3])}


@capability("operators of a graph")
def test_a_node_has_its_operator() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.add(1)).graph
    (node,) = (n for n in graph.nodes if n.op.startswith("call"))
    assert graph_nodes.operator_of(node) == graph_nodes.operator_of(node) is not None


@capability("rewrites")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_pass_changes_a_graph_of_each_level() -> None:
    rewrite = sl.rewrite(
        lambda x, w: torch.nn.functional.linear(x, w),
        lambda x, w: torch.mm(x, w.t()),
        name="capability",
        samples=lambda: [(torch.randn(5, 3), torch.randn(7, 3))],
    )
    assert {f.verdict for f in rewrite.findings} <= {"ok", "skip"}
    torch_private.reset_compiler()
    with (
        sl.rewrites(rewrite) as scope,
        inductor_lowering.without_graph_caches(),
    ):  # a cached graph passes by the rewrites
        torch.compile(lambda x, w: torch.nn.functional.linear(x, w))(torch.randn(5, 3), torch.randn(7, 3))
    assert [m.rewrite for m in scope.matches] == ["capability"]


@capability("structured trace")
def test_the_trace_of_a_compilation_is_read() -> None:
    events: list[dict[str, Any]] = []
    torch_private.reset_compiler()
    with torch_private.structured_trace(lambda metadata, payload: events.append(metadata)):
        torch.compile(lambda x: x + 1, backend="eager")(X)
    assert any("dynamo_start" in event for event in events)
