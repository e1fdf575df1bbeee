"""From a bound call to outputs that fit: kernel styles, workspace, and kernels or references that break a promise."""

import linecache

import pytest
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.declare.binding import Binding
from shiplap.declare.kernel import KernelTerms
from shiplap.dispatch import launch
from shiplap.dispatch.launch import poisoned_workspace
from shiplap.dispatch.python_kernel import PythonFunction, PythonKernel
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]


@pytest.fixture
def scale(ns):
    @sl.op(f"{ns}::scale", outputs=["y", "total"])
    def scale(x: V, k: int = 2, *, shift: float = 0.0, tag: str = "t") -> tuple[V, Float32[Tensor, ""]]:
        return x * k + shift, (x * k + shift).sum().float()

    return scale


def same(op, *args, **kwargs):
    for a, b in zip(op(*args, **kwargs), op.reference(*args, **kwargs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("style", ["functional", "out", "out positional"])
def test_kernel_styles(scale, style):
    seen = []

    def functional(x, k, *, shift, tag):
        seen.append(tag)
        return x * k + shift, (x * k + shift).sum().float()

    def out(x, k, *, y, total, shift, tag):
        seen.append(tag)
        assert y.is_contiguous()
        torch.add(x * k, shift, out=y)
        total.copy_(y.sum())

    def positional(total, shift, tag, k, x, y):
        out(x, k, y=y, total=total, shift=shift, tag=tag)

    scale.kernel("cpu", {"functional": functional, "out": out, "out positional": positional}[style])
    same(scale, torch.arange(4.0))
    same(scale, torch.arange(8.0)[::2], 3, shift=0.5, tag="u")
    assert seen == ["t", "u"]


def test_the_last_kernel_bound_is_tried_first_and_a_name_is_replaced(ns):
    @sl.op(f"{ns}::which")
    def which(x: V) -> V:
        return x * 0

    which.kernel("cpu", lambda x: x * 0 + 1, name="one")
    which.kernel("cpu:0", lambda x: x * 0 + 2, name="two", supports=lambda x: len(x) > 2 or "too short")
    assert which(torch.ones(3)).tolist() == [2, 2, 2]
    assert which(torch.ones(1)).tolist() == [1]
    which.kernel("cpu", lambda x: x * 0 + 3, name="two")
    assert [k.name for k in which.kernels["cpu"]] == ["two", "one"]
    assert which(torch.ones(1)).tolist() == [3]
    assert "kernels cpu: two/one" in repr(which)


@pytest.mark.parametrize("style", ["functional", "out"])
@pytest.mark.parametrize(("device", "seen"), [("cuda:1", ["cuda:1"]), ("cuda:0", ["current"]), ("cpu", ["current"])])
def test_a_kernel_runs_with_its_device_as_the_current_one(scale, style, device, seen, monkeypatch):
    """On a machine without a GPU: device 0 is the current one, until a context says otherwise."""
    entered, devices = ["current"], []

    class Entering:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(str(self.device))

        def __exit__(self, *args):
            entered.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Entering)

    def functional(x, k, *, shift, tag):
        devices.append(entered[-1])

    def out(x, k, *, shift, tag, y, total):
        devices.append(entered[-1])

    function = {"functional": functional, "out": out}[style]
    kernel = PythonKernel(scale.spec, KernelTerms("k", "cuda", PythonFunction(function)), function)
    call = Binding((torch.ones(2), 2, 0.0, "t"), device=torch.device(device))
    outs = torch.empty(2), torch.empty(())
    if style == "functional":
        with pytest.raises(sl.ShiplapError, match="SL301"):  # it returned nothing
            kernel.run_into(call, outs, None)
    else:
        kernel.run_into(call, outs, None)
    assert devices == seen
    assert entered == ["current"]


@pytest.mark.parametrize(
    ("parameters", "got", "fix"),
    [
        ("x, y, *, out", "nothing is called 'y'", "remove 'y', or give it a value in configs="),
        ("*, out", "the parameter 'x' is missing", "add the parameter 'x' to the kernel"),
        ("a, *, out", "nothing is called 'a'", "rename 'a' to 'x'"),
        ("x, *, result", "nothing is called 'result'", "rename 'result' to 'out'"),
        ("x, *, out, BLOCK", "nothing is called 'BLOCK'", "remove 'BLOCK', or give it a value in configs="),
        ("*values, out", "*values has no names", "name each parameter in place of *values"),
        ("x, *rest, out", "*rest has no names", "name each parameter in place of *rest"),
    ],
)
def test_a_kernel_takes_the_arguments_of_the_op(ns, parameters, got, fix):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x + 1

    kernel = eval(f"lambda {parameters}: None")
    shown = f"<lambda>({parameters}): {got}"
    with fails("SL122", where=f"{ns}::f, kernel k", got=shown, expected="k(x, *, out)", fix=fix):
        f.kernel("cpu", kernel, name="k")
    f.kernel("cpu", lambda x, *, out, BLOCK: out.copy_(x + BLOCK), configs=[{"BLOCK": 1}])
    f.kernel("cpu", lambda x, BLOCK: x + BLOCK, configs=lambda sizes: [{"BLOCK": sizes["n"]}])
    assert f(torch.zeros(3)).tolist() == [3, 3, 3]


def test_a_kernel_takes_each_output_by_its_name(ns):
    @sl.op(f"{ns}::ends", outputs=("low", "high"))
    def ends(x: V) -> tuple[V, V]:
        return x - 1, x + 1

    with fails("SL122", got="<lambda>(x, out): nothing is called 'out'", fix="take each output by its name: low, high"):
        ends.kernel("cpu", lambda x, out: None)


def test_a_kernel_is_bound_for_a_device_type(ns):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x + 1

    with fails("SL122", where=f"{ns}::f, kernel", got="a function as the device type", expected='a text such as "cpu"'):

        @f.kernel
        def bare(x):
            return x

    for wrong, fix in (("gpu", "cuda"), ("cuad", "cuda"), ("CPU", "cpu")):
        with fails("SL122", got=f"the device type {wrong!r}", fix=f'write @op.kernel("{fix}")'):
            f.kernel(wrong, lambda x: x)
    with fails(
        "SL122", got="the device type 'abacus'", fix="import the package of the device before the kernel is bound"
    ):
        f.kernel("abacus", lambda x: x)
    f.kernel("cuda", lambda x: x)
    with pytest.warns(sl.ShiplapNotice, match="runs its reference .no kernel for cpu, only for cuda."):
        f(torch.ones(2))


@pytest.mark.parametrize("trained", [False, True])
def test_a_notice_points_at_the_line_that_called_the_op(ns, trained):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x + 1

    x = torch.ones(2, requires_grad=trained)
    with pytest.warns(sl.ShiplapNotice) as notices:
        f(x)
    assert [(n.filename, linecache.getline(n.filename, n.lineno)) for n in notices] == [(__file__, "        f(x)\n")]


def test_no_kernel_runs_the_reference_and_says_so_once(ns, monkeypatch):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x + 1

    with pytest.warns(sl.ShiplapNotice, match=f"^{ns}::f runs its reference .no kernel for cpu.: correct, not fast$"):
        f(torch.ones(2))
    f.kernel("cpu", lambda x: x, name="big", supports=lambda x: f"needs 4 rows, not {len(x)}")
    f.kernel("cpu", lambda x: x, name="no", supports=lambda x: False)
    with pytest.warns(sl.ShiplapNotice) as notices:
        sums = [f(torch.ones(n)).sum() for n in (1, 2, 3)]  # a reason with a size in it is still one reason
    assert sums == [2, 4, 6]
    assert [str(n.message) for n in notices] == [
        f"{ns}::f runs its reference (no: supports() returned False; big: needs 4 rows, not 1): correct, not fast"
    ]
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    with fails(
        "SL306",
        where=f"{ns}::f",
        got="no: supports() returned False; big: needs 4 rows, not 1",
        expected="a kernel for cpu",
    ):
        f(torch.ones(1))
    monkeypatch.setenv("SHIPLAP_STRICT", "0")
    f(torch.ones(1))


@pytest.mark.parametrize(
    ("result", "got", "expected"),
    [
        (lambda x: x, "1 outputs", "2 outputs"),
        (lambda x: (x, 1), "int", "torch.float32 on cpu"),
        (lambda x: (x.double(), x.sum()), "torch.float64 on cpu", "torch.float32 on cpu"),
        (lambda x: (x, x.sum().to("meta")), "torch.float32 on meta", "torch.float32 on cpu"),
        (lambda x: (x[1:], x.sum()), "shape (3,)", 'Float[Tensor, "n"] = (4,)'),
        (lambda x: (x, x[:1]), "shape (1,)", 'Float32[Tensor, ""] = ()'),
        (lambda x: None, "0 outputs: the function returned None", "2 outputs"),
    ],
)
def test_results_that_break_the_declaration(scale, result, got, expected):
    scale.kernel("cpu", lambda x, k, shift, tag: result(x))
    with fails("SL301", scale.spec.name, got=got, expected=expected):
        scale(torch.ones(4))


def test_a_kernel_that_forgot_to_return_is_told_to(ns):
    @sl.op(f"{ns}::twice")
    def twice(x: V) -> V:
        return x * 2

    twice.kernel("cpu", lambda x: None)
    with fails("SL301", fix="return the result, or let the kernel take out (*, out) and fill it in place"):
        twice(torch.ones(2))


def test_results_are_fresh_contiguous_and_in_any_sequence(ns):
    @sl.op(f"{ns}::views")
    def views(x: M) -> tuple[Float[Tensor, "c n"], M, M, Float[Tensor, "n"]]:
        y = x * 2
        return [x.T, x, y, y[:, 0]]

    x = torch.randn(3, 4)
    before = x.clone()
    outs = views(x)
    pointers = {t.untyped_storage().data_ptr() for t in (x, *outs)}
    assert len(pointers) == 5, "no output shares memory with an input or another output"
    assert all(o.is_contiguous() for o in outs)
    for o, want in zip(outs, (before.T, before, before * 2, before[:, 0] * 2), strict=True):
        assert torch.equal(o, want)
        o.zero_()
    assert torch.equal(x, before)


def test_lazy_conjugates_are_resolved(ns):
    from jaxtyping import Complex

    @sl.op(f"{ns}::conj")
    def conj(x: Complex[Tensor, "n"]) -> tuple[Complex[Tensor, "n"], Float32[Tensor, "n"]]:
        return x.clone().conj(), x.clone().conj().imag

    x = torch.tensor([1 + 2j, 3 - 1j])
    a, b = conj(x)
    assert (a.is_conj(), b.is_neg()) == (False, False)
    assert torch.equal(a, x.conj().resolve_conj())
    assert b.tolist() == [-2, 1]


def test_bounds_are_measured_before_shapes_are_compared(ns):
    @sl.op(f"{ns}::f", bounds={"m": "2*n"})
    def f(x: Float[Tensor, "*b n"], k: int) -> tuple[Float[Tensor, "m+1"], Float[Tensor, "*b m 2"], Int64[Tensor, "m"]]:
        return x.new_zeros(k + 1), x.new_zeros(*x.shape[:-1], k, 2), torch.zeros(k, dtype=torch.int64)

    assert [tuple(t.shape) for t in f(torch.zeros(5, 6, 4), 8)] == [(9,), (5, 6, 8, 2), (8,)]
    assert [tuple(t.shape) for t in f(torch.zeros(4), 0)] == [(1,), (0, 2), (0,)]
    with fails("SL302", where=f"{ns}::f, output 'out1'", got="m = 9", expected="m <= 2*n = 8"):
        f(torch.zeros(5, 6, 4), 9)

    f.kernel("cpu", lambda x, k: (x.new_zeros(3), x.new_zeros(2, 2), torch.zeros(1, dtype=torch.int64)))
    with fails("SL301", "output 'out2'", got="shape (1,)", expected='Int64[Tensor, "m"] = (2,)'):
        f(torch.zeros(4), 0)


def test_workspace(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n c"], k: int) -> Float[Tensor, "n c"]:
        return x.clone()

    sizes = []

    def kernel(x, k, *, out, workspace):
        assert (workspace.dtype, workspace.device, workspace.dim()) == (torch.uint8, x.device, 1)
        assert workspace.numel() == 0 or workspace.data_ptr() % 64 == 0
        sizes.append((workspace.numel(), set(workspace.tolist())))
        out.copy_(x)

    f.kernel("cpu", kernel, workspace="n * c * itemsize + k + threads")
    threads = torch.get_num_threads()
    with poisoned_workspace(0xA5):
        f(torch.zeros(2, 3), 5)
        f(torch.zeros(2, 3, dtype=torch.float64), 5)
    assert sizes == [(24 + 5 + threads, {0xA5}), (48 + 5 + threads, {0xA5})]
    f.kernel("cpu", kernel)
    f(torch.zeros(2, 3), 5)
    assert sizes[-1][0] == 0
    with fails("SL105", where=f"{ns}::f, workspace", got="n * q uses 'q'"):
        f.kernel("cpu", kernel, workspace="n * q")
    with fails("SL105", where=f"{ns}::f, workspace", expected="an expression without Pow"):
        f.kernel("cpu", kernel, workspace="n ** 2")


def test_itemsize_of_an_op_with_fixed_dtypes(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x.clone()

    sizes = []
    f.kernel("cpu", lambda x, out, workspace: sizes.append(workspace.numel()), workspace="n * itemsize")
    f(torch.zeros(5))
    assert sizes == [20]


@pytest.mark.parametrize("backend", sampled(["eager", "aot_eager", "inductor"], long=["eager", "aot_eager"]))
@pytest.mark.usefixtures("fresh_compiler")
def test_mutation_is_the_same_compiled(ns, backend):
    @sl.op(f"{ns}::update", mutates=["table", "count"])
    def update(table: M, count: Int64[Tensor, ""], x: M, k: int = 1) -> Float[Tensor, "n"]:
        table.add_(x, alpha=k)
        count.add_(1)
        return table.sum(1)

    def fn(table, count, x):
        before = table * 1
        sums = update(table[:, ::2], count, x)
        repeated = update(table[:, ::2], count, x, 2)
        return before, sums, repeated, table + 1, count * 2

    x = torch.randn(3, 2)
    results = []
    for f in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
        table, count = torch.ones(3, 4), torch.tensor(5)
        results.append((*f(table, count, x), table, count))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert results[0][-1] == 7


@pytest.mark.usefixtures("fresh_compiler")
def test_an_op_that_only_mutates(ns):
    @sl.op(f"{ns}::fill_", mutates=["x"])
    def fill_(x: V, value: float) -> None:
        x.fill_(value)

    def fn(x):
        y = x.clone()
        fill_(y, 3.0)
        return y + x

    assert torch.compile(fn, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist() == [4, 4]
    assert fill_(torch.ones(2), 1.0) is None
    fill_.kernel("cpu", lambda x, value: x)
    with fails("SL301", got="1 outputs", expected="0 outputs"):
        fill_(torch.ones(2), 1.0)


def test_nested_ops_and_inference_mode(scale, ns):
    @sl.op(f"{ns}::outer")
    def outer(x: V) -> V:
        assert not torch.is_grad_enabled() or not x.requires_grad or not scale(x)[0].requires_grad
        return scale(x)[0] + 1

    @outer.backward(saves=[])
    def _(grad, saved, needs):
        return {"x": grad * 2}

    x = torch.ones(3, requires_grad=True)
    outer(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    with torch.inference_mode():
        assert outer(torch.ones(3)).tolist() == [3, 3, 3]
    torch.compile(outer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert x.grad.tolist() == [4, 4, 4]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_list_beside_a_returned_argument_is_one_result(ns, whole, first):
    """A kernel may return what is new alone. Its list has as many members here as the op has results."""
    results = tuple[list[M], M] if first else tuple[M, list[M]]

    def ordered(acc, made):
        return (made, acc) if first else (acc, made)

    @sl.op(f"{ns}::parts", mutates="acc", aliases=ordered("acc", None))
    def op(x: M, acc: M) -> results:
        return ordered(acc.add_(x), [x + 1, x + 2])

    @op.kernel("cpu")
    def _(x, acc):
        acc.add_(x)
        return ordered(acc, [x + 1, x + 2]) if whole else [x + 1, x + 2]

    x, acc = torch.ones(2, 3), torch.zeros(2, 3)
    made, same = op(x, acc) if first else op(x, acc)[::-1]
    assert same is acc
    assert torch.equal(acc, x)
    assert [t.sum().item() for t in made] == [12.0, 18.0]


@pytest.mark.parametrize("bound", [False, True])
def test_sizes_that_depend_on_data_are_refused_in_a_capture(ns, monkeypatch, bound):
    @sl.op(f"{ns}::positive", bounds={"k": "n"})
    def positive(x: V) -> Float[Tensor, "k"]:
        return x[x > 0]

    if bound:
        positive.kernel("cpu", lambda x: x[x > 0])
    x = torch.tensor([1.0, -1.0])
    assert positive(x).tolist() == [1.0]
    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    with fails("SL318", f"{ns}::positive", "k that depends on data"):
        positive(x)
