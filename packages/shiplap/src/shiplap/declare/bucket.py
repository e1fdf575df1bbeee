"""Buckets, which are classes of calls that share one tuned choice, by size, dtype and memory layout.

A rule treats each free dim and scalar in one of three ways. ``"pow2"`` rounds it up to a power of two (the default for
dims), ``"exact"`` keeps it (the default for integer scalars) and ``"none"`` ignores it (the default for floats).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare.binding import Binding
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Env, EnvValue, Value
from shiplap.errors import error

KINDS = ("pow2", "exact", "none")
LONGEST_BUCKET_VALUE = 4096  # characters of a bucket as text
Key: TypeAlias = tuple[Hashable, ...]  # values of a bucket, then dtypes and layout as text


@dataclass(frozen=True)
class Bucket:
    """A class of calls that share one tuned choice.

    ``limits`` holds conditions on sizes and scalars as ``(name, sign, value)``. The sign ``<=`` stands for an upper
    bound, and ``==`` for an exact value. A bucket is printed as ``n<=4096, k==27``, which :meth:`parse` reads.
    """

    limits: tuple[tuple[str, str, Hashable], ...] = ()

    def __str__(self) -> str:
        """Return the limits of the bucket as text that :meth:`parse` reads, such as ``n<=64, k==3``."""
        return ", ".join(f"{name}{op}{value!r}" for name, op, value in self.limits)

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """Return the bucket, a class of calls that share a tuned choice, that prints as ``text``, such as ``n<=64,
        k==3``. Raise ``ValueError`` if ``text`` is no such list of limits, or has more than
        ``LONGEST_BUCKET_VALUE`` characters.
        """
        # The text may come from a file, so the parser is not called on one of any length.
        if len(text) > LONGEST_BUCKET_VALUE:
            raise ValueError(f"no bucket: {text[:40]!r}...")
        try:
            parsed = ast.parse(f"[{text}]", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:  # all of the parser, for nested or odd text
            raise ValueError(f"no bucket: {text[:200]!r}") from e
        limits = [_read_size_limit(node) for node in parsed.elts] if isinstance(parsed, ast.List) else [None]
        if None in limits:
            raise ValueError(f"no bucket: {text[:200]!r}")
        return cls(tuple(limit for limit in limits if limit is not None))


def _read_size_limit(node: ast.expr) -> tuple[str, str, Hashable] | None:
    """Return a parsed ``name<=value`` or ``name==value`` as ``(name, sign, value)``. Return None for any other
    expression.
    """
    match node:
        case ast.Compare(ast.Name(name), [ast.LtE() | ast.Eq() as sign], [value]):
            try:
                limit = ast.literal_eval(value)
            except (TypeError, ValueError, RecursionError):
                return None
            return (name, "<=" if isinstance(sign, ast.LtE) else "==", limit) if _is_bounded_value(limit) else None
    return None


def _is_bounded_value(value: object) -> bool:
    """Return whether a size or a scalar of a call can have this value. It can be None, a bool, an integer of 64 bits, a
    finite float, a string without null characters, or a tuple of these.
    """
    if isinstance(value, tuple):
        return all(map(_is_bounded_value, value))
    if isinstance(value, int):
        return -(1 << 63) <= value <= 1 << 63  # a bound is rounded up
    if isinstance(value, str):
        return "\0" not in value
    return value is None or (isinstance(value, float) and math.isfinite(value))


@dataclass(frozen=True)
class BucketRule:
    """The rule that sorts the calls of one op into buckets.

    Attributes:
        kinds: pairs of the name of a dim or scalar and its kind, in declared order. For ``"pow2"``, values are
            rounded up to a power of two. For ``"exact"``, they are not rounded. For ``"none"``, they do not matter.
        classes: the dtype classes of the op, which are annotations that admit several dtypes.
        plain: pairs of the position of each single tensor argument and whether it is optional.
        lists: whether the op has lists of tensors or optional scalars.
    """

    kinds: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    plain: tuple[tuple[int, bool], ...] = ()
    lists: bool = False

    @cached_property
    def quick(self) -> Callable[[Binding], Key]:
        """A generated function that returns the bucket of a call as one flat tuple. It is faster than :meth:`key`.

        The tuple holds the device type, the rounded sizes and scalars, and the dtypes. It then holds whether each
        optional tensor is None, and the code of the memory layouts. Calls with equal tuples share a tuned choice.
        """
        sizes = [f"_round(e.get({n!r}))" if pow2 else f"_plain(e.get({n!r}))" for n, pow2 in self._get]
        # The source has no loops, since it runs in each eager call for which choices are looked up.
        whole = [
            f"(a[{i}] is None or a[{i}].is_contiguous())" if o else f"a[{i}].is_contiguous()" for i, o in self.plain
        ]
        absent = [f"a[{i}] is None" for i, optional in self.plain if optional]
        layout = "layout_of(a)" if self.lists else f"'' if {' and '.join(whole) or 'True'} else layout_of(a)"
        parts = [*sizes, *(f"d.get({c!r})" for c in self.classes), *absent, layout]
        text = (
            f"lambda call: (lambda e, d, a: (call.device.type, {', '.join(parts)}))(call.env, call.dtypes, call.args)"
        )
        quick: Callable[[Binding], Key] = eval(
            text, {"_round": _round_up_pow2, "_plain": _plain_key_value, "layout_of": bucket_layout}
        )
        return quick

    def bucket(self, env: Env) -> Bucket:
        """Return the bucket of a call with the sizes and scalars ``env``, a ``Bucket`` that prints as ``n<=64, k==3``.
        Calls in one bucket share a tuned choice.
        """
        values = self.values(env)
        named = [(n, k) for n, k in self.kinds if k != "none"]
        return Bucket(tuple((n, "<=" if k == "pow2" else "==", v) for (n, k), v in zip(named, values, strict=True)))

    @cached_property
    def _get(self) -> list[tuple[str, bool]]:
        """The names of the sizes and scalars that buckets distinguish, as pairs ``(name, rounded)``. If ``rounded`` is
        true, the value is rounded up to a power of two.
        """
        return [(name, kind == "pow2") for name, kind in self.kinds if kind != "none"]

    def values(self, env: Env) -> Key:
        """Return the values in ``env`` of the sizes and scalars that buckets distinguish, in declared order and without
        names. Those of the kind ``"pow2"`` are rounded up to a power of two.
        """
        return tuple(
            [_round_up_pow2(env.get(name)) if pow2 else _plain_key_value(env.get(name)) for name, pow2 in self._get]
        )

    def key(self, call: Binding) -> Key:
        """Return the bucket of a call as one tuple. It holds the rounded sizes and scalars, then the dtypes and the
        memory layouts as one string each. Calls with equal tuples share a tuned choice.
        """
        return (*self.values(call.env), bucket_dtypes(self, call), bucket_layout(call.args))

    def text(self, key: Key) -> str:
        """Return the sizes and dtypes in ``key``, a result of :meth:`key`, as text, such as ``n<=64, k==3,
        Float=float16``.
        """
        limits = [f"{n}{'<=' if pow2 else '=='}{v!r}" for (n, pow2), v in zip(self._get, key[:-2], strict=True)]
        return ", ".join([*limits, *([str(key[-2])] if key[-2] else [])])

    def __str__(self) -> str:
        """Return the names with the kind of their bucket, such as ``n: pow2, k: exact``."""
        return ", ".join(f"{name}: {kind}" for name, kind in self.kinds)


def _round_up_pow2(size: EnvValue) -> Hashable:
    """Return a size rounded up to a power of two, or 0 for a size below 1. For a list of sizes, return a tuple of the
    rounded sizes. Any other value is returned unchanged.
    """
    if type(size) is int:
        return 1 << (size - 1).bit_length() if size > 0 else 0
    return tuple(map(_round_up_pow2, size)) if isinstance(size, (tuple, list)) else size


def _plain_key_value(value: EnvValue) -> Hashable:
    """Return ``value`` in a type that can be hashed. A list becomes a tuple, and any other value is returned
    unchanged.
    """
    return tuple(value) if isinstance(value, list) else value


def bucket_dtypes(rule: BucketRule, call: Binding) -> str:
    """Return the dtype of each dtype class of the call as text, such as ``Float=float16, Int=int32``. A dtype class is
    an annotation that admits several dtypes.
    """
    dtypes = call.dtypes
    return ", ".join([f"{c}={str(dtypes[c])[6:]}" for c in rule.classes if c in dtypes])


def bucket_layout(args: Sequence[Value]) -> str:
    """Return one string with the codes of the memory layouts of ``args``, separated by commas.

    The code is ``c`` for a contiguous tensor and ``-`` for None. For any other tensor it is the order of its dims in
    memory, followed by ``+`` if there are gaps. For a list of tensors, the codes of the members stand in brackets.
    Other arguments have no code.
    """
    tensors = [v for v in args if v is None or isinstance(v, Tensor) or _has_tensors(v)]
    return ",".join(map(_layout_code, tensors))


def _layout_code(value: Value) -> str:
    """Return the code of the memory layout of ``value``. It is ``c`` for a contiguous tensor, and for any other tensor
    the order of its dims in memory. For a list, return the codes of its members in brackets. Return ``-`` for any other
    value.
    """
    if isinstance(value, Tensor):
        return "c" if value.is_contiguous() else _dim_order_code(value)
    return f"[{','.join(map(_layout_code, value))}]" if isinstance(value, (list, tuple)) else "-"


def _has_tensors(value: Value) -> bool:
    """Return whether the value is a list or tuple that contains a tensor."""
    return isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)


def _dim_order_code(t: Tensor) -> str:
    """Return the dims of a tensor as digits, from the largest stride to the smallest. An example is ``10`` for a
    transposed matrix. If the tensor is not contiguous in this order of dims, ``+`` follows.
    """
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda d: (-strides[d], d))
    dense = t.permute(order).is_contiguous()
    return "".join(map(str, order)) + ("" if dense else "+")


def read_bucket_rule(spec: OpSpec, default: str = "pow2", kinds: Mapping[str, str] | None = None) -> BucketRule:
    """Return the rule by which calls of ``spec`` share tuned choices. Raise ``SL115`` for an unknown name or kind.

    ``kinds`` maps names of dims and scalars to ``"pow2"`` (rounded up to a power of two), ``"exact"`` or ``"none"``
    (not distinguished). Any other dim has the kind ``default``. Any other scalar has the kind ``"exact"``, or
    ``"none"`` if it is a float or an object.
    """
    # A computed dim follows from the others, so it cannot tell two calls apart.
    computed = {name for name, _ in spec.dims}
    dims = [d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind in ("name", "variadic")]
    free = dict.fromkeys(d for d in dims if d not in computed and d != "...")
    exact = [a.name for a in spec.scalars if "float" not in str(a.scalar) and a.scalar != "object"]
    merged = dict.fromkeys(free, default) | dict.fromkeys(exact, "exact")
    merged |= {a.name: "none" for a in spec.scalars if a.name not in merged}
    for name, kind in [("the default", default), *(kinds or {}).items()]:
        if kind not in KINDS or (name not in merged and name != "the default"):
            names = ", ".join(merged)
            raise error("SL115", where=spec.name, got=f"{name}={kind!r}", expected=f"{'|'.join(KINDS)} for {names}")
    tensors = [(i, a) for i, a in enumerate(spec.args) if a.tensor is not None]
    plain = tuple((i, a.optional) for i, a in tensors if not a.many)
    lists = any(a.many for _, a in tensors) or any(a.optional for a in spec.scalars)
    return BucketRule(tuple({**merged, **(kinds or {})}.items()), tuple(sorted(spec.dtype_classes)), plain, lists)
