"""Merge layer norms of one shape into one norm of stacked rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from shiplap.rewrite.graph import fake_tensor
from shiplap.rewrite.group.base import GroupRewrite, MergedCall, may_be_returned, tensor_signature
from shiplap.rewrite.group.cost import HORIZONTAL_REASON, Machine, MergePrice, tensor_bytes
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.rewrite.program import Program

# The default of torch.nn.functional.layer_norm, for calls that leave eps out.
DEFAULT_EPS = 1e-5


class StackedNorms(GroupRewrite):
    """A rewrite which replaces independent layer norms of one shape by one norm of their stacked inputs. Each layer
    norm may have its own input, scale and shift.
    """

    name = "batch_layer_norm"

    def key(self, node: Node) -> Hashable | None:
        """Return a tuple that is equal for layer norms that can be stacked. It holds sizes, dtypes and devices, the
        normalized shape and eps. Return None for other calls.
        """
        if not node.op.startswith("call") or canonical_name(node) != "layer_norm":
            return None
        given = canonical_arguments(node)
        x, scale, shift = (given.get(k) for k in ("input", "weight", "bias"))
        eps, held = given.get("eps", DEFAULT_EPS), fake_tensor(x)
        if held is None or not held.dtype.is_floating_point or isinstance(eps, Node) or fake_tensor(node) is None:
            return None
        affine = tensor_signature(fake_tensor(scale)), tensor_signature(fake_tensor(shift))
        # The normalized shape as text, since a list has no hash.
        return (
            tensor_signature(held),
            tensor_signature(fake_tensor(node)),
            str(given["normalized_shape"]),
            eps,
            *affine,
        )

    def merge(self, members: Sequence[Node]) -> MergedCall:
        """Return a function that computes all ``members`` as one norm of their stacked inputs, and its arguments. These
        include the inputs, scales and shifts of all members.
        """
        calls = [canonical_arguments(m) for m in members]
        scales, shifts = ([c[k] for c in calls if c.get(k) is not None] for k in ("weight", "bias"))
        shape, eps = list(calls[0]["normalized_shape"]), calls[0].get("eps", DEFAULT_EPS)
        return _norm_stacked_rows, (
            [c["input"] for c in calls],
            shape,
            scales,
            shifts,
            eps,
            [may_be_returned(m) for m in members],
        )

    def price(self, members: Sequence[Node], machine: Machine) -> MergePrice | str:
        """Return a ``MergePrice`` with the estimated nanoseconds that merging ``members`` saves by fewer launches and
        adds by stacking their inputs. If the code generator of ``machine`` fuses independent loops anyway, return that
        reason as a string.
        """
        # Independent loops are fused by the code generator already.
        if machine.horizontal:
            return HORIZONTAL_REASON
        moved = 2 * tensor_bytes(canonical_arguments(m)["input"] for m in members) / machine.copy
        total = len(members) * machine.launch + moved
        return MergePrice(total, (len(members) - 1) * machine.launch, moved, "stacking the inputs costs")

    def programs(self) -> Iterator[Program]:
        """Yield functions with example arguments on which the rewrite is proven. They compute five independent layer
        norms, with and without scale and shift.
        """
        for rows, affine in (((3,), True), ((2, 4), False)):
            args = [torch.randn(5, *rows, 8)]
            args += [torch.randn(5, 8), torch.randn(5, 8)] if affine else []
            yield Program(_run_norms, tuple(args), f"5 norms of {[*rows, 8]}, affine={affine}")


def _norm_stacked_rows(
    xs: list[Tensor], shape: list[int], scales: list[Tensor], shifts: list[Tensor], eps: float, own: list[bool]
) -> list[Tensor]:
    """Return the results of layer norms over the dims ``shape``, computed as one norm of the stacked inputs ``xs``. The
    norm is computed in at least float32 and rounded once.

    ``scales`` and ``shifts`` have one tensor per input, or are empty if the norms have none. ``own[i]`` is true if
    result ``i`` must not share memory with the others.
    """
    stacked = torch.stack(xs)
    out = F.layer_norm(stacked.to(torch.promote_types(stacked.dtype, torch.float32)), shape, eps=eps)
    # Scales and shifts differ by member, so they broadcast over the rows of their own member only.
    across = [len(xs), *[1] * (xs[0].dim() - len(shape)), *shape]
    if scales:
        out = out * torch.stack(scales).view(across)
    if shifts:
        out = out + torch.stack(shifts).view(across)
    # Rounded here, after scale and shift, as torch rounds once.
    outs = out.to(stacked.dtype).unbind(0)
    return [o.clone() if copy else o for o, copy in zip(outs, own, strict=True)]


def _run_norms(x: Tensor, scales: Tensor | None = None, shifts: Tensor | None = None) -> Tensor:
    """Return the concatenated results of one layer norm for each slice of ``x`` along the first dim, each followed by a
    ReLU. ``scales`` and ``shifts`` hold one scale and one shift per slice. If they are None, the norms have none.
    """
    absent = [None] * len(x)
    parts = zip(
        x.unbind(0),
        scales.unbind(0) if scales is not None else absent,
        shifts.unbind(0) if shifts is not None else absent,
        strict=True,
    )
    return torch.cat([torch.relu(F.layer_norm(v, (v.shape[-1],), a, b)) for v, a, b in parts], -1)
