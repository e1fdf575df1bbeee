"""The reason, in words, why a value that is scaled by its own root mean square is not torch's RMS norm.

``shipped/mean_square_root.py`` recognises the ways of writing the one formula. This module recognises none of them, and
follows the scale up through any calls. If the scale comes from the squares (or the norm) of the value that is scaled,
the module names the difference.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value, mutates_argument, name_and_operator
from shiplap.rewrite.normalize_call import canonical_arguments
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import (
    keeps_values,
    positional_then_named,
    single_user,
    skip_idle_calls,
    tensor_and_factor,
    torch_call_name,
)
from shiplap.rewrite.shipped.mean_square_root import (
    DIVISION_NAMES,
    PRODUCT_NAMES,
    ROOT_EXPONENTS,
    base_of_square,
    reduces_last_dim,
    root_base_and_exponent,
)
from shiplap.rewrite.walk import inputs_of, walk_from

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
