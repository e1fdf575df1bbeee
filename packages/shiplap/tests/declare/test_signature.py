"""What a declaration says, and what it cannot say."""

import collections.abc
import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Optional

import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.declare.schema import schema_text
from shiplap.declare.signature import read_spec
from shiplap_testing.support import fails

F = Float[Tensor, "n c"]
V = Float[Tensor, "n"]


def test_the_schema_has_every_kind_of_argument(ns):
    @sl.op(f"{ns}::all", mutates=["t"])
    def op(
        x: F,
        t: Int32[Tensor, "n"],
        xs: list[F],
        bias: V | None,
        k: int = 3,
        ks: list[int] = [1, -2],  # noqa: B006
        p: float = 1e-5,
        ps: tuple[float, ...] = (0.5, 1.0),
        flag: bool = True,
        flags: collections.abc.Sequence[bool] = (True,),
        opt: Optional[int] = None,  # noqa: UP045
        *,
        mode: str = 'a"\\b',
        names: typing.List[int] | None = None,  # noqa: UP006
    ) -> tuple[F, Float32[Tensor, ""]]:
        return x.clone(), x.sum()

    text = (
        "all(Tensor x, Tensor(a!) t, Tensor[] xs, Tensor? bias, SymInt k=3, SymInt[] ks=[1, -2], float p=1e-05, "
        "float[] ps=[0.5, 1.0], bool flag=True, bool[] flags=[True], SymInt? opt=None, *, "
        'str mode="a\\"\\\\b", SymInt[]? names=None) -> (Tensor, Tensor)'
    )
    assert schema_text(op.spec) == text
    assert op.overload._schema.arguments[-2].default_value == 'a"\\b'
    assert [o.name for o in op.spec.outputs] == ["out0", "out1"]


@pytest.mark.parametrize(
    "name", ["nocolons", "a::b::c", "a::", "::b", "a b::c", "a::b.c.d", "a::b.None", "1::x", "a::None", "a::é"]
)
def test_names_are_namespace_and_identifier(name):
    with fails("SL101", got=name, expected="namespace::name", where=f"@sl.op({name!r})"):

        @sl.op(name)
        def op(x: F) -> F: ...


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("scaled", 'write @sl.op("mylib::scaled"), with a namespace of your own in place of mylib'),
        (
            "my-lib::scaled",
            "write @sl.op(\"my_lib::scaled\"): a name has only letters, digits and underscores, and no '-'",
        ),
        ("a b::scaled", "write @sl.op(\"a_b::scaled\"): a name has only letters, digits and underscores, and no ' '"),
    ],
)
def test_a_wrong_name_is_answered_by_a_right_one(name, fix):
    with fails("SL101", fix=fix):
        sl.op(name)


def test_an_unannotated_argument(ns):
    with fails("SL102", where=f"{ns}::f, argument 'k'", got="k=3"):

        @sl.op(f"{ns}::f")
        def op(x: F, k=3) -> F: ...


def test_argument_names_are_ascii(ns):
    with fails("SL103", where=f"{ns}::f, argument 'größe'", fix="rename the argument"):

        @sl.op(f"{ns}::f")
        def op(x: F, größe: int) -> F: ...


def test_argument_names_are_not_those_of_generated_code(ns):
    with fails("SL103", where=f"{ns}::f, argument '_env'", fix="rename the argument"):

        @sl.op(f"{ns}::f")
        def op(x: F, _env: float = 1.0) -> F: ...


def test_a_method_is_told_what_to_do(ns):
    with fails("SL102", got="self", fix="declare a function; in a class, put @staticmethod above @sl.op"):

        class Module:
            @sl.op(f"{ns}::f")
            def op(self, x: F) -> F: ...


@pytest.mark.parametrize("target", [staticmethod(lambda x: x), partial(max, 1), Tensor, torch.nn.ReLU()])
def test_what_is_no_function(ns, target):
    with fails(
        "SL103",
        "the decorated object is not a function",
        got=f"a {type(target).__name__}",
        expected="a function defined with def",
    ):
        sl.op(f"{ns}::f")(target)


@pytest.mark.parametrize(
    ("declare", "id", "where", "fix"),
    [
        (sl.op, "SL101", "@sl.op", 'write the decorator with a name, as in @sl.op("mylib::op")'),
        (sl.adopt, "SL142", "@sl.adopt", 'the name of the op that op describes, as in @sl.adopt("aten::relu")'),
    ],
)
def test_the_parentheses_are_missing(declare, id, where, fix):
    with fails(id, fix, where=where, got="no name, but the function op"):

        @declare
        def op(x: F) -> F: ...


EXPRESSIONS = {
    "n == 1 or n == 3": ("where(n == 1, 1, n == 3)", {1: True, 2: False, 3: True}),
    "not n == 1": ("n != 1", {1: False, 2: True}),
    "n**2 < 9": ("n*n < 9", {2: True, 3: False}),
    "n > 1 if n < 3 else n > 4": ("where(n < 3, n > 1, n > 4)", {1: False, 2: True, 3: False, 5: True}),
}


@pytest.mark.parametrize("condition", EXPRESSIONS)
def test_syntax_that_expressions_do_not_have_is_written_otherwise(ns, condition):
    """The fix shows the form, and that form holds for the same sizes."""
    written, holds = EXPRESSIONS[condition]
    fixes = {"or": "where(a, 1, b)", "not": "opposite comparison", "if": "where(condition, a, b)", "**": "n*n"}
    with fails("SL105", next(fix for word, fix in fixes.items() if word in condition), where=f"{ns}::f, requires"):
        sl.op(f"{ns}::f", requires=condition)(identity)
    op = sl.op(f"{ns}::f", requires=written)(identity)
    for size, right in holds.items():
        if right:
            assert op(torch.ones(size)).shape == (size,)
        else:
            with fails("SL208"):
                op(torch.ones(size))


def identity(x: V) -> V:
    return x.clone()


def test_a_dim_of_an_argument_that_nothing_gives(ns):
    def f(values: V, offsets: Int64[Tensor, "rows+1"]) -> Float[Tensor, "rows"]:
        return values[:1].expand(len(offsets) - 1).clone()

    with fails(
        "SL105",
        "as in e in place of rows+1, and compute the others from it, as in e-1",
        "or correct it to one of ",
        got="rows+1 uses 'rows'",
    ):
        sl.op(f"{ns}::f")(f)
    f.__annotations__ |= {"offsets": Int64[Tensor, "e"], "return": Float[Tensor, "e-1"]}
    assert sl.op(f"{ns}::f")(f)(torch.ones(2), torch.zeros(4, dtype=torch.int64)).shape == (3,)


def test_a_keyword_only_argument_may_be_called_keys(ns):
    @sl.op(f"{ns}::f")
    def op(x: F, *, keys: int = 1) -> F:
        return x * keys

    x = torch.ones(2, 2, requires_grad=True)
    assert torch.equal(op(x, keys=3), torch.full((2, 2), 3.0))


def test_an_annotation_that_cannot_be_evaluated(ns):
    with fails("SL102", "name 'Nowhere' is not defined", fix="import the name at run time, at module level"):

        @sl.op(f"{ns}::f")
        def op(x: "Nowhere") -> F: ...

    with fails("SL102", fix="write Float in place of Flota, or import the name at run time, at module level"):

        @sl.op(f"{ns}::f")
        def misspelt(x: "Flota[Tensor, 'n']") -> F: ...


@dataclasses.dataclass
class Config:
    stride: int
    pad: int


class Pair(NamedTuple):
    low: int
    high: int


@pytest.mark.parametrize(
    ("annotation", "got", "fix"),
    [
        (Config, "Config", "pass the fields as separate arguments: stride, pad"),
        (Optional[Config], "Config", "stride, pad"),  # noqa: UP045
        (Pair, "Pair", "pass the fields as separate arguments: low, high"),
        (Callable[[Tensor], Tensor], "Callable", "call the function outside the op and pass its result"),
        (typing.Callable, "Callable", "call the function outside the op and pass its result"),
        (dict[str, int], "dict[str, int]", "pass the entries as separate arguments"),
        (dict, "dict", "pass the entries as separate arguments"),
        (Tensor, "Tensor", 'say the dtype and dims: Float[Tensor, "n c"]'),
        (int | str, "int | str", "pass each field that the op reads as an argument"),
        (set[int], "set[int]", "pass each field that the op reads as an argument"),
        (tuple[int, str], "tuple[int, str]", "pass each field that the op reads as an argument"),
        (tuple[F, V], "tuple", "pass each field that the op reads as an argument"),
        (bytes, "bytes", "pass each field that the op reads as an argument"),
        (typing.Any, "Any", "pass each field that the op reads as an argument"),
    ],
)
def test_types_a_schema_cannot_carry_say_how_to_split_them(ns, annotation, got, fix):
    def fn(x: F, a) -> F: ...

    fn.__annotations__["a"] = annotation
    with fails("SL103", fix, got, where=f"{ns}::f, argument 'a'"):
        sl.op(f"{ns}::f")(fn)


def test_star_arguments(ns):
    with fails("SL103", got="*xs: int", fix="name each argument"):

        @sl.op(f"{ns}::f")
        def star(x: F, *xs: int) -> F: ...


@pytest.mark.parametrize(
    ("annotation", "default", "expected"),
    [
        (float, float("inf"), "a finite number"),
        (list[float], [float("nan")], "a finite number"),
        (int, "one", "a default of type int"),
        (int, None, "a default of type int"),
        (int | None, "x", "a default of type int or None"),
        (F, None, "a default of type None"),
        (F | None, torch.zeros(1), "None"),
    ],
)
def test_defaults_that_a_schema_cannot_carry(ns, annotation, default, expected):
    def fn(x: F, a=default) -> F: ...

    fn.__annotations__["a"] = annotation
    with fails("SL103", expected=expected):
        sl.op(f"{ns}::f")(fn)


def test_an_output_dim_that_nothing_determines(ns):
    with fails("SL104", where=f"{ns}::f, output 'out', dim 'm'", got="m", expected="one of n"):

        @sl.op(f"{ns}::f")
        def op(x: V) -> Float[Tensor, "m"]: ...

    for annotation in (Float[Tensor, "_"], Float[Tensor, "..."], Float[Tensor, "*batch"]):
        with fails("SL104"):
            fn = lambda x, y=None: x  # noqa: E731
            fn.__annotations__ = {"x": Float[Tensor, "..."], "y": V | None, "return": annotation}
            sl.op(f"{ns}::g")(fn)


def test_dims_of_an_optional_tensor_determine_nothing(ns):
    with fails("SL104", got="m"):

        @sl.op(f"{ns}::f")
        def op(x: V, y: Float[Tensor, "m"] | None = None) -> Float[Tensor, "m"]: ...


@pytest.mark.parametrize(
    ("bounds", "got"),
    [
        ({"n": "n"}, "a dim that the inputs determine"),
        ({"m": "n", "q": "n"}, "a dim that is no output's size"),
    ],
)
def test_bounds_are_for_dims_that_only_outputs_have(ns, bounds, got):
    with fails("SL104", got=got):

        @sl.op(f"{ns}::f", bounds=bounds)
        def op(x: V) -> Float[Tensor, "m"]: ...


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("n ** 2", "an expression without Pow"),
        ("n.size", "an expression without 'n.size'"),
        ("__import__('os')", "an expression without \"__import__('os')\""),
        ("n / 2", "an expression without Div"),
        ("n if n else 1", "an expression without 'n if n else 1'"),
        ("1.5 * n", "an expression without '1.5'"),
        ("max(n, key=n)", "an expression without 'max(n, key=n)'"),
    ],
)
def test_expressions_outside_the_language(ns, expr, expected):
    with fails("SL105", expected=expected, where=f"{ns}::f, dims['m']"):

        @sl.op(f"{ns}::f", dims={"m": expr})
        def op(x: V) -> Float[Tensor, "m"]: ...


def test_a_condition_on_sizes_is_no_size(ns):
    """Authors write ``dims={"c": "g*k"}`` for columns that g divides."""
    add = "add `k: int` to the arguments of the function, or correct it to one of"
    fix = f'{add} g, n. A condition, such as that g divides c, is no size: write requires="c % g == 0"'
    with fails("SL105", got="g*k uses 'k'", fix=fix):

        @sl.op(f"{ns}::f", dims={"c": "g*k"})
        def op(x: Float[Tensor, "n c"], g: int) -> Float[Tensor, "n c"]: ...

    with fails("SL105", got="n % k == 0 uses 'k'", fix=f"{add} n"):

        @sl.op(f"{ns}::f", requires="n % k == 0")
        def second(x: V) -> V: ...

    with fails("SL105", "annotate k as int, or correct it to one of n", got="k uses 'k'"):

        @sl.op(f"{ns}::f", dims={"m": "k"})
        def third(x: V, k: float) -> Float[Tensor, "m"]: ...


@pytest.mark.parametrize("expr", ["n +", ""])
def test_what_is_no_expression(ns, expr):
    with fails("SL105", got=f"{expr!r}: invalid syntax", expected="an expression, such as 2*n+1"):

        @sl.op(f"{ns}::f", dims={"m": expr})
        def op(x: V) -> Float[Tensor, "m"]: ...


@pytest.mark.parametrize(
    ("keywords", "got"),
    [
        ({"dims": {"m": "q"}}, "q uses 'q'"),
        ({"dims": {"m": "m + 1"}}, "m + 1 uses 'm'"),
        ({"dims": {"m": "k2", "k2": "n"}}, "k2 uses 'k2'"),  # in order, so that none is used before it is known
        ({"dims": {"m": "p"}}, "p uses 'p'"),  # a float
        ({"dims": {"m": "o"}}, "o uses 'o'"),  # may be None
        ({"dims": {"m": "n"}, "requires": "q > 0"}, "q > 0 uses 'q'"),
        ({"bounds": {"m": "q"}}, "q uses 'q'"),
    ],
)
def test_expressions_use_known_names(ns, keywords, got):
    with fails("SL105", got=got):

        @sl.op(f"{ns}::f", **keywords)
        def op(x: V, p: float = 1.0, o: int | None = None) -> Float[Tensor, "m"]: ...


def test_a_dim_expression_of_an_input_uses_known_names(ns):
    with fails("SL105", where=f"{ns}::f, argument 'x'", got="2*q uses 'q'"):

        @sl.op(f"{ns}::f")
        def op(x: Float[Tensor, "2*q"]) -> Float[Tensor, "3"]: ...


def test_one_name_is_one_dim_or_many(ns):
    with fails("SL105", got="'b' as one dim and as *b"):

        @sl.op(f"{ns}::f")
        def op(x: Float[Tensor, "*b"], y: Float[Tensor, "b"]) -> Float[Tensor, "3"]: ...

    with fails("SL105", expected="at most one variadic dim"):
        fn = lambda x: x  # noqa: E731
        two = Float[Tensor, "*a n"]
        two.dim_str = "*a n *b"  # jaxtyping itself refuses to write it
        fn.__annotations__ = {"x": two, "return": V}
        sl.op(f"{ns}::g")(fn)


def test_an_output_dtype_that_nothing_determines(ns):
    with fails("SL106", where=f"{ns}::f, output 'out'", got="Float", expected="one of ['Int']"):

        @sl.op(f"{ns}::f")
        def op(x: Int[Tensor, "n"], y: V | None = None) -> V: ...


@pytest.mark.parametrize(("mutates", "got"), [("y", "y"), (("k",), "not a tensor")])
def test_mutated_arguments_are_tensors(ns, mutates, got):
    with fails("SL107", got=got):

        @sl.op(f"{ns}::f", mutates=mutates)
        def op(x: V, xs: list[V], k: int) -> None: ...


def test_the_name_of_another_function_is_taken(ns):
    def first(x: V) -> V: ...
    def second(x: V) -> V: ...

    sl.op(f"{ns}::f")(first)
    with fails("SL108", "test_signature.test_the_name_of_another_function_is_taken.<locals>.second", where=f"{ns}::f"):
        sl.op(f"{ns}::f")(second)


def test_the_name_of_an_op_of_another_library_is_taken(ns):
    def f(x: V) -> V: ...

    torch.library.define(f"{ns}::f", "(Tensor x) -> Tensor")
    for _ in range(2):  # a second try must not replace the op of the library
        with fails("SL108", "an op that other code has registered with torch", where=f"{ns}::f"):
            sl.op(f"{ns}::f")(f)
    sl.op(f"{ns}::f.mine")(f)


@pytest.mark.parametrize(
    "annotation", [None, Tensor, dict, list[V | None], tuple[V, dict], list[V] | None, typing.Any, "missing"]
)
def test_results_that_no_schema_has(ns, annotation):
    fn = lambda x: x  # noqa: E731
    fn.__annotations__ = {"x": V} if annotation == "missing" else {"x": V, "return": annotation}
    with fails("SL109", where=f"{ns}::f, return"):
        sl.op(f"{ns}::f")(fn)


@pytest.mark.parametrize(
    "outputs",
    [("a",), ("a", "a"), ("a", "x"), ("a", "b c"), ("a", "b", "c"), ("a", "class"), ("a", "größe"), ("a", "workspace")],
)
def test_output_names(ns, outputs):
    with fails("SL109"):

        @sl.op(f"{ns}::f", outputs=outputs)
        def op(x: V) -> tuple[V, V]: ...


def test_an_argument_named_as_the_default_output(ns):
    with fails("SL109", got="output name 'out'", fix='give outputs=("name", ...)'):

        @sl.op(f"{ns}::f")
        def op(x: V, out: V) -> V: ...


def test_unknown_autocast_rule(ns):
    with fails("SL112", got="'half'", expected="'widest', 'autocast', 'float32', None"):

        @sl.op(f"{ns}::f", autocast="half")
        def op(x: V) -> V: ...


def test_specs_are_values(ns):
    def fn(x: Shaped[Tensor, "*b n=4 _ 3"], y: Bool[Tensor, "..."]) -> Shaped[Tensor, "*b 2*n"]:
        """Doc."""

    fn.__annotations__["x"] = Shaped[Tensor, "*b n _ 3"]
    a, b = sl.op(f"{ns}::f")(fn).spec, sl.op(f"{ns}::f")(fn).spec
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest == b.digest
    assert str(a.args[0].tensor) == 'Shaped[Tensor, "*b n _ 3"]'
    assert [d.kind for d in a.args[0].tensor.dims] == ["variadic", "name", "any", "fixed"]
    assert a.args[0].tensor.dtypes == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.name = "other"


def test_a_documented_size_is_fixed(ns):
    @sl.op(f"{ns}::f")
    def op(x: Float[Tensor, "rows=4 n"]) -> Float[Tensor, "n"]:
        return x.sum(0)

    assert op.spec.args[0].tensor.dims[0].size == 4
    with fails("SL203", got="size 3 in axis 0", expected="4"):
        op(torch.zeros(3, 2))


def test_a_string_is_one_name(ns):
    @sl.op(f"{ns}::f", mutates="table", contiguous="table", outputs="found", requires="n >= 1")
    def op(table: V) -> V: ...

    assert op.spec.mutated == ("table",)
    assert op.spec.outputs[0].name == "found"
    assert len(op.spec.requires) == 1


@pytest.mark.parametrize("tolerance", [(2.0, "too large"), (1e-3, " "), (0, "none"), 1e-3])
def test_sl118_a_tolerance_is_a_small_number_with_a_reason(ns, tolerance):
    with pytest.raises(sl.ShiplapError, match="SL118"):

        @sl.op(f"{ns}::scale", tolerance=tolerance)
        def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return 2 * x


def test_a_declared_tolerance_is_kept_with_its_reason(ns):
    @sl.op(f"{ns}::scale", tolerance=(1e-3, " a table of few digits "))
    def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    assert scale.spec.tolerance == (1e-3, "a table of few digits")


@pytest.mark.parametrize(
    ("attach", "keyword", "meant"),
    [
        (lambda op, **given: op.kernel("cpu", **given), "dtype", "dtypes"),
        (lambda op, **given: op.kernel("cpu", lambda x: x, **given), "config", "configs"),
        (lambda op, **given: op.template("cpu", "x.cpp.jinja", **given), "config", "configs"),
        (lambda op, **given: op.backward(lambda grad, saved, needs: {}, **given), "save", "saves"),
        (lambda op, **given: op.backward(**given), "surogate", "surrogate"),
    ],
)
def test_a_keyword_that_nothing_attached_has(ns, attach, keyword, meant):
    @sl.op(f"{ns}::plain")
    def plain(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x

    with fails("SL140", f"write {meant}=", got=f"{keyword}="):
        attach(plain, **{keyword: ()})


@pytest.mark.parametrize("option", ["mutates", "contiguous", "specialize"])
def test_an_option_that_names_no_argument_is_named(ns, option):
    def plain(x: Float[Tensor, "n"], dim: int) -> Float[Tensor, "n"]:
        return x

    fix = f"write {option}=('dim',)"
    with fails("SL107", f"{option}= names no argument", got="dims", expected="one of x, dim", fix=fix):
        sl.op(f"{ns}::plain", **{option: ("dims",)})(plain)


@pytest.mark.parametrize("declare", [sl.op, sl.adopt])
@pytest.mark.parametrize(
    ("keyword", "fix"),
    [("mutate", "write mutates="), ("library", ""), ("static", ""), ("sizes", ""), ("specialise", "write specialize=")],
)
def test_a_keyword_that_no_declaration_has(declare, keyword, fix):
    with fails("SL140", "reference_is_fast_on", fix, got=f"{keyword}="):
        declare("demo::keyword", **{keyword: ()})


@pytest.mark.parametrize("given", ["cudagraph_unsafe", torch.Tag.pointwise, 5, None, [torch.Tag.cudagraph_unsafe, 1]])
def test_a_tag_that_no_declaration_gives_is_refused(ns, given):
    got, expected = f"tags={given!r}", "torch.Tag.cudagraph_unsafe"
    with fails("SL140", "write tags=(torch.Tag.cudagraph_unsafe,)", got=got, expected=expected):

        @sl.op(f"{ns}::f", tags=given)
        def f(x: F) -> F:
            return x * 2


def test_a_tag_is_part_of_the_declaration(ns):
    def f(x: F) -> F:
        return x * 2

    unsafe = torch.Tag.cudagraph_unsafe
    plain, *tagged = (read_spec(f"{ns}::f", f, tags=tags) for tags in ((), unsafe, [unsafe, unsafe]))
    assert [spec.tags for spec in tagged] == [(unsafe,), (unsafe,)]
    assert plain.digest == read_spec(f"{ns}::f", f).digest != tagged[0].digest == tagged[1].digest
