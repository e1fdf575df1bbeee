"""Rewrite an RMS norm written out, ``weight * x * rsqrt(mean(x ** 2) + eps)``, to torch's ``rms_norm``.

The norm is recognised by its computation. From each root of a mean of squares (``shipped/mean_square_root.py``) the
pass follows the scaled values down, through casts, to the product with a weight of one dim. The weight may be computed
from a parameter (``1 + weight``), and may also come first. A value that is scaled by its own root mean square in
another way is a near miss. To name the reason, the scale is followed up through any calls. If it comes from the squares
(or the norm) of the value that is scaled, the reason is the difference to torch's ``rms_norm``.

The rewrite is proven on the ways in which models write the norm, which are at the beginning of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import (
    describe_node,
    fake_value,
    mutates_argument,
    name_and_operator,
    place_replacement,
    remove_dead_calls,
)
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.normalize_call import canonical_arguments
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import (
    CAST_OPERATORS,
    is_32_bit_or_wider,
    keeps_values,
    positional_then_named,
    single_user,
    skip_idle_calls,
    tensor_and_factor,
    tensor_argument,
    torch_call_name,
)
from shiplap.rewrite.program import Program
from shiplap.rewrite.shipped.mean_square_root import (
    DIVISION_NAMES,
    PRODUCT_NAMES,
    ROOT_EXPONENTS,
    MeanSquareRoot,
    base_of_square,
    find_mean_square_root,
    is_root_not_reciprocal,
    reduces_last_dim,
    restores_last_dim,
    root_base_and_exponent,
)
from shiplap.rewrite.walk import inputs_of, walk_from, without_other_readers


def _norm_as_llama(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of ``x`` over the last dim as Llama writes it. It is computed in float32 and cast back before
    it is multiplied by ``weight``.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _norm_as_gemma(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of ``x`` over the last dim as Gemma writes it. It is computed in float32, multiplied by ``1 +
    weight`` and cast back.
    """
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5)
    return (normed * (1.0 + weight.float())).type_as(x)


def _norm_without_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sine of the RMS norm of ``x``, which divides by a root, times ``weight``. The weight is not part of
    the norm.
    """
    return (x / torch.sqrt(torch.mean(torch.square(x), axis=-1, keepdim=True) + 1e-5)).sin() * weight  # type: ignore[call-overload]


def _cast_root(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sine of the RMS norm of ``x`` times ``weight``. The root is computed in float32 and cast back before
    it scales ``x``.
    """
    return (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)).sin() * weight


def _norm_by_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of ``x`` over the last dim. Its mean is written as a sum divided by the size. ``x`` is
    multiplied by ``weight`` before the root is applied.
    """
    inverse = 1 / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
    return weight * x * inverse


def rms_norm_programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite is proven. A program is a function with arguments. Together they compute
    an RMS norm in the ways in which models write it, with several dtypes and layouts.
    """
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return a random tensor of the given shape, and a random weight for its last dim. Both have the dtype
        ``dtype``.
        """
        return torch.randn(*shape, generator=rng).to(dtype), torch.randn(shape[-1], generator=rng).to(dtype)

    yield Program(_norm_as_llama, drawn(3, 5, 16), "of three dims, dynamic", dynamic=True)
    yield Program(_norm_as_llama, drawn(3, 16, dtype=torch.bfloat16), "bfloat16")
    x, weight = drawn(2, 5, 3, 16)
    yield Program(_norm_as_gemma, (x.transpose(1, 2), weight), "transposed, with 1 + weight")
    yield Program(_norm_without_weight, drawn(4, 16), "divided by a root, without a weight")
    yield Program(_cast_root, drawn(4, 16, dtype=torch.bfloat16), "a root in bfloat16")
    yield Program(_norm_by_sum, drawn(4, 16, dtype=torch.float16), "a sum by its size, the weight first, float16")


NORM_OPERATORS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"})
# Calls that keep a root away from 0 in place of an eps.
BOUNDING_OPERATORS = frozenset({"clamp", "clamp_min", "clip", "maximum", "max"})
REDUCING_OPERATORS = frozenset({"mean", "sum"})
# Calls between the squares and the scale in any known spelling of an RMS norm.
FOLLOWED_OPERATORS = (
    PRODUCT_NAMES
    | DIVISION_NAMES
    | BOUNDING_OPERATORS
    | REDUCING_OPERATORS
    | {"add", "sub", "view", "unsqueeze", "squeeze", "expand", "getitem"}
)
# In-place scaling is listed as well, since it is reported with its own fix.
SCALING_OPERATORS = frozenset({"imul", "itruediv", "mul_", "div_"}) | PRODUCT_NAMES | DIVISION_NAMES
MOST_CALLS_TO_SQUARES = 12  # calls between a value and the squares that it is scaled by
RMS_NORM_FORMULA = "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)"


@dataclass
class _ScaleTrace:
    """The calls that compute a factor by which a value is scaled, in one list for each kind of call. In each list, the
    calls nearest to the factor come first.

    ``squared`` holds the values whose squares are computed. ``roots``, ``means``, ``norms`` and ``added`` hold roots,
    reductions, vector norms and additions. ``bounds`` holds calls such as ``clamp``, and ``writers`` calls that work in
    place. ``sized`` states whether there is a ``mean`` or a constant factor. ``seen`` holds all nodes that were
    visited.
    """

    squared: list[Node] = field(default_factory=list)
    roots: list[Node] = field(default_factory=list)
    writers: list[Node] = field(default_factory=list)
    bounds: list[Node] = field(default_factory=list)
    added: list[Node] = field(default_factory=list)
    norms: list[Node] = field(default_factory=list)
    means: list[Node] = field(default_factory=list)
    sized: bool = False
    seen: set[Node] = field(default_factory=set)


def explain_unmatched_norm(node: Node, known: Collection[Node]) -> RewriteObstacle | None:
    """Return the obstacle, with its reason, if ``node`` scales a value by its root mean square in another way than
    torch's RMS norm.

    Return None for any other node. Return None also if the scale is computed from a node in ``known``, the roots that
    were replaced or reported already.
    """
    if torch_call_name(node) == "normalize":
        return _explain_normalize(node)
    if torch_call_name(node) not in SCALING_OPERATORS or len(given := positional_then_named(node)) != 2:
        return None
    # A product may have the scale on either side, a division only as divisor.
    for scaled, by in (given, given[::-1]) if torch_call_name(node) not in DIVISION_NAMES else (given,):
        if isinstance(scaled, Node) and isinstance(by, Node) and _broadcasts_to(by, scaled):
            trace = _follow_scale(by)
            base = next((b for b in _possible_bases(scaled) if b in trace.squared), None)
            # A sum that is not divided by the size is no mean, and a difference is a layer norm.
            if base is not None and trace.seen.isdisjoint(known) and trace.sized and not _is_difference(base):
                return _describe_difference(node, trace)
    return None


def _possible_bases(scaled: Node) -> list[Node]:
    """Return the values of which ``scaled`` may be a multiple. They are ``scaled`` without casts and, if it is a
    product, the factors of the product without casts.
    """
    at = skip_idle_calls(scaled)
    factors = at.all_input_nodes if torch_call_name(at) in PRODUCT_NAMES else []
    return [at, *map(skip_idle_calls, factors)]


def _broadcasts_to(by: Node, scaled: Node) -> bool:
    """Return whether ``by`` has as many dims as the floating-point tensor ``scaled``, and size 1 in a dim in which
    ``scaled`` is larger.
    """
    small, large = fake_value(by), fake_value(scaled)
    if not (isinstance(small, Tensor) and isinstance(large, Tensor)) or small.dim() != large.dim():
        return False
    return bool(large.is_floating_point()) and any(
        _is_size_one(n) and not _is_size_one(m) for n, m in zip(small.shape, large.shape, strict=True)
    )


def _is_size_one(size: Any) -> bool:
    """Return whether ``size``, a number or a symbol, is known to be 1."""
    return isinstance(size, int) and size == 1


def _follow_scale(by: Node) -> _ScaleTrace:
    """Return the calls through which the factor ``by`` is computed, sorted by kind, such as roots, means and squares.
    At most 12 calls in a row are followed.
    """
    trace, layer = _ScaleTrace(), [by]
    for _ in range(MOST_CALLS_TO_SQUARES):
        further: list[Node] = []
        for node in layer:
            if node not in trace.seen:
                trace.seen.add(node)
                further += _follow_call(node, trace)
        layer = further
    return trace


def _follow_call(node: Node, trace: _ScaleTrace) -> list[Node]:
    """Append the call ``node`` to the list of its kind in ``trace``, such as roots or means. Return the nodes among its
    inputs that have to be followed next. Return an empty list at a square, and at a call that no RMS norm has.
    """
    name = torch_call_name(node)
    if (x := base_of_square(node)) is not None:
        trace.squared.append(skip_idle_calls(x))
        return []
    if name in NORM_OPERATORS:
        trace.norms.append(node)
        trace.roots.append(node)
        trace.squared.append(skip_idle_calls(node.all_input_nodes[0]))
        return []
    if name.endswith("_") and mutates_argument(node):
        trace.writers.append(node)
        name = name.removesuffix("_")
        if name in ROOT_EXPONENTS or name == "pow":
            trace.roots.append(node)
            return node.all_input_nodes[:1]
    if (step := root_base_and_exponent(node)) is not None:
        # A reciprocal alone is no root.
        if step[1] != -1:
            trace.roots.append(node)
        return [step[0]] if isinstance(step[0], Node) else []
    if name not in FOLLOWED_OPERATORS and not keeps_values(node):
        return []
    trace.sized |= name == "mean" or tensor_and_factor(node) is not None
    if name in REDUCING_OPERATORS:
        trace.means.append(node)
    if name in BOUNDING_OPERATORS:
        trace.bounds.append(node)
    if name == "add":
        trace.added.append(node)
    return list(node.all_input_nodes)


def _is_difference(x: Node) -> bool:
    """Return whether ``x`` is the result of a subtraction. A layer norm, for example, subtracts the mean before it
    scales.
    """
    return torch_call_name(x) == "sub"  # a mean was subtracted: a layer norm


def _describe_difference(node: Node, trace: _ScaleTrace) -> RewriteObstacle | None:
    """Return the obstacle that names how the factor of the product ``node`` differs from the formula of an RMS norm.
    ``trace`` holds the calls that compute the factor. Return None if there is no root among them.
    """
    if not trace.roots:
        return None
    what, at, fix = "", node, f"write {RMS_NORM_FORMULA}, or call torch.nn.functional.rms_norm"
    if mutates_argument(node):
        what, at = f"{name_and_operator(node)} writes to x itself", node
        fix = f"write {RMS_NORM_FORMULA}, which returns a copy"
    elif trace.writers:
        at = trace.writers[-1]
        what, fix = f"{name_and_operator(at)} writes to the mean of squares", "write the calls without the underscore"
    elif trace.bounds:
        at = trace.bounds[0]
        what = f"{name_and_operator(at)} bounds the root from below, "
        what += "where torch's rms_norm adds eps to the mean of squares"
    elif trace.added and not _is_below_root(trace.added[0], trace.roots[0]):
        at = trace.added[0]
        what = f"{name_and_operator(at)} adds eps to the root, torch's rms_norm to the mean of squares under it"
    elif trace.means and not reduces_last_dim(trace.means[0]):
        at, fix = trace.means[0], "normalise the last dim: torch's rms_norm has no other"
        what = f"{name_and_operator(at)} is not over the last dim alone"
    elif trace.norms:
        at = trace.norms[0]
        what = f"the root mean square is computed by {name_and_operator(at)}, without an eps under the root"
    else:
        what = f"{name_and_operator(node)} scales x by its root mean square in another order of calls than the formula"
    return RewriteObstacle(at, "operator", what, fix)


def _is_below_root(added: Node, root: Node) -> bool:
    """Return whether ``root`` is computed from ``added``. At most 48 nodes above ``root`` are searched."""
    return added in islice(walk_from([root], inputs_of), 4 * MOST_CALLS_TO_SQUARES)


def _explain_normalize(node: Node) -> RewriteObstacle | None:
    """Return the obstacle if ``node`` is ``normalize(x, dim)`` and its reader multiplies the result by ``sqrt(n)``,
    where ``n`` is the size of ``dim``. That is an RMS norm whose eps bounds the norm from below. Return None for any
    other calls.
    """
    given = canonical_arguments(node, ("p", "dim"))
    dim, held = given.get("dim", 1), fake_value(node)
    if given.get("p", 2) != 2 or not isinstance(dim, int) or not isinstance(held, Tensor) or not held.dim():
        return None
    at = single_user(node)
    while at is not None and keeps_values(at):
        at = single_user(at)
    scaled = tensor_and_factor(at) if at is not None else None
    # The factor is sqrt(n) rounded to a float, so its square is not quite n.
    size = held.shape[dim % held.dim()]
    if scaled is None or not isinstance(size, int) or abs(scaled[1] ** 2 - size) > 1e-6 * size:
        return None
    what = (
        f"{name_and_operator(node)} bounds the norm from below, where torch's rms_norm adds eps to the mean of squares"
    )
    return RewriteObstacle(node, "operator", what, f"write {RMS_NORM_FORMULA}, or call torch.nn.functional.rms_norm")


class RmsNorm(Rewrite):
    """A rewrite that puts ``torch.nn.functional.rms_norm`` where a graph computes an RMS norm step by step."""

    name = "rms_norm"
    level: Level = "pre-grad"
    anchors = frozenset({"rsqrt", "sqrt", "pow", "norm", "vector_norm", "linalg_vector_norm", "normalize"})

    @property
    def digest(self) -> str:
        """A digest of the code that finds and replaces RMS norms."""
        return code_digest(
            RmsNorm.apply,
            RmsNorm._replace_norm,
            find_mean_square_root,
            _find_scaling_call,
            _find_later_weight,
            _make_rms_norm,
            explain_unmatched_norm,
        )

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each computes an RMS norm in one of the ways in which models write it.
        """
        return rms_norm_programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace RMS norms that ``graph`` computes by several calls, in place, by torch's function. Yield a ``Match``
        for each replaced norm, and a ``NearMiss`` with the reason for each that is not replaced.
        """
        known: set[Node] = set()
        remove_dead_calls(graph)
        for node in list(graph.nodes):
            squares = find_mean_square_root(node)
            outcome = self._replace_norm(graph, squares) if isinstance(squares, MeanSquareRoot) else squares
            if isinstance(outcome, RewriteObstacle):
                if is_root_not_reciprocal(node):  # that of an error or a deviation may be meant: what reads it decides
                    continue
                outcome = self._near(outcome)
            if outcome is not None:
                known.add(node)
                yield outcome
        for node in list(graph.nodes):
            # A second walk, since only now all roots with an outcome are known.
            if (missed := explain_unmatched_norm(node, known)) is not None:
                yield self._near(missed)

    def _near(self, miss: RewriteObstacle) -> NearMiss:
        """Return a ``NearMiss`` for the obstacle ``miss`` in the scaling by a root or in the weight. It counts 3 of 5
        nodes as fitting, namely the square, the mean and the root.
        """
        miss.fitting = 3
        return self.near_miss(miss, of=5)

    def _replace_norm(self, graph: Graph, squares: MeanSquareRoot) -> Outcome | RewriteObstacle:
        """Replace the RMS norm that scales by ``squares``, a root of a mean of squares. Return the ``Match``, or a
        ``NearMiss`` with the reason if torch's call cannot be placed. Return the obstacle if the scaling is not that of
        an RMS norm.
        """
        nodes = list(squares.nodes)
        scaled = _find_scaling_call(squares, nodes)
        if isinstance(scaled, RewriteObstacle):
            return scaled
        product, weight = scaled
        out = product
        if weight is None:
            out, weight = _find_later_weight(product, fake_value(squares.x).shape[-1], nodes)
        given, bound = (
            [squares.x, weight, squares.eps],
            [("x", describe_node(squares.x)), ("weight", describe_node(weight))],
        )
        made: torch.dtype = fake_value(out).dtype
        plan = _make_rms_norm(made)
        return place_replacement(
            graph, self.level, self.name, plan, given, [out], without_other_readers(nodes, out), bound
        )


def _find_scaling_call(squares: MeanSquareRoot, nodes: list[Node]) -> tuple[Node, Node | None] | RewriteObstacle:
    """Return the call that multiplies ``x`` by the root in ``squares``, and the weight by which ``x`` was multiplied
    before. The weight is None if there is none.

    Return the obstacle if no such call follows the root. Append the call, and the calls between it and the root, to
    ``nodes``.
    """
    root, kept = squares.root, squares.kept
    while (product := single_user(root)) is not None:
        if not kept and torch_call_name(product) in ("unsqueeze", "getitem", "view"):
            kept = restores_last_dim(product, fake_value(squares.x))
        elif not (keeps_values(product) and product.args[0] is root):
            break
        nodes.append(root := product)
    if product is not None and not kept:
        what = f"{name_and_operator(product)} reads a root whose last dim is gone"
        return RewriteObstacle(product, "shape", what, "take the mean with keepdim=True")
    if product is None:
        return RewriteObstacle(root, "user", "the root is read more than once", "compute the norm once")
    name, given = torch_call_name(product), positional_then_named(product)
    fits = len(given) == 2 and (
        (name in DIVISION_NAMES and given[1] is root) if squares.divides else (name in PRODUCT_NAMES and root in given)
    )
    other = next((a for a in given if a is not root), None) if fits else None
    passed = [product]
    if other is not None and skip_idle_calls(other, passed) is squares.x:
        nodes += passed
        return product, None
    if other is not None and (first := _find_earlier_weight(other, squares.x)) is not None:
        nodes += [product, *first[1]]
        return product, first[0]
    # Named apart, since a layer norm is no spelling that could be corrected.
    if _is_centred(squares.x):
        what = "the mean is subtracted first: this is a layer norm, which Inductor compiles as fast as written"
        return RewriteObstacle(product, "cost", what, "leave it, or call torch.nn.functional.layer_norm")
    what = f"{name_and_operator(product)} does not multiply the values whose squares were summed"
    return RewriteObstacle(product, "operator", what, "an RMS norm multiplies x by rsqrt(mean(x ** 2) + eps)")


def _find_earlier_weight(scaled: Any, x: Node) -> tuple[Node, list[Node]] | None:
    """Return the weight and a list of the calls that apply it, if ``scaled`` is ``x * weight``. Return None for any
    other value, and if a node outside the norm reads that product.
    """
    passed: list[Node] = []
    product = skip_idle_calls(scaled, passed)
    if torch_call_name(product) not in PRODUCT_NAMES or len(given := positional_then_named(product)) != 2:
        return None
    passed.append(product)
    for one, weight in (given, given[::-1]):
        more: list[Node] = []
        alone = all(len(n.users) == 1 for n in passed)
        if alone and skip_idle_calls(one, more) is x and _is_weight_of_norm(weight, fake_value(x).shape[-1]):
            return weight, [*passed, *more]
    return None


def _is_weight_of_norm(other: Any, width: Any) -> bool:
    """Return whether ``other`` is a node of a floating-point tensor of one dim with ``width`` elements, as the weight
    of a norm is.
    """
    held = fake_value(other) if isinstance(other, Node) else None
    return isinstance(held, Tensor) and held.dim() == 1 and held.is_floating_point() and held.shape[0] == width


# A layer norm that is written out takes 119 us, and ``layer_norm`` 118 us (512 rows of 512, float32, one CPU thread,
# torch 2.13, 2026-11-23).
def _is_centred(x: Node) -> bool:
    """Return whether ``x`` is ``y - mean(y)``, as in a layer norm. Replacing a layer norm gains nothing."""
    given = positional_then_named(x) if torch_call_name(x) == "sub" else []
    mean = skip_idle_calls(given[1]) if len(given) == 2 else None
    if mean is None or torch_call_name(mean) != "mean":
        return False
    return skip_idle_calls(mean.args[0]) is skip_idle_calls(given[0])


def _find_later_weight(product: Node, width: Any, nodes: list[Node]) -> tuple[Node, Node | None]:
    """Return the last call of the norm and the weight by which the norm is multiplied after the scaling. The weight is
    None if there is none.

    The search starts at ``product``, which is ``x`` times the root, and follows casts. ``width`` is the size that the
    weight must have. The calls of the norm behind ``product`` are appended to ``nodes``.
    """
    node, casts = product, list[Node]()
    while (reader := single_user(node)) is not None and keeps_values(reader) and reader.args[0] is node:
        casts.append(reader)
        node = reader
    reader = single_user(node)
    if (
        reader is not None
        and torch_call_name(reader) in PRODUCT_NAMES
        and len(given := positional_then_named(reader)) == 2
    ):
        other = given[1] if given[0] is node else given[0]
        if _is_weight_of_norm(other, width):
            nodes += [*casts, reader]
            last = reader
            # Casts behind the weight belong to the norm, so that the result has the dtype that the model reads.
            while (after := single_user(last)) is not None and _is_narrowing_cast(after, last):
                nodes.append(after)
                last = after
            return last, other
    if casts and all(_is_narrowing_cast(c, tensor_argument(c)) for c in casts):
        nodes += casts
        return node, None
    return product, None


def _is_narrowing_cast(cast: Node, given: Node) -> bool:
    """Return whether ``cast`` is a cast of the node ``given`` to a 16-bit dtype, or to the dtype that ``given`` already
    has.
    """
    return (
        keeps_values(cast)
        and torch_call_name(cast) in CAST_OPERATORS
        and cast.args[0] is given
        and (fake_value(cast).dtype == fake_value(given).dtype or not is_32_bit_or_wider(fake_value(cast).dtype))
    )


def _make_rms_norm(out: torch.dtype) -> Callable[[Tensor, Tensor | None, float], Tensor]:
    """Return the function ``norm(x, weight, eps)`` that is traced in place of a norm. Its result has dtype ``out``."""

    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Return the RMS norm of ``x`` over the last dim in the dtype ``out``. It is multiplied by ``weight`` unless
        that is None. If ``x`` or ``weight`` has another dtype, the norm is computed in float32 or a wider dtype and
        cast once.
        """
        if x.dtype == out and (weight is None or weight.dtype == out):
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # Where dtypes differ, all is computed in float32 or wider and rounded once, as the steps of the model do it.
        wide = torch.promote_types(out, torch.float32)
        scale = None if weight is None else weight.to(wide)
        return F.rms_norm(x.to(wide), (x.shape[-1],), scale, eps).to(out)

    return norm


rms_norm = RmsNorm()
