"""Buckets: which calls share a choice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.declare.bucket import Bucket, bucket_layout, read_bucket_rule
from shiplap.errors import ShiplapError


@sl.op("bucket::gather", dims={"twice": "2 * n"})
def gather(
    x: Float[Tensor, "*batch n c"], index: Int32[Tensor, "k"], stride: list[int], eps: float = 1e-5, mode: str = "a"
) -> Float[Tensor, "*batch twice c"]:
    return torch.cat([x, x], -2)


def key(x, index, stride=(1, 2), rule=gather.rule, eps=1e-5):
    return rule.key(gather.bind((x, index, list(stride), eps, "a")))


def test_dims_are_rounded_up_scalars_are_exact_floats_do_not_count():
    index = torch.zeros(27, dtype=torch.int32)
    a = key(torch.ones(2, 900, 5), index)
    assert a == ((2,), 1024, 8, 32, (1, 2), "a", "Float=float32", "c,c")
    assert a == key(torch.ones(2, 1000, 7), index, eps=1.0)
    assert a != key(torch.ones(2, 1025, 7), index)
    assert a != key(torch.ones(2, 900, 5), index, (2, 2))
    assert a != key(torch.ones(2, 900, 5).double(), index)
    assert key(torch.ones(2, 0, 1), index)[:3] == ((2,), 0, 1)


def test_the_quick_key_tells_apart_what_the_key_does():
    index = torch.zeros(27, dtype=torch.int32)
    x = torch.ones(2, 900, 5)
    calls = [(x, index, [1, 2], e, m) for e in (0.1, 0.2) for m in "ab"]
    calls += [
        (x[:, :899], index, [1, 2], 0.1, "a"),
        (x.double(), index, [1, 2], 0.1, "a"),
        (x[0], index, [1, 2], 0.1, "a"),
    ]
    calls += [
        (x.transpose(1, 2), index, [1, 2], 0.1, "a"),
        (x, index, [2, 2], 0.1, "a"),
        (x[..., :4], index, [1, 2], 0.1, "a"),
    ]
    bound = [gather.bind(c) for c in calls]
    for a in bound:
        for b in bound:
            assert (gather.rule.key(a) == gather.rule.key(b)) == (gather.rule.quick(a) == gather.rule.quick(b))


def test_the_text_reads_back():
    env = gather.bind((torch.ones(2, 900, 5), torch.zeros(27, dtype=torch.int32), [1, 2], 0.1, "a")).env
    bucket = gather.rule.bucket(env)
    assert str(bucket) == "batch<=(2,), n<=1024, c<=8, k<=32, stride==(1, 2), mode=='a'"
    assert Bucket.parse(str(bucket)) == bucket
    assert Bucket.parse("") == Bucket()


@pytest.mark.parametrize("text", ["n", "n<4", "f(n)<=4", "n<=x", "n<=4; import os", "n<=__import__('os')"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="no bucket"):
        Bucket.parse(text)


BOUND = 1 << 63  # of a size that is rounded up
VALUES = (0, True, None, "a", 1.5, (), (1, "a"), ((1,), None), -BOUND, BOUND)
NO_VALUES = (
    "1e999",
    "-1e999",
    "1j",
    "[1]",
    "b'a'",
    "'\\0'",
    "(1, '\\0')",
    f"{BOUND + 1}",
    f"-{BOUND + 1}",
    "(1, 1e999)",
)


def test_the_values_of_a_bucket_have_bounds():
    for value in VALUES:
        for sign in ("<=", "=="):
            assert Bucket.parse(f"n{sign}{value!r}, m==1").limits == (("n", sign, value), ("m", "==", 1))
    for text in NO_VALUES:
        with pytest.raises(ValueError, match="no bucket"):
            Bucket.parse(f"n<={text}")


def test_the_text_of_a_bucket_has_a_length():
    longest = f"n=='{'a' * 4091}'"
    assert Bucket.parse(longest).limits == (("n", "==", "a" * 4091),)
    with pytest.raises(ValueError, match=rf"^no bucket: {longest[:40]!r}\.\.\.$".replace("'", "[\"']")):
        Bucket.parse(longest + " ")
    with pytest.raises(ValueError, match=r"^no bucket: 'n<= +'$"):
        Bucket.parse("n<=" + " " * 300)


def test_a_key_as_text():
    key_of_call = key(torch.ones(2, 900, 5), torch.zeros(27, dtype=torch.int32))
    limits = "batch<=(2,), n<=1024, c<=8, k<=32, stride==(1, 2), mode=='a'"
    assert gather.rule.text(key_of_call) == f"{limits}, Float=float32"
    assert gather.rule.text((*key_of_call[:-2], "", "c")) == limits
    kinds = "batch: pow2, n: pow2, c: pow2, k: pow2, stride: exact, mode: exact, eps: none"
    assert str(gather.rule) == kinds


def test_where_tensors_are_read_for_a_quick_key(ns):
    @sl.op(f"{ns}::listed")
    def listed(
        k: int, xs: list[Float[Tensor, "n"]], y: Float[Tensor, "n"] | None, z: Float[Tensor, "n"]
    ) -> Float[Tensor, "n"]: ...

    @sl.op(f"{ns}::absent")
    def absent(x: Float[Tensor, "n"], k: int | None) -> Float[Tensor, "n"]: ...

    assert (listed.rule.plain, listed.rule.lists) == (((2, True), (3, False)), True)
    assert (absent.rule.plain, absent.rule.lists) == (((0, False),), True)
    assert (gather.rule.plain, gather.rule.lists) == (((0, False), (1, False)), False)


@given(st.integers(0, 1 << 40))
def test_a_bucket_holds_its_sizes(n):
    bound = gather.rule.values({"n": n})[1]
    assert bound >= n
    assert n == 0 or bound < 2 * n


def test_rules_are_declared_per_dim():
    rule = read_bucket_rule(gather.spec, "exact", {"n": "none", "eps": "exact", "c": "pow2"})
    bucket_key = key(torch.ones(900, 5), torch.zeros(27, dtype=torch.int32), rule=rule)
    assert bucket_key == ((), 8, 27, (1, 2), "a", 1e-5, "Float=float32", "c,c")


def test_a_rule_is_part_of_the_identity_of_the_op(ns):
    @sl.op(f"{ns}::one")
    def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + 1

    before = one.identity
    one.buckets(n="exact")
    assert one.identity != before
    one.buckets()
    assert one.identity == before


def test_what_is_no_rule_is_refused():
    for call in (lambda: gather.buckets("pow3"), lambda: gather.buckets(m="exact"), lambda: gather.buckets(n="near")):
        with pytest.raises(ShiplapError) as caught:
            call()
        assert caught.value.id == "SL115"
        assert "pow2|exact|none for batch, n, c, k, stride, mode, eps" in str(caught.value)


def test_layouts_have_codes():
    x = torch.ones(2, 3, 4, 5)
    codes = bucket_layout([x, None, x.transpose(2, 3), x.to(memory_format=torch.channels_last), x[..., :2], 1.0, "s"])
    assert codes == "c,-,0132,0231,0123+"
    assert bucket_layout([[x, x[0].transpose(0, 1)]]) == "[c,102]"
    assert bucket_layout([[], [1], [None, x], 1, "s", x[:1, :1, :1].expand(2, 3, 4, 5)]) == "[-,c],3012+"
