"""The reason, in words, why a softmax that weighs activations is not an attention that a fused kernel computes.

The text names the call that differs. It also names the change with which the place would match, or states that there is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import (
    fake_tensor,
    fake_value,
    format_sizes,
    mutates_argument,
    name_and_operator,
)
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import keeps_values, positional_then_named, skip_idle_calls, torch_call_name
from shiplap.rewrite.shipped.softmax_region import (
    NORM_OPERATORS,
    SoftmaxRegion,
    find_region,
    log_softmax_below,
    mixes_heads,
)

CallFilter = Callable[[Node], bool]

FIXES_BY_CALL = {
    "cat": "join the keys (or the values) before the product, and multiply once",
    "stack": "join the keys (or the values) before the product, and multiply once",
    "pad": "pad the keys (or the values) before the product, and mask what was padded",
    "tanh": "torch.nn.attention.flex_attention takes a score_mod that caps",
    "as_strided": "write the windows as a dim of queries and keys, or as a mask: flex_attention takes a block mask",
    "max": "multiply by the weights of the softmax themselves: a choice of one is no weighted mean",
    "scatter_": "multiply by the weights of the softmax themselves: a choice of one is no weighted mean",
    "masked_fill": "mask the scores alone, before the softmax",
    "getitem": "cut the keys (or the values) before the product, not the scores or the weights",
    "mul": "write the factor as a bias that is added to the scores, or multiply the queries or values by it",
}
NO_FIX = "nothing would make it match: leave it to torch.compile"


def is_over_last_dim(node: Node) -> bool:
    """Return whether the softmax ``node`` is over the last dim of a tensor of at least two dims. Return False also if
    the call does not state the dim as a constant.
    """
    held = fake_value(node)
    called = log_softmax_below(node) or node
    given = [a for a in (*called.args[1:2], called.kwargs.get("dim")) if isinstance(a, int)]
    return isinstance(held, Tensor) and held.dim() >= 2 and bool(given) and given[0] % held.dim() == held.dim() - 1


def is_softmax_by_hand(node: Node) -> bool:
    """Return whether ``node`` is ``exp(x) / sum(exp(x))``, a softmax that is written as several calls."""
    given = positional_then_named(node) if torch_call_name(node) in ("div", "truediv", "divide") else []
    top, total = map(skip_idle_calls, given) if len(given) == 2 else (None, None)
    return (
        torch_call_name(top) == "exp"
        and isinstance(total, Node)
        and torch_call_name(total) == "sum"
        and bool(total.all_input_nodes)
        and skip_idle_calls(total.all_input_nodes[0]) is top
    )


def is_unnormalized_softmax(node: Node) -> bool:
    """Return whether ``node`` is the ``exp`` of attention scores and is normalized at another node. For example, the
    product with the values is divided by the sum of the weights, or a ``logsumexp`` is subtracted before the ``exp``.
    """
    if torch_call_name(node) != "exp" or log_softmax_below(node) is not None:
        return False
    readers = [r for u in node.users for r in (u.users if keeps_values(u) else (u,))]
    if any(is_softmax_by_hand(r) for r in readers):  # reported at the division
        return False
    region = find_region(node)
    return region is not None and region.attends


def explain_region(region: SoftmaxRegion, above: CallFilter, below: CallFilter) -> RewriteObstacle:
    """Return one obstacle that names all differences between an attention and ``region``, the calls around a softmax.
    The differences are in the order of the calls.

    ``above`` and ``below`` return whether an attention may have a given call before or after the softmax. The node of
    the obstacle is that of the first difference. If the first difference has no fix, it is returned alone.
    """
    first, *others = list(_obstacles_of_region(region, above, below)) or [_obstacle_of_product(region)]
    # Where nothing helps, further obstacles would only distract.
    if not others or first.fix == NO_FIX:
        return first
    reason = "; besides, ".join(e.reason for e in (first, *others))
    fix = "; ".join(dict.fromkeys(e.fix for e in (first, *others)))
    return RewriteObstacle(first.node, first.obstacle, reason, fix, first.fitting)


def _obstacles_of_region(region: SoftmaxRegion, above: CallFilter, below: CallFilter) -> Iterator[RewriteObstacle]:
    """Yield one obstacle for each difference between an attention and ``region``, the calls around a softmax, in the
    order of the calls. ``above`` and ``below`` return whether an attention may have a given call before or after the
    softmax.
    """
    softmax, exponential = region.softmax, is_unnormalized_softmax(region.softmax)
    by_hand = exponential or is_softmax_by_hand(softmax)
    if region.scores is None:
        what = "the scores of this softmax come from no product of queries and keys"
        yield RewriteObstacle(softmax, "operator", what, NO_FIX)
    elif region.learned:
        what = (
            f"the scores come from {name_and_operator(region.scores)}, a product of an activation and a weight of "
            f"the model, "
            "not of queries and keys"
        )
        yield RewriteObstacle(region.scores, "operator", what, NO_FIX)
    unknown = (n for n in region.above if not above(n) and not _is_part_of_softmax(n, by_hand))
    if (strange := next(filter(_couples_heads, region.above), next(unknown, None))) is not None:
        what = f"{name_and_operator(strange)} lies between the product of queries and keys and the softmax"
        yield RewriteObstacle(
            strange, "operator", what, _fix_for_call(strange, "write it as a bias that is added to the scores")
        )
    if by_hand:
        form = "an exponential that is normalized elsewhere" if exponential else "exp(x) / sum(exp(x))"
        what = f"the softmax is written out as {form}, at {name_and_operator(softmax)}"
        yield RewriteObstacle(
            softmax, "operator", what, "call torch.softmax(x, -1), which also keeps large scores finite"
        )
    elif not is_over_last_dim(softmax):
        shape = _shape_of_node(softmax)
        what = f"the softmax is not over the last dim of the scores, {shape}, where attention has the keys"
        yield RewriteObstacle(softmax, "constant", what, "put the keys last: softmax(queries @ keys.mT, dim=-1)")
    unknown = (n for n in region.below if not below(n))
    if (strange := next(filter(_couples_heads, region.below), next(unknown, None))) is not None:
        what = f"{name_and_operator(strange)} lies between the softmax and the product with the values"
        yield RewriteObstacle(strange, "operator", what, _fix_for_call(strange, "move it behind the product"), 2)
    read = (softmax, *region.below)
    for writer in (u for n in read for u in n.users if mutates_argument(u) and u.args[:1] == (n,)):
        what = f"{name_and_operator(writer)} writes to the weights"
        yield RewriteObstacle(
            writer, "mutation", what, "write the call without the underscore, which returns a copy", 2
        )
    if len(region.outs) > 1:
        names = ", ".join(n.name for n in region.outs)
        what = f"the weights go into {len(region.outs)} products, {names}; attention has one"
        yield RewriteObstacle(softmax, "user", what, "join the values, and multiply once", 2)


def _couples_heads(node: Node) -> bool:
    """Return whether ``node``, a call near a softmax, mixes or normalizes scores or weights, often those of several
    heads. No fused kernel computes that.
    """
    return mixes_heads(node) or torch_call_name(node) in NORM_OPERATORS


def _is_part_of_softmax(node: Node, by_hand: bool) -> bool:
    """Return whether ``node`` is an ``exp`` that belongs to a softmax. ``by_hand`` states whether the softmax is
    written as several calls. If it is one call, return False.
    """
    return by_hand and torch_call_name(node) == "exp"


def _obstacle_of_product(region: SoftmaxRegion) -> RewriteObstacle:
    """Return the obstacle for ``region``, the calls around a softmax, if an attention may have all of these calls. One
    of the two matrix products of ``region`` is then written in an unsupported way, which the obstacle names.
    """
    assert region.scores is not None
    known = ("matmul", "bmm", "baddbmm")
    at = next((n for n in (region.scores, region.out) if torch_call_name(n) not in known), region.out)
    wanted = "queries @ keys.mT" if at is region.scores else "weights @ values"
    what = f"{name_and_operator(at)} computes the product, of {_shape_of_node(at)}, in another way than {wanted} does"
    return RewriteObstacle(at, "operator", what, f"write it as {wanted}, tokens and heads of each in the same dims", 2)


def _fix_for_call(node: Node, otherwise: str) -> str:
    """Return the fix in ``FIXES_BY_CALL`` for the call ``node``, which no attention has. Return ``otherwise`` if there
    is none. If the call mixes attention heads, return ``NO_FIX``, a text which says that nothing would help.
    """
    name = torch_call_name(node)
    if _couples_heads(node):
        return NO_FIX
    # In-place and plain forms of a call have one fix.
    return FIXES_BY_CALL.get(name, FIXES_BY_CALL.get(f"{name}_", FIXES_BY_CALL.get(name.removesuffix("_"), otherwise)))


def _shape_of_node(node: Node) -> str:
    """Return the shape of the tensor of ``node`` as text, such as ``[2, 8]``. Return the name of ``node`` if it stands
    for no tensor.
    """
    held = fake_tensor(node)
    return node.name if held is None else format_sizes(held.shape)
