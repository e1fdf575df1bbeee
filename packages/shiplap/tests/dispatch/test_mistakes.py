"""Mistakes of declarations that authors make: each is refused with its cause, and what the fix says can be done."""

import enum
import inspect
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.dispatch.autograd_function import compile_native_record
from shiplap.packaging.model import package_model
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


class Mode(enum.Flag):
    FAST = 1
    EXACT = 2


class Mixed(enum.Enum):
    A = "a"
    B = 1


ARGUMENTS = {
    "array": (Float[np.ndarray, "n c"], 'write Tensor for the array type: Float[Tensor, "n c"], and pass torch.from_'),
    "integers": (Int64[np.ndarray, "k"], 'write Tensor for the array type: Int64[Tensor, "k"]'),
    "bare array": (np.ndarray, 'annotate Float[Tensor, "n c"] and pass tensors'),
    "bare tensors": (list[Tensor], 'say the dtype and dims of the members: list[Float[Tensor, "n c"]]'),
    "bare tensor or None": (Tensor | None, 'Float[Tensor, "n c"] | None'),
    "a number": (3, "write the type, and a default behind =, as in int = 3"),
    "flags": (Mode, "annotate int and pass member.value; the reference may make Mode of it"),
    "mixed values": (Mixed, "give all members of Mixed values of one type, str or int"),
    "mixed literal": (Literal[1, "a"], "list texts only, or ints only, in the Literal"),
    "literal of bools": (Literal[True, False], "annotate bool"),
    "list of literals": (list[Literal[1, 2]], "as an argument of its own, or annotate list[str] or list[int]"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_annotations_that_no_schema_has(ns, name):
    annotation, fix = ARGUMENTS[name]

    def f(x: Float[Tensor, "n"], other):
        return x

    f.__annotations__ |= {"other": annotation, "return": Float[Tensor, "n"]}
    with fails("SL103", fix, where=f"{ns}::f, argument 'other'"):
        sl.op(f"{ns}::f")(f)


@pytest.mark.parametrize("name", ["kernel", "cls"])
def test_keywords_that_are_parameters_of_the_compiler(ns, name):
    """A compiled call of such an op ended in torch's own error."""

    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x

    def named(kind):
        return inspect.Parameter(name, kind, default=1, annotation=int)

    f.__annotations__ |= {name: int}
    first = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Float[Tensor, "n"])
    f.__signature__ = inspect.Signature([first, named(inspect.Parameter.KEYWORD_ONLY)])
    with fails("SL103", "rename the argument, or declare it before the *", where=f"{ns}::f, argument {name!r}"):
        sl.op(f"{ns}::f")(f)
    f.__signature__ = inspect.Signature([first, named(inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    assert [a.name for a in sl.op(f"{ns}::g")(f).spec.args] == ["x", name]


DIMS = {
    "n + 1": "write each dim without blanks, such as 'n+1' for one dim",
    "n +1": "write each dim without blanks, such as 'n+1' for one dim",
    "2* n": "write each dim without blanks, such as '2*n' for one dim",
    "max(n, 2)": "write each dim without blanks, such as 'max(n,2)' for one dim",
    "n/2": "write // for /, without blanks, or (n+1)//2 to round n/2 up: a size is a whole number",
}


FUNCTIONS = {
    "async": ("async def f(x): return x", "write def in place of async def"),
    "generator": ("def f(x): yield x", "write return in place of yield"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_return_something_else_first(ns, name):
    source, fix = FUNCTIONS[name]
    scope = {}
    exec(source, scope)
    with fails("SL103", fix, where=f"{ns}::f"):
        sl.op(f"{ns}::f")(scope["f"])


DECORATED = {
    "an op": (lambda ns: sl.op(f"{ns}::g")(identity), "remove one of the two decorators"),
    "an op of torch": (
        lambda ns: torch.library.custom_op(f"{ns}::h", mutates_args=())(doubled),
        "remove @torch.library.custom_op, since sl.op registers an op itself, and annotate dtype and dims, as in",
    ),
    "an object": (lambda ns: torch.nn.ReLU(), "write a function that calls the object"),
}


def identity(x: V) -> V:
    return x * 1


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("name", DECORATED)
def test_decorated_objects_that_are_no_functions(ns, name):
    made, fix = DECORATED[name]
    got = {"an op": "an Op", "an op of torch": "a CustomOpDef", "an object": "a ReLU"}[name]
    with fails("SL103", fix, where=f"{ns}::f", got=got):
        sl.op(f"{ns}::f")(made(ns))


def test_decorators_of_an_op_that_get_something_else(ns):
    f = sl.op(f"{ns}::f")(identity)
    with fails("SL122", 'fix      write @op.kernel("cpu")', got="a function as the device type"):

        @f.kernel
        def _(x, *, out): ...

    with fails("SL110", "fix      pass a function", got="Tensor, whose parameters cannot be read"):
        f.backward(torch.ones(3))


def test_methods_that_are_decorators_are_not_assigned(ns):
    """Such a function would never be called."""
    f = sl.op(f"{ns}::f")(identity)
    for id, name, fix in (
        ("SL122", "kernel", 'write @op.kernel("cpu") above the function, or pass it to op.kernel(...)'),
        ("SL110", "backward", "write @op.backward above the function"),
        ("SL123", "samples", "write @op.samples above the function"),
    ):
        with fails(id, fix, where=f"{ns}::f", got=f"an assignment to {name} of the op"):
            setattr(f, name, identity)
    f.note = "attributes of other names are free"
    assert f(torch.ones(3)).shape == (3,)


def test_a_backward_that_reads_other_names_or_takes_a_tuple_for_a_tensor(ns):
    @sl.op(f"{ns}::f")
    def f(x: V) -> tuple[V, V]:
        return x * 2, x * 3

    def run(gradient):
        f.backward(gradient)
        x = torch.ones(3, requires_grad=True)
        f(x)[0].sum().backward()
        return x.grad

    with fails("SL135", "read a name under 'expected'", got="needs.weight", expected="x"):
        run(lambda grad, saved, needs: {"x": grad[0] if needs.weight else None})
    with fails("SL303", "such as grad[0] and grad[1], since grad is a tuple"):
        run(lambda grad, saved, needs: {"x": 2 * grad})
    assert run(lambda grad, saved, needs: {"x": 2 * grad[0]}).tolist() == [2.0] * 3


def test_numbers_of_numpy_in_compiled_code(ns):
    """Dynamo makes tensors of them, which torch takes for an int alone."""

    @sl.op(f"{ns}::f")
    def f(x: V, k: int = 1, s: float = 1.0) -> V:
        return x * k * s

    def compiled(call, fullgraph=True):
        torch._dynamo.reset()
        return torch.compile(call, backend="eager", fullgraph=fullgraph)

    x = torch.ones(3)
    assert compiled(lambda x: f(x, np.int64(2)))(x).tolist() == [2.0] * 3
    assert compiled(f)(x, np.int64(2)).tolist() == [2.0] * 3
    for given in ({"s": np.float32(2)}, {"k": np.float64(2.5)}):
        kind = "int" if "k" in given else "float"
        with pytest.raises(Exception, match=rf"SL209: (.|\n)*call {kind}\(v\) of the value v outside of the compiled"):
            compiled(f)(x, **given)
    assert compiled(lambda x: f(x, s=np.float32(2)), fullgraph=False)(x).tolist() == [2.0] * 3


def test_a_workspace_of_a_negative_size(ns):
    f = sl.op(f"{ns}::f")(identity)

    @f.kernel("cpu", workspace="n - 8")
    def _(x, *, out, workspace):
        out.copy_(x)

    assert f(torch.ones(9)).shape == (9,)
    with fails("SL208", 'write workspace="max(n - 8, 0)"', got="n - 8 = -5"):
        f(torch.ones(3))


REQUIRES = {
    "len(x) > 0": "write the names of the dims of x, since an expression sees sizes and no tensors",
    "x.min() > 0": "an expression sees sizes and int arguments, and no values of tensors",
    "x.numel > 0": "an expression sees sizes and int arguments, and no values of tensors",
}


@pytest.mark.parametrize("condition", REQUIRES)
def test_preconditions_on_tensors(ns, condition):
    with fails("SL105", REQUIRES[condition]):

        @sl.op(f"{ns}::f", requires=condition)
        def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x * 2


def test_public_functions_refuse_arguments_that_do_not_fit(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + y

    with fails("SL140", "pass replacement as well", where="sl.rewrite(...)"):
        sl.rewrite(3)
    with fails("SL140", "write checks="):
        sl.audit(f, check="numerics")
    with fails("SL140", "seed='seven'", "a whole number"):
        sl.audit(f, seed="seven")
    with fails("SL140", "pass samples as well"):
        sl.tune(f)
    with fails("SL605", where="audit(device='nowhere')"):
        sl.audit(f, device="nowhere")
    with fails("SL605", where="tune(device='nowhere')"):
        sl.tune(f, [{"n": 3}], device="nowhere")
    with fails("SL209", "write f(*values)"):
        f([torch.ones(3), torch.ones(3)])


def test_an_op_that_calls_itself(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return f(x)

    with pytest.raises(sl.ShiplapError, match="SL319: the op calls itself without an end"):
        f(torch.ones(3))


def test_an_op_that_calls_itself_through_torch(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return getattr(torch.ops, ns).f(x)

    with pytest.raises(sl.ShiplapError, match="SL319: the op calls itself without an end"):
        f(torch.ones(3))


def test_deep_recursion_that_the_op_did_not_cause(ns):
    """Neither code around the op, nor a helper of its kernel, nor a kernel that halves its input is at fault."""

    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return f(x[: len(x) // 2]).sum() + x if len(x) > 1 else x.clone()

    def around(n: int, call: Callable[[], object]) -> None:
        """Call ``call``, and this function again, ``n`` times."""
        call()
        if n:
            around(n - 1, call)

    for size in (1, 16):
        with pytest.raises(RecursionError) as seen:
            around(10**6, lambda size=size: f(torch.ones(size)))
        assert not isinstance(seen.value, sl.ShiplapError)

    @sl.op(f"{ns}::g")
    def g(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        around(10**6, x.clone)
        return x.clone()

    with pytest.raises(RecursionError):
        g(torch.ones(3))


def test_targets_that_are_no_functions_or_no_ops(ns):
    for function in (sl.doctor, sl.explain):
        with fails("SL501", "pass the function f and its arguments, not the result f(x)"):
            function(torch.ones(3))
    with fails("SL501", where="tune()"):
        sl.tune(len, [{"n": 3}])
    with fails("SL501", where="freeze()"):
        sl.freeze("choices.json", [len])
    with fails("SL140", 'a dict\n  fix      write constants={"...": ...}'):
        sl.triton(len, grid="n", constants="BLOCK=64")
    with fails("SL140", "got      program of type Linear"):
        package_model(torch.nn.Linear(3, 3), "model.pt2")


def test_a_sample_builder_that_raises(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    @f.samples
    def _(rng, sizes, dtype, device):
        return undefined

    with fails("SL502", "undefined", what="the sample builder raised an error"):
        sl.audit(f, checks="numerics", seed=0)

    @f.samples
    def _(rng, sizes, dtype, device):
        return torch.ones(sizes["rows"])

    with fails("SL502", "read a dim or a scalar of the op from sizes, which has 'n', 'absent'"):
        sl.audit(f, checks="numerics", seed=0)


NUMBERS = {
    "float for an int": ({"k": 4 / 2}, "write // in place of / where a division makes the number, or int(v)"),
    "a float of NumPy for an int": ({"k": np.float64(2.5)}, "write // in place of /"),
    "a narrow float of NumPy for an int": ({"k": np.float32(2.5)}, "write // in place of /"),
    "an array for an int": ({"k": np.array(2.5)}, "write // in place of /"),
    "an array for a float": ({"s": np.ones(2)}, "a.item() of an array a with one element. If s is to be several"),
    "an array for a bool": ({"b": np.ones(2, bool)}, "a.item() of an array a"),
    "a float of NumPy in a list": ({"ks": [1, np.float32(2.5)]}, "write // in place of /"),
    "an array for a list": ({"ks": np.ones(2, "int64")}, "such as v.tolist() of the ndarray v"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_call_with_something_else_than_a_number(ns, name):
    """torch itself cuts a NumPy float32 off to an int, without a warning."""

    @sl.op(f"{ns}::f")
    def f(x: V, k: int = 1, s: float = 1.0, b: bool = True, ks: list[int] = [1]) -> V:  # noqa: B006
        return x * k * s * ks[0]

    given, fix = NUMBERS[name]
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        with fails("SL209", fix, where=f"{ns}::f, argument '{next(iter(given))}'"):
            f(x, **given)
    if "k" in given:
        with fails("SL209", fix):
            f(torch.ones(3), *given.values())
    integers = {"k": np.int32(1), "s": np.float32(1), "b": np.True_, "ks": [np.int64(1)]}
    assert f(torch.ones(3), **integers).tolist() == [1.0] * 3


def test_a_call_that_native_code_records_with_something_else_than_an_int(ns):
    @sl.op(f"{ns}::f")
    def f(x: V, k: int = 1, ks: list[int] = [1]) -> V:  # noqa: B006
        return x * k * ks[0]

    record = compile_native_record(f.spec, lambda x, k, ks: (k, ks))
    x = torch.ones(3, requires_grad=True)
    for values in ((np.float32(2.5),), (torch.tensor(2.5),), (1, [1, np.float32(2.5)]), (1, (torch.tensor(2.5),))):
        with fails("SL209", f"{ns}::f, argument 'k"):
            record(x, *values)
    assert record(x, np.int32(2), [np.int64(3), 4]) == (2, [3, 4])


def test_an_argument_that_is_passed_by_name_alone(ns):
    @sl.op(f"{ns}::f")
    def f(x: V, *, k: int = 1) -> V:
        return x * k

    with fails("SL209", "pass k by its name, as in k=..."):
        f(torch.ones(3), 2)


def test_only_a_size_of_one_is_told_that_it_does_not_broadcast(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + y

    for size, says in ((1, True), (11, False), (2, False)):
        with pytest.raises(sl.ShiplapError) as caught:
            f(torch.ones(3), torch.ones(size))
        assert (caught.value.id, "does not broadcast" in caught.value.fix) == ("SL202", says)


def test_a_result_with_unnamed_dims(ns):
    for dims, fix in (("...", "write *s in place of ..."), ("_", "write s in place of _")):

        def f(x):
            return x

        f.__annotations__ |= {"x": Float[Tensor, dims], "return": Float[Tensor, dims]}
        with fails("SL104", fix):
            sl.op(f"{ns}::f")(f)


@pytest.mark.parametrize("dims", DIMS)
def test_dim_expressions_that_cannot_be_read(ns, dims):
    def f(x: Float[Tensor, "n"]):
        return x

    f.__annotations__["return"] = Float[Tensor, dims]
    with fails("SL105", where=f"{ns}::f, return", fix=DIMS[dims]):
        sl.op(f"{ns}::f")(f)
    f.__annotations__["return"] = Float[Tensor, dims.replace(" ", "").replace("n/2", "n//2")]
    assert sl.op(f"{ns}::f")(f).spec.outputs


@pytest.mark.parametrize("dims", ["...", "*rows c", "_ c", "#n c", "n 2*c", "rows=4 c", "n+1 c", "max(n,c) c"])
def test_dims_with_blanks_between_them(ns, dims):
    def f(like: Float[Tensor, "n c"], x) -> None:
        x.zero_()

    f.__annotations__["x"] = Float[Tensor, dims]
    assert sl.op(f"{ns}::f", mutates="x")(f).spec.args


def test_a_default_of_none_needs_an_optional_argument(ns):
    for kind, fix in ((Float[Tensor, "n"], 'annotate b: Float[Tensor, "n"] | None'), (int, "annotate b: int | None")):

        def f(x: Float[Tensor, "n"], b=None):
            return x

        f.__annotations__ |= {"b": kind, "return": Float[Tensor, "n"]}
        with fails("SL103", where=f"{ns}::f, argument 'b'", fix=fix):
            sl.op(f"{ns}::f")(f)


def test_memory_of_two_arguments_to_which_the_op_writes(ns):
    """A clone of either argument would lose one of the two writes."""

    @sl.op(f"{ns}::swap", mutates=("a", "b"))
    def swap(a: Float[Tensor, "n"], b: Float[Tensor, "n"]) -> None:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    x, fix = torch.arange(6.0), "pass tensors that share no memory as a and b, since the op writes to both"
    with fails("SL210", fix=fix):
        swap(x[:4], x[2:])
    with pytest.raises(RuntimeError, match=fix):  # torch's own error around ours
        torch.compile(swap, backend="eager", fullgraph=True)(x[:4], x[2:])
    swap(x[:3], x[3:])
    assert x.tolist() == [3, 4, 5, 0, 1, 2]


def test_memory_that_a_compiled_graph_shares(ns):
    """A fix is no fix where the caller has done already what it says."""

    @sl.op(f"{ns}::turn", mutates="to")
    def turn(x: Float[Tensor, "n"], to: Float[Tensor, "n"]) -> None:
        to.copy_(x.flip(0))

    x = torch.arange(4.0)
    fix = "pass x.clone() as x, since a write to a clone of to would not reach to"
    with fails("SL210", fix=fix):
        turn(x, x)

    def own(x):
        to = torch.empty_like(x)
        turn(x, to)
        return to

    assert torch.compile(own, backend="aot_eager", fullgraph=True)(x).tolist() == [3, 2, 1, 0]
