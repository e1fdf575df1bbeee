"""Results that are more than fresh tensors of declared sizes: arguments, views, lists, scalars, optional ones; and
arguments of fixed length, with absent members, of several dtypes. Schema, call, fake, graph, gradient, refusal, audit.
"""

import pytest
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


def schema(op):
    return str(op.overload._schema).partition("::")[2]


@pytest.fixture
def scale_(ns):
    @sl.op(f"{ns}::scale_", mutates="x", aliases="x")
    def scale_(x: V, by: float = 2.0) -> V:
        """x times by, in place."""
        return x.mul_(by)

    return scale_


@pytest.fixture
def rows(ns):
    @sl.op(f"{ns}::rows", aliases="x")
    def rows(x: Float[Tensor, "n c"], start: int) -> Float[Tensor, "m c"]:
        """The rows of x from start on."""
        return x[start:]

    return rows


@pytest.fixture
def cut(ns):
    @sl.op(f"{ns}::cut")
    def cut(x: Float[Tensor, "n c"], sizes: list[int]) -> list[Float[Tensor, "m c"]]:
        """x in pieces of these sizes."""
        return [t.clone() for t in x.split(sizes)]

    @cut.backward(saves=())
    def _(grad, saved, needs):
        return {"x": torch.cat(list(grad))}

    @cut.samples
    def _(rng, sizes, dtype, device):
        n, c = sizes["n"], sizes["c"]
        return torch.randn(n, c, generator=rng, dtype=dtype).to(device), [n // 2, n - n // 2]

    return cut


def compiled(fn, *args, dynamic=True):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*args)


def test_an_op_returns_what_it_wrote_to(scale_):
    assert schema(scale_) == "scale_(Tensor(a!) x, float by=2.) -> Tensor(a!)"
    x = torch.ones(3)
    assert scale_(x, 3.0) is x
    assert x.tolist() == [3, 3, 3]
    y = torch.ones(3)
    assert compiled(lambda y: scale_(y) + 1, y).tolist() == [3, 3, 3]
    assert y.tolist() == [2, 2, 2]
    with fails("SL304"):
        scale_(torch.ones(3, requires_grad=True) * 1)
    with fails("SL201", "argument 'x'"):
        scale_(torch.ones(3, 3))


def test_a_kernel_of_an_op_that_returns_what_it_wrote_to(scale_):
    @scale_.kernel("cpu")
    def twice(x, by):
        x *= by  # returning x, or nothing, is the same

    x = torch.ones(3)
    assert scale_(x) is x
    assert x.tolist() == [2, 2, 2]
    verdicts = {
        f.check: f for f in sl.audit(scale_, seed=0, checks=("numerics", "fake", "schema", "kernels", "opcheck"))
    }
    assert {f.verdict for f in verdicts.values()} <= {"ok", "skip"}, verdicts

    @scale_.kernel("cpu")
    def another(x, by):
        return x * by

    with fails("SL301", "another tensor", "argument 'x' itself, written to in place"):
        scale_(x)


def test_results_beside_the_arguments(ns):
    @sl.op(f"{ns}::step", mutates=("p", "m"), aliases=("m", None, "p"), outputs="norm")
    def step(p: V, m: V, g: V) -> tuple[V, Float[Tensor, ""], V]:
        m.mul_(0.9).add_(g)
        return m, g.norm(), p.sub_(m)

    assert schema(step) == "step(Tensor(a!) p, Tensor(b!) m, Tensor g) -> (Tensor(b!), Tensor, Tensor(a!))"
    p, m, g = torch.ones(2), torch.zeros(2), torch.full((2,), 2.0)
    first, norm, last = step(p, m, g)
    assert first is m
    assert last is p
    assert norm == g.norm()
    with torch.no_grad():
        assert torch.equal(compiled(lambda *a: step(*a)[1], torch.ones(2), torch.zeros(2), g), norm)


def test_a_view_is_seen_through(rows):
    assert schema(rows) == "rows(Tensor(a) x, SymInt start) -> Tensor(a)"
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    assert rows(x, 1)._is_view()
    assert rows(x, 1).data_ptr() == x[1:].data_ptr()
    rows(x, 1).sum().backward()
    assert x.grad.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert torch.func.vmap(lambda x: rows(x, 1))(torch.ones(4, 3, 2)).shape == (4, 2, 2)
    assert torch.func.jvp(lambda x: rows(x, 2), (x.detach(),), (torch.ones(3, 2),))[1].tolist() == [[1, 1]]

    def write(x):
        rows(x, 1).zero_()
        return x + 0

    assert compiled(write, torch.ones(3, 2)).tolist() == [[1, 1], [0, 0], [0, 0]]
    with fails("SL131"):
        rows.kernel("cpu", lambda x, start: x[start:])
    with fails("SL201"):
        rows(torch.ones(3), 1)


def test_a_list_of_views(ns):
    @sl.op(f"{ns}::halves", aliases="x")
    def halves(x: V) -> list[Float[Tensor, "m"]]:
        return list(x.chunk(2))

    assert schema(halves) == "halves(Tensor(a -> *) x) -> Tensor(a)[]"
    x = torch.zeros(4)
    halves(x)[1].add_(1)
    assert x.tolist() == [0, 0, 1, 1]


def test_a_list_of_tensors(cut):
    assert schema(cut) == "cut(Tensor x, SymInt[] sizes) -> Tensor[]"
    x = torch.arange(8.0).view(4, 2)
    assert [t.shape[0] for t in cut(x, [1, 3])] == [1, 3]
    assert compiled(lambda x: cut(x, [1, x.shape[0] - 1])[1] + 1, x).shape == (3, 2)
    leaf = x.clone().requires_grad_()
    a, b = cut(leaf, [1, 3])
    (a.sum() * 2 + b.sum()).backward()
    assert leaf.grad.tolist() == [[2, 2], [1, 1], [1, 1], [1, 1]]
    squares = torch.func.grad(lambda x: sum((t**2).sum() for t in cut(x, [1, 3])))(x)
    assert torch.equal(squares, 2 * x)

    @cut.kernel("cpu")
    def wrong(x, sizes):
        return [t.double() for t in x.split(sizes)]

    wrong_dtype = [t.int() for t in x.split([1, 3])]
    assert wrong_dtype[0].dtype == torch.int32
    cut.kernel("cpu", lambda x, sizes: wrong_dtype, name="worse")
    with fails("SL301", "result 'out'", "torch.int32"):
        cut(x, [1, 3])


@pytest.mark.long
def test_the_audit_of_a_list(cut):
    checks = ("numerics", "fake", "schema", "fresh", "gradient", "backward", "opcheck", "stateless", "determinism")
    verdicts = {f.check: f for f in sl.audit(cut, seed=0, checks=checks)}
    assert {f.verdict for f in verdicts.values()} <= {"ok", "skip"}, verdicts

    @cut.kernel("cpu")
    def swapped(x, sizes):
        return [t + 1 for t in x.split(sizes)]

    assert sl.audit(cut, seed=0, checks=("numerics",)).findings[0].verdict == "fail"


def test_numbers(ns):
    @sl.op(f"{ns}::positive")
    def positive(x: V) -> int:
        return (x > 0).sum().item()

    @sl.op(f"{ns}::facts")
    def facts(x: V) -> tuple[bool, float, str, V | None]:
        return x.shape[0] > 2, 0.5, "a", None

    assert schema(positive) == "positive(Tensor x) -> SymInt"
    assert positive(torch.ones(3)) == 3
    assert schema(facts) == "facts(Tensor x) -> (bool, float, str, Tensor?)"
    assert facts(torch.ones(3)) == (True, 0.5, "a", None)
    assert compiled(lambda x: x * positive(x), torch.ones(3)).tolist() == [3, 3, 3]
    with fails("SL404", "results that are lists"):
        positive.kernel("cpu", sl.cabi("library.so", "positive"))

    positive.kernel("cpu", lambda x: "three", name="wrong")
    with fails("SL301", "str", "int"):
        positive(torch.ones(3))


def test_an_op_without_tensors(ns):
    @sl.op(f"{ns}::eye")
    def eye(n: int, dtype: torch.dtype, device: torch.device | None = None) -> Shaped[Tensor, "n n"]:
        return torch.eye(n, dtype=dtype, device=device)

    @eye.kernel("cpu")
    def fast(n, dtype, device):
        return torch.eye(n, dtype=dtype, device=device)

    assert schema(eye) == "eye(SymInt n, ScalarType dtype, Device? device=None) -> Tensor"
    assert eye(2, torch.float16).dtype == torch.float16
    assert eye(2, torch.float32, torch.device("meta")).is_meta
    made = compiled(lambda x: x + eye(x.shape[0], torch.float32), torch.zeros(3))
    assert torch.equal(made, torch.eye(3))
    eye.kernel("cpu", lambda n, dtype, device: torch.ones(n, n + 1), name="wrong")
    with fails("SL301", "shape (2, 3)"):
        eye(2, torch.float32)


def test_sizes_that_the_reference_tells(ns):
    with fails("SL104"):

        @sl.op(f"{ns}::unknown")
        def unknown(xs: list[Float[Tensor, "_ c"]]) -> Float[Tensor, "n c"]: ...

    @sl.op(f"{ns}::cat", fake="reference")
    def cat(xs: list[Float[Tensor, "_ c"]]) -> Float[Tensor, "n c"]:
        return torch.cat(xs)

    xs = [torch.ones(2, 3), torch.ones(1, 3)]
    assert cat(xs).shape == compiled(lambda *xs: cat(list(xs)), *xs).shape == (3, 3)


def test_lists_of_fixed_length(ns):
    @sl.op(f"{ns}::pool", specialize="dim")
    def pool(x: V, kernel: tuple[int, int] = (2, 2), flags: tuple[bool] | None = None, dim: int = 0) -> V:
        return x * kernel[0] * kernel[1]

    assert schema(pool) == "pool(Tensor x, SymInt[2] kernel=[2, 2], bool[1]? flags=None, int dim=0) -> Tensor"
    assert pool(torch.ones(2), [3, 2]).tolist() == [6, 6]
    with fails("SL208", "kernel = [1, 2, 3]", "len(kernel) == 2"):
        pool(torch.ones(2), [1, 2, 3])
    with fails("SL103", "specialize= with a float"):

        @sl.op(f"{ns}::no", specialize="k")
        def no(x: V, k: float) -> V: ...


def test_absent_members_and_absent_lists(ns):
    @sl.op(f"{ns}::pick")
    def pick(
        x: Float[Tensor, "n m"], at: list[Int64[Tensor, "k"] | None], more: list[V] | None = None
    ) -> Float[Tensor, "n m"]:
        for i, index in enumerate(at):
            x = x if index is None else x.index_fill(i, index, 0)
        return x + len(more or [])

    assert schema(pick) == "pick(Tensor x, Tensor?[] at, Tensor[]? more=None) -> Tensor"
    x, first = torch.ones(2, 2), torch.tensor([0])
    assert pick(x, [None, first]).tolist() == [[0, 1], [0, 1]]
    assert pick(x, [None, None], [torch.ones(2)]).tolist() == [[2, 2], [2, 2]]
    with fails("SL204", "argument 'at[1]'"):
        pick(x, [None, torch.ones(1)])
    assert torch.equal(compiled(lambda x, i: pick(x, [None, i]), x, first), pick(x, [None, first]))
    leaf = x.clone().requires_grad_()
    pick.backward(lambda grad, saved, needs: {"x": grad * 2}, saves=("at",))
    pick(leaf, [None, first]).sum().backward()
    assert leaf.grad.tolist() == [[2, 2], [2, 2]]


def test_several_dtypes(ns):
    @sl.op(f"{ns}::wide")
    def wide(x: Float32[Tensor, "n"] | Int64[Tensor, "n"]) -> Float32[Tensor, "n"] | Int64[Tensor, "n"]:
        return x + 1

    assert wide(torch.ones(1, dtype=torch.int64)).dtype == torch.int64
    with fails("SL204", "Float32_or_Int64: float32, int64"):
        wide(torch.ones(1, dtype=torch.float64))
    with fails("SL105", "one shape for all dtypes"):

        @sl.op(f"{ns}::no")
        def no(x: Float32[Tensor, "n"] | Int64[Tensor, "m"]) -> Float32[Tensor, "3"]: ...


def test_aliases_that_do_not_fit(ns):
    def f(x: V, k: int) -> V: ...

    for given, got in ((("x", None), "2 entries"), ("k", "aliases='k'"), ("y", "aliases='y'")):
        with fails("SL130", got):
            sl.op(f"{ns}::f", aliases=given)(f)
    with fails("SL109", "fake='guessed'"):
        sl.op(f"{ns}::f", fake="guessed")(f)
