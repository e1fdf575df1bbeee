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

    ``limits`` lists conditions on sizes and scalars. Each is a name with an upper bound (``n<=4096``) or an exact value
    (``k==27``). The printed text can be parsed again.
    """

    limits: tuple[tuple[str, str, Hashable], ...] = ()

    def __str__(self) -> str:
        """Return the limits of the bucket as text that :meth:`parse` reads, such as ``n<=64, k==3``."""
        return ", ".join(f"{name}{op}{value!r}" for name, op, value in self.limits)

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """Return the bucket, a class of calls that share a tuned choice, that prints as ``text``, such as ``n<=64,
        k==3``. Raise ``ValueError`` for any other text, since it may come from a file.
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
    """Return whether a call can have this value of a size or scalar. Such a value is None, an integer of 64 bits, a
    finite float, a text, or a tuple of these.
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
        kinds: pairs of a free dim or scalar and its kind of bucket (``"pow2"``, ``"exact"`` or ``"none"``), in declared
            order.
        classes: the dtype classes of the op, which are annotations that admit several dtypes.
        plain: for each tensor argument that is no list of tensors, its position and whether it is optional.
        lists: whether the op has other arguments that may be tensors or None.
    """

    kinds: tuple[tuple[str, str], ...]
    classes: tuple[str, ...]
    plain: tuple[tuple[int, bool], ...] = ()
    lists: bool = False

    @cached_property
    def quick(self) -> Callable[[Binding], Key]:
        """The function that returns ``(device type, sizes, dtypes, layout)`` of a call. These values identify the
        bucket, that is the calls that share a tuned choice. The function is generated, and faster than :meth:`key`.
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
        """Return the bucket of a call with the sizes and scalars ``env``, as limits such as ``n<=64``. Calls in one
        bucket share a tuned choice.
        """
        values = self.values(env)
        named = [(n, k) for n, k in self.kinds if k != "none"]
        return Bucket(tuple((n, "<=" if k == "pow2" else "==", v) for (n, k), v in zip(named, values, strict=True)))

    @cached_property
    def _get(self) -> list[tuple[str, bool]]:
        """Return pairs of the name of a size or scalar and a bool. Calls that differ in one of these values get
        different tuned choices. The bool states whether the value is rounded up to a power of two first.
        """
        return [(name, kind == "pow2") for name, kind in self.kinds if kind != "none"]

    def values(self, env: Env) -> Key:
        """Return the values of the sizes and scalars in ``env`` that tuned choices distinguish, without their names.
        Some are rounded up to a power of two.
        """
        return tuple(
            [_round_up_pow2(env.get(name)) if pow2 else _plain_key_value(env.get(name)) for name, pow2 in self._get]
        )

    def key(self, call: Binding) -> Key:
        """Return the rounded sizes, the dtypes and the layout of a call as one tuple. It is equal for calls that share
        a tuned choice.
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
    """Return a size, or each of a list of sizes, rounded up to a power of two. A size below 1 becomes 0. Any other
    value is returned unchanged.
    """
    if type(size) is int:
        return 1 << (size - 1).bit_length() if size > 0 else 0
    return tuple(map(_round_up_pow2, size)) if isinstance(size, (tuple, list)) else size


def _plain_key_value(value: EnvValue) -> Hashable:
    """Return ``value`` as a part of a key. A list becomes a tuple, which can be hashed."""
    return tuple(value) if isinstance(value, list) else value


def bucket_dtypes(rule: BucketRule, call: Binding) -> str:
    """Return the dtype of each dtype class of the call as text, such as ``Float=float16``. A dtype class is an
    annotation that admits several dtypes.
    """
    dtypes = call.dtypes
    return ", ".join([f"{c}={str(dtypes[c])[6:]}" for c in rule.classes if c in dtypes])


def bucket_layout(args: Sequence[Value]) -> str:
    """Return a code for the layout of each tensor, separated by commas. The code is ``c`` for a contiguous tensor and
    ``-`` for an absent one. For others it is the order of the dims, with ``+`` if there are gaps.
    """
    tensors = [v for v in args if v is None or isinstance(v, Tensor) or _has_tensors(v)]
    return ",".join(map(_layout_code, tensors))


def _layout_code(value: Value) -> str:
    """Return the code of a tensor's layout. It is ``c`` if the tensor is contiguous, and otherwise the order of its
    dims. For a list, return the codes of its members in brackets. Return ``-`` for any other value.
    """
    if isinstance(value, Tensor):
        return "c" if value.is_contiguous() else _dim_order_code(value)
    return f"[{','.join(map(_layout_code, value))}]" if isinstance(value, (list, tuple)) else "-"


def _has_tensors(value: Value) -> bool:
    """Return whether the value is a list or tuple that contains a tensor."""
    return isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value)


def _dim_order_code(t: Tensor) -> str:
    """Return the order of a tensor's dims in memory, such as ``10`` for a transposed matrix or ``0231`` for channels
    last. If there are gaps, ``+`` follows.
    """
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda d: (-strides[d], d))
    dense = t.permute(order).is_contiguous()
    return "".join(map(str, order)) + ("" if dense else "+")


def read_bucket_rule(spec: OpSpec, default: str = "pow2", kinds: Mapping[str, str] | None = None) -> BucketRule:
    """Return the rule by which calls of ``spec`` share tuned choices. ``kinds`` maps names of sizes and scalars to
    ``"pow2"``, ``"exact"`` or ``"none"``. ``default`` is the kind of other dims. Raise ``SL115`` for an unknown name or
    kind.
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
