"""The reason in words why a value that is scaled by its own root mean square is not torch's RMS norm.

``shipped/mean_square_root.py`` knows the spellings of the one formula. This module knows none: it follows the scale up
through any calls. If the scale comes from the squares (or the norm) of the very value that is scaled, the module names
the difference.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.rewrite import passthrough_ops
from shiplap.rewrite.graph import mutates, operator_name, value
from shiplap.rewrite.normalize_call import arguments
from shiplap.rewrite.shipped.mean_square_root import DIVISIONS, PRODUCTS, Missed, over_last, power, square_of

NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"})
# Calls that keep a root away from 0 in place of an eps.
BOUNDS = frozenset({"clamp", "clamp_min", "clip", "maximum", "max"})
REDUCES = frozenset({"mean", "sum"})
# Calls between the squares and the scale in any known spelling of an RMS norm.
STEPS = PRODUCTS | DIVISIONS | BOUNDS | REDUCES | {"add", "sub", "view", "unsqueeze", "squeeze", "expand", "getitem"}
# In-place scaling is listed as well, since it is reported with its own fix.
SCALES = frozenset({"imul", "itruediv", "mul_", "div_"}) | PRODUCTS | DIVISIONS
FAR = 12  # calls between a value and the squares that it is scaled by
FORMULA = "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)"


@dataclass
class _Trace:
    """The calls on the way up from a scale, by kind, the nearest to the scale first."""

    squared: list[Node] = field(default_factory=list)
    roots: list[Node] = field(default_factory=list)
    bounds: list[Node] = field(default_factory=list)
    added: list[Node] = field(default_factory=list)
    norms: list[Node] = field(default_factory=list)
    means: list[Node] = field(default_factory=list)
    sized: bool = False
    seen: set[Node] = field(default_factory=set)


def otherwise(node: Node, known: Collection[Node]) -> Missed | None:
    """Return the reason why ``node``, which scales a value by its root mean square, is not matched, or None.

    None stands for a node that does not scale in this way, and for a root that is ``known`` and has an outcome already.
    """
    if passthrough_ops.named(node) == "normalize":
        return _normalized(node)
    if passthrough_ops.named(node) not in SCALES or len(given := passthrough_ops.operands(node)) != 2:
        return None
    # A product may have the scale on either side, a division only as divisor.
    for scaled, by in (given, given[::-1]) if passthrough_ops.named(node) not in DIVISIONS else (given,):
        if isinstance(scaled, Node) and isinstance(by, Node) and _broadcasts(by, scaled):
            trace = _followed(by)
            base = next((b for b in _bases(scaled) if b in trace.squared), None)
            # A sum that is not divided by the size is no mean, and a difference is a layer norm.
            if base is not None and trace.seen.isdisjoint(known) and trace.sized and not _shifted(base):
                return _named(node, trace)
    return None


def _bases(scaled: Node) -> list[Node]:
    """Return the values that ``scaled`` may be a multiple of: itself, or a factor where it was multiplied by a weight
    before.
    """
    at = passthrough_ops.handed_on(scaled)
    factors = at.all_input_nodes if passthrough_ops.named(at) in PRODUCTS else []
    return [at, *map(passthrough_ops.handed_on, factors)]


def _broadcasts(by: Node, scaled: Node) -> bool:
    """Whether ``by`` broadcasts to ``scaled`` along a dim."""
    small, large = value(by), value(scaled)
    if not (isinstance(small, Tensor) and isinstance(large, Tensor)) or small.dim() != large.dim():
        return False
    return bool(large.is_floating_point()) and any(
        _is_one(n) and not _is_one(m) for n, m in zip(small.shape, large.shape, strict=True)
    )


def _is_one(size: Any) -> bool:
    """Whether a size is known to be 1."""
    return isinstance(size, int) and size == 1


def _followed(by: Node) -> _Trace:
    """Follow ``by`` up through the calls of a norm, and return the calls by kind."""
    trace, layer = _Trace(), [by]
    for _ in range(FAR):
        further: list[Node] = []
        for node in layer:
            if node not in trace.seen:
                trace.seen.add(node)
                further += _met(node, trace)
        layer = further
    return trace


def _met(node: Node, trace: _Trace) -> list[Node]:
    """Note ``node`` in ``trace`` by its kind, and return the values that it comes from."""
    name = passthrough_ops.named(node)
    if (x := square_of(node)) is not None:
        trace.squared.append(passthrough_ops.handed_on(x))
        return []
    if name in NORMS:
        trace.norms.append(node)
        trace.roots.append(node)
        trace.squared.append(passthrough_ops.handed_on(node.all_input_nodes[0]))
        return []
    if (step := power(node)) is not None:
        # A reciprocal alone is no root.
        if step[1] != -1:
            trace.roots.append(node)
        return [step[0]] if isinstance(step[0], Node) else []
    if name not in STEPS and not passthrough_ops.idle(node):
        return []
    trace.sized |= name == "mean" or passthrough_ops.factor(node) is not None
    if name in REDUCES:
        trace.means.append(node)
    if name in BOUNDS:
        trace.bounds.append(node)
    if name == "add":
        trace.added.append(node)
    return list(node.all_input_nodes)


def _shifted(x: Node) -> bool:
    """Whether ``x`` is a difference."""
    return passthrough_ops.named(x) == "sub"  # a mean was subtracted: a layer norm


def _named(node: Node, trace: _Trace) -> Missed | None:
    """Return the difference between the calls in ``trace`` and the formula, or None where no root was found."""
    if not trace.roots:
        return None
    what, at, fix = "", node, f"write {FORMULA}, or call torch.nn.functional.rms_norm"
    if mutates(node):
        what, at = f"{_called(node)} writes to x itself", node
        fix = f"write {FORMULA}, which returns a copy"
    elif trace.bounds:
        at = trace.bounds[0]
        what = f"{_called(at)} bounds the root from below, where torch's rms_norm adds eps to the mean of squares"
    elif trace.added and not _below_root(trace.added[0], trace.roots[0]):
        at = trace.added[0]
        what = f"{_called(at)} adds eps to the root, torch's rms_norm to the mean of squares under it"
    elif trace.means and not over_last(trace.means[0]):
        at, fix = trace.means[0], "normalise the last dim: torch's rms_norm has no other"
        what = f"{_called(at)} is not over the last dim alone"
    elif trace.norms:
        at = trace.norms[0]
        what = f"the root mean square is computed by {_called(at)}, without an eps under the root"
    else:
        what = f"{_called(node)} scales x by its root mean square in another order of calls than the formula"
    return Missed(at, "operator", what, fix)


def _below_root(added: Node, root: Node) -> bool:
    """Whether ``root`` is computed from ``added``."""
    stack, seen = [root], set[Node]()
    while stack:
        at = stack.pop()
        if at is added:
            return True
        if at not in seen and len(seen) < FAR:
            seen.add(at)
            stack += at.all_input_nodes
    return False


def _normalized(node: Node) -> Missed | None:
    """Return the obstacle of ``normalize(x, dim) * sqrt(n)``: an RMS norm whose eps is a bound of the norm, or None."""
    given = arguments(node, ("p", "dim"))
    dim, held = given.get("dim", 1), value(node)
    if given.get("p", 2) != 2 or not isinstance(dim, int) or not isinstance(held, Tensor) or not held.dim():
        return None
    at = passthrough_ops.only_reader(node)
    while at is not None and passthrough_ops.idle(at):
        at = passthrough_ops.only_reader(at)
    scaled = passthrough_ops.factor(at) if at is not None else None
    size = held.shape[dim % held.dim()]
    if scaled is None or not isinstance(size, int) or abs(scaled[1] ** 2 - size) > 1e-6 * size:
        return None
    what = f"{_called(node)} bounds the norm from below, where torch's rms_norm adds eps to the mean of squares"
    return Missed(node, "operator", what, f"write {FORMULA}, or call torch.nn.functional.rms_norm")


def _called(node: Node) -> str:
    """Return the name of a node and its operator."""
    return f"{node.name} ({operator_name(node)})"
