"""A declaration as data: what follows from its fields, what its digest covers, and its text as a schema of torch."""

from __future__ import annotations

import dataclasses
import enum
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.declare import schema
from shiplap.declare.dim_expression import Expr
from shiplap.declare.kernel import read_strided, require_device_type
from shiplap.declare.sharding_rule import ShardingRule, read_sharding
from shiplap.declare.spec import Arg, Dim, OpSpec, Output, Return, TensorType
from shiplap.declare.value_kinds import is_bool_value, is_float_value, is_int_value, is_scalar_value
from shiplap_testing.support import fails
from tests.test_plan import spec_of

V = Float[Tensor, "n"]
N, FIXED, REST, ANY, HASH = (
    Dim("name", "n"),
    Dim("fixed", "4", 4),
    Dim("variadic", "b"),
    Dim("any", "_"),
    Dim("name", "x_n", of="n"),
)
FLOAT, ONE = TensorType("Float", ("float32", "float64"), (N,)), TensorType("Float32", ("float32",), (N,))


def kinds(*dims: Dim) -> TensorType:
    return TensorType("Float", ("float32",), dims)


def test_the_axes_of_a_type():
    assert kinds(N, FIXED).axes == [(0, N), (1, FIXED)]
    assert kinds(N, REST, FIXED, ANY).axes == [(0, N), (-2, FIXED), (-1, ANY)]
    assert kinds(REST, N).axes == [(-1, N)]
    assert [kinds(*dims).variadic for dims in ((), (N,), (N, REST))] == [False, False, True]
    assert [t.concrete for t in (FLOAT, ONE, TensorType("Shaped", (), ()))] == [False, True, False]
    assert str(kinds(N, FIXED, REST, ANY, HASH, Dim("variadic", "..."))) == 'Float[Tensor, "n 4 *b _ #n ..."]'
    assert [HASH.along(size) for size in (1, 0, 2)] == ["x_n", "n", "n"]
    assert [N.along(size) for size in (1, 2)] == ["n", "n"]


class Mode(enum.Enum):
    UP = "up"
    DOWN = "down"


def test_the_kind_of_an_argument_in_words():
    assert Arg("k", scalar="int").kind == "int"
    assert Arg("k", scalar="object", cls=Mode).kind == "Mode"
    assert Arg("k", scalar="str", choices=("a", "b", "c")).kind == "'a', 'b' or 'c'"
    assert Arg("k", scalar="str", choices=("a",)).kind == "'a'"
    assert Arg("k", scalar="str", choices=("up", "down"), members=Mode).kind == "Mode.UP or Mode.DOWN"
    assert Arg("k", scalar="int").shown_choices == ""
    assert [Arg("k", default=d).has_default for d in (..., None, 0)] == [False, True, True]
    assert Arg("x", tensor=kinds(N, HASH)).broadcasts == {"x_n": "n"}
    assert Arg("k", scalar="int").broadcasts == {}


def test_what_an_argument_adds_to_a_digest():
    plain = Arg("k", scalar="int", optional=True, default=None, keyword_only=True)
    assert plain.form == ""
    forms = [
        dataclasses.replace(plain, **changed).form
        for changed in (
            {"length": 2},
            {"absent": True},
            {"specialized": True},
            {"cls": Mode},
            {"choices": (1, 2)},
            {"choices": (1, 2), "members": Mode},
        )
    ]
    assert len({*forms, ""}) == 7
    assert forms[0] == "k/2/False/False"
    assert forms[3].endswith("Mode")


def spec() -> OpSpec:
    args = (
        Arg("x", FLOAT, mutated=True),
        Arg("y", ONE),
        Arg("k", scalar="int", default=3),
        Arg("g", scalar="Generator", keyword_only=True, optional=True, default=None),
    )
    return OpSpec("lib::f.two", args, (Output("out", ONE), Output("more", FLOAT)))


VIEW, WRITTEN = Return("y", ONE, alias="y"), Return("x", FLOAT, alias="x")
MADE = Return("size", scalar="int")


def test_what_follows_from_a_declaration():
    of = spec()
    assert (of.namespace, of.opname, of.stem) == ("lib", "f.two", "f_two")
    assert [a.name for a in of.tensors] == ["x", "y"]
    assert [a.name for a in of.scalars] == ["k", "g"]
    assert of.dtype_classes == {"Float": FLOAT}
    assert (of.mutated, of.returned, of.view, of.made, of.results) == (("x",), (), False, (), ("out", "more"))
    assert (of.tolerated, of.converts, of.enumerated, of.dynamic) == (0.0, False, {}, {})
    assert dataclasses.replace(of, tolerance=(0.5, "why")).tolerated == 0.5
    assert dataclasses.replace(of, single_tuple=True).converts
    returning = dataclasses.replace(of, returns=(WRITTEN, MADE))
    assert (returning.returned, returning.view, returning.made) == (("x",), False, (MADE,))
    assert returning.results == ("out", "more")
    assert dataclasses.replace(returning, traced=True).results == ("size",)
    assert dataclasses.replace(of, returns=(VIEW,)).view
    assert dataclasses.replace(of, returns=(VIEW,)).returned == ()
    assert [dataclasses.replace(of, random=r).draws for r in ("", "global", "g", "k", "y")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert MADE.arg == Arg("size", scalar="int")


def test_the_arguments_of_a_call():
    of = spec()
    assert of.complete((1, 2)) == (1, 2, 3, None)
    assert of.complete((1,), {"y": 5, "g": 7}) == (1, 5, 3, 7)
    assert of.complete((1, 2, 4, 6)) == (1, 2, 4, 6)
    with pytest.raises(AssertionError, match="no argument 'y'"):
        of.complete((1,))
    assert of.split((1, 2, 3, 4)) == ((1, 2, 3), {"g": 4})


def test_what_the_digest_of_a_declaration_covers():
    of = spec()
    n = Expr.parse("n", "")
    changes = {
        "name": "lib::g",
        "args": of.args[:3],
        "outputs": of.outputs[:1],
        "dims": (("m", n),),
        "bounds": (("m", n),),
        "requires": (n,),
        "autocast": None,
        "tolerance": (0.5, "why"),
        "returns": (VIEW,),
        "traced": True,
        "detached": ("x",),
        "random": "g",
        "unordered": ("out",),
        "single_tuple": True,
        "tags": (torch.Tag.cudagraph_unsafe,),
    }
    digests = {name: dataclasses.replace(of, **{name: value}).digest for name, value in changes.items()}
    assert len({of.digest, *digests.values()}) == len(changes) + 1
    assert len(of.digest) == 16
    same = {"doc": "text", "reference_is_fast_on": ("cpu",)}
    assert {dataclasses.replace(of, **{name: value}).digest for name, value in same.items()} == {of.digest}
    broadcasting = dataclasses.replace(of, args=(Arg("x", kinds(HASH)), *of.args[1:]))
    other = dataclasses.replace(of, args=(Arg("x", kinds(dataclasses.replace(HASH, of="m"))), *of.args[1:]))
    assert broadcasting.digest != other.digest


def test_digests_of_earlier_releases_stay_valid():
    """Stored choices and compiled libraries are found by them."""
    x, k = Arg("x", kinds(N, FIXED)), Arg("k", scalar="int", default=3)
    plain = OpSpec("lib::f", (x, k), (Output("out", kinds(N)),))
    assert plain.digest == "cd0bf6f3149e965d"
    more = dataclasses.replace(plain, args=(x, dataclasses.replace(k, length=2)), returns=(Return("x", alias="x"),))
    assert more.digest == "c69de3867c8c641d"
    assert repr(Dim("name", "x_n", of="n")) == "Dim(kind='name', text='x_n', size=-1, expr=None)"


def test_what_is_not_declared():
    assert Arg("k") == Arg("k", None, None, False, False, ..., False, False, False, 0, False, False, None, (), None)
    assert Return("r") == Return("r", None, None, False, False, "", False)
    assert Dim("any", "_") == Dim("any", "_", -1, None, "")
    assert OpSpec("a::b", (), ()).traced is OpSpec("a::b", (), ()).single_tuple is False
    assert ShardingRule("declared", (), ()).empty
    assert dataclasses.replace(spec(), doc="text") == spec()


# --- as a schema ------------------------------------------------------------------------------------------------------


def test_the_letters_of_aliases():
    assert [schema._alias_letter(i) for i in (0, 1, 25, 26, 27)] == ["a", "b", "z", "a26", "a27"]
    assert schema.overload_below_autograd("lib::f") == "lib::f.raw"
    assert schema.overload_below_autograd("lib::f.two", "writes") == "lib::f.two_writes"


def test_the_schema_of_a_gradient():
    def one(x: V, k: int, b: bool | None) -> V: ...
    def two(x: V, ys: list[V], k: list[int]) -> V: ...

    rest = "Tensor?[] results, Tensor[] gradients, bool[] needs, int[] shapes"
    assert schema.gradient_schema(spec_of(one), "g") == f"g(Tensor? a0, SymInt a1, bool? a2, {rest}) -> Tensor?"
    assert (
        schema.gradient_schema(spec_of(two), "g")
        == f"g(Tensor? a0, Tensor[]? a1, SymInt[] a2, {rest}) -> (Tensor?, Tensor?)"
    )


def test_a_schema_with_all_that_it_may_have():
    def f(
        x: V,
        ys: list[V],
        zs: list[V | None] | None,
        w: Float32[Tensor, "2"] | None = None,
        pair: tuple[int, int] = (1, 2),
        *,
        way: str = 'a"é',
        flags: list[bool] | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        layout: torch.layout = torch.strided,
        form: torch.memory_format = torch.channels_last,
    ) -> V: ...

    text = schema.schema_text(spec_of(f, mutates=("x", "ys"), specialize=("pair",)), "name")
    assert text == (
        "name(Tensor(a!) x, Tensor(b!)[] ys, Tensor?[]? zs, Tensor? w=None, int[2] pair=[1, 2], *, "
        'str way="a\\"é", bool[]? flags=None, ScalarType dtype=5, Device device="cpu", Layout layout=0, '
        "MemoryFormat form=2) -> Tensor"
    )
    assert schema.public_schema(spec_of(f, mutates=("x", "ys"), specialize=("pair",)), "name") == text


def test_the_tags_of_an_op():
    def f(x: V, y: V) -> V: ...
    def sized(x: V) -> Float[Tensor, "m"]: ...

    tag = torch.Tag
    tags = {
        (): spec_of(f),
        (tag.needs_exact_strides,): spec_of(f, contiguous=("y",)),
        (tag.cudagraph_unsafe, tag.needs_exact_strides): spec_of(f, contiguous=("y",), tags=tag.cudagraph_unsafe),
        (tag.cudagraph_unsafe, tag.dynamic_output_shape): spec_of(
            sized, bounds={"m": "n"}, tags=[tag.cudagraph_unsafe]
        ),
        (tag.dynamic_output_shape, tag.cudagraph_unsafe): spec_of(sized, bounds={"m": "n"}),
        (tag.nondeterministic_seeded,): spec_of(f, random="global"),
    }
    for more, of in tags.items():
        assert schema.dispatcher_tags(of) == (tag.pt2_compliant_tag, *more)
    assert schema.dispatcher_tags(spec_of(f, mutates=("y",)))[1:] == (tag.needs_exact_strides,)


def test_defaults_that_the_language_of_schemas_has():
    literals = (torch.float32, torch.device("cpu"), torch.strided, torch.sparse_coo, torch.preserve_format)
    assert all(map(schema.has_default_literal, literals))
    assert not any(map(schema.has_default_literal, (torch.sparse_csr, torch.bits8, "cpu")))


# --- other parts of a declaration -------------------------------------------------------------------------------------


def test_a_sharding_in_words():
    rule = ShardingRule("declared", (("a", 1), ("b", "whole")), ("sum", 0))
    assert str(rule) == "declared: a cut along 1, b whole → sum, cut along 0"


def test_shardings_that_no_tensor_has():
    def f(a: Float[Tensor, "n k"], b: Float[Tensor, "... k"], s: int) -> V: ...
    def listed(xs: list[V]) -> V: ...

    of = spec_of(f)
    assert read_sharding(of, {"b": 5}, 0) == ShardingRule("declared", (("a", "whole"), ("b", 5)), (0,))
    assert read_sharding(of, {"a": 1}, ["sum"]).inputs == (("a", 1), ("b", "whole"))
    for inputs, outputs, got in (
        (["a"], 0, r"\['a'\]"),
        ({"s": 0}, 0, "'s'"),
        ({}, (0, 1), "parts of 2 outputs"),
        ({"a": 2}, 0, "2"),
        ({"a": -1}, 0, "-1"),
        ({"a": True}, 0, "True"),
        ({"a": "mean"}, 0, "'mean'"),
        ({}, 1, "1"),
        ({}, None, "None"),
    ):
        with pytest.raises(sl.ShiplapError, match=rf"SL218(?s:.*)got +{got}\n"):
            read_sharding(of, inputs, outputs)
    for other in (spec_of(listed), spec_of(f, mutates=("a",))):
        with fails("SL218", got="an op that writes to its arguments, or takes lists of tensors"):
            read_sharding(other, {}, 0)


def test_tensors_that_a_kernel_takes_with_any_strides():
    def f(x: V, k: int, y: V) -> V: ...

    of = spec_of(f)
    for given, names in ((True, "xy"), (False, ""), ((), ""), ("y", "y"), (["x", "y"], "xy"), (("x",), "x")):
        assert read_strided(of, "kernel k", given) == frozenset(names)
    with fails("SL122", where="plan::op, kernel k", got="strided='k'", expected="names among x, y"):
        read_strided(of, "kernel k", ["x", "k"])


@pytest.mark.parametrize(
    ("device", "got", "fix"),
    [
        (torch.device("cuda", 1), "device(type='cuda', index=1)", 'write @op.kernel("cuda")'),
        (3, "a int as the device type", ""),
        (len, "a builtin_function_or_method as the device type", 'write @op.kernel("cpu")'),
        ("GPU", "the device type 'GPU'", 'write @op.kernel("cuda")'),
        ("rocm", "the device type 'rocm'", 'write @op.kernel("cuda")'),
        ("CPUs", "the device type 'CPUs'", 'write @op.kernel("cpu")'),
        ("qqqq", "the device type 'qqqq'", "import the package of the device before the kernel is bound"),
    ],
)
def test_devices_that_do_not_exist(device, got, fix):
    with fails("SL122", where="lib::f, kernel", got=got) as caught:
        require_device_type(SimpleNamespace(name="lib::f"), device)
    if fix:
        assert caught.value.fix == fix
    for known in ("cpu", "cuda:1", "meta"):
        require_device_type(SimpleNamespace(name="lib::f"), known)


class Indexed:
    def __index__(self) -> int:
        return 3


class Floated:
    def __float__(self) -> float:
        return 0.5


class Wrong:
    def __index__(self) -> int:
        raise RuntimeError

    __float__ = __index__


def test_objects_that_convert_to_numbers():
    values = (
        Indexed(),
        Floated(),
        Wrong(),
        True,
        1,
        0.5,
        1j,
        "1",
        b"1",
        None,
        torch.ones(1),
        torch.ones(2),
        torch.ones(()),
    )
    found = {f.__name__: [v for v in values if f(v)] for f in (is_int_value, is_float_value, is_bool_value)}
    assert found["is_int_value"] == [values[0], True, 1, values[-1]]
    assert len(found["is_float_value"]) == 7
    assert found["is_float_value"][:5] == [*values[:2], True, 1, 0.5]
    assert found["is_bool_value"] == [True]
    assert [v for v in values if is_scalar_value(v)] == [*values[:2], True, 1, 0.5, 1j]


def test_sizes_of_the_inputs_that_outputs_may_have():
    def listed(
        xs: list[Shaped[Tensor, "a *b"]], y: Int32[Tensor, "c"] | None, k: int, j: int | None, f: float
    ) -> Float32[Tensor, "n"]: ...

    with fails("SL104", where="plan::op, output 'out', dim 'n'", expected="one of a, b, k"):
        spec_of(listed)


class Plan(sl.Opaque, fields="a"):
    """An object."""


class Longer(Plan, fields=("a", "b")):
    """One that adds a field."""


def test_fields_are_inherited_once():
    assert (sl.Opaque.fields, Plan.fields, Longer.fields) == ((), ("a",), ("a", "b"))
