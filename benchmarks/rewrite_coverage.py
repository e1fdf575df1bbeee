"""How many attentions, RMS norms and rotaries of published models the shipped rewrites find, and whether results stay.

    python benchmarks/rewrite_coverage.py [NAME ...]
    python benchmarks/rewrite_coverage.py --every 3/200     every 200th model type of transformers from the third on

Models of transformers, and of timm and diffusers where these are installed, are built from their configs and traced on
the CPU; nothing is measured and nothing is downloaded.

A softmax counts as attention if its scores come from a product of two activations and its weights go into a product
with an activation, whatever lies in between; a router's is none. A root counts as RMS norm if it is that of a mean of
squares of what no mean was subtracted from. A rotary is counted by the function in which the model mixes pairs.
Rewrites are applied whether they pay or not. A place is silent if it neither matches nor has a near miss.
Gradients of all parameters are compared, too, in a graph that is rewritten for training: there, fewer places match.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from _published import Built, published

from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.passthrough_ops import CAST_OPERATORS, torch_call_name
from shiplap.rewrite.shipped import rms_norm
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap.rewrite.shipped.rotary import Rotary
from shiplap.rewrite.shipped.softmax_region import find_region

ROTARY = re.compile(
    r"in (?:_?rotate_|_?apply_rotary_emb$|apply_rotary_pos_emb_interleave$|apply_rotary_position_embeddings$)"
)


def rotates(node: torch.fx.Node) -> bool:
    """Whether a model exchanges the elements of pairs there: its own function says so, not the rewrite."""
    lines = [line for line in (node.meta.get("stack_trace") or "").splitlines() if line.startswith("  File")]
    mixes = torch_call_name(node) in ("view_as_complex", "empty_like") or (
        torch_call_name(node) in ("cat", "stack") and len(node.all_input_nodes) > 1
    )
    return mixes and bool(lines) and bool(ROTARY.search(lines[-1]))


def attends(node: torch.fx.Node) -> bool:
    """Whether a softmax has scores from a product of two activations, and its weights go into a product with one."""
    region = find_region(node) if torch_call_name(node) in ("softmax", "_softmax") else None
    return region is not None and region.attends


def norms(node: torch.fx.Node) -> bool:
    """Whether ``node`` is the root of a mean of squares of what no mean was subtracted from: no layer or L2 norm."""
    if torch_call_name(node) not in ("rsqrt", "sqrt", "pow") or (
        torch_call_name(node) == "pow" and node.args[1] not in (0.5, -0.5)
    ):
        return False
    at: Any = node.args[0]
    for names in (("add",), ("mean",), ("pow", "square", "mul")):
        while torch_call_name(at) in CAST_OPERATORS:
            at = at.args[0]
        if torch_call_name(at) not in names:
            return False
        operands = [n for n in at.all_input_nodes if torch_call_name(n) != "full"]
        if not operands:
            return False
        at = operands[0]
        if torch_call_name(at) == "mul" and names == ("mean",) and len(at.all_input_nodes) != 1:
            return False
    while torch_call_name(at) in CAST_OPERATORS:
        at = at.args[0]
    return not (torch_call_name(at) == "sub" and any(torch_call_name(n) == "mean" for n in at.all_input_nodes))


WANTED: dict[str, Callable[[torch.fx.Node], bool]] = {"attention": attends, "rms_norm": norms, "rotary": rotates}


def tensors(result: Any) -> list[torch.Tensor]:
    held = result.values() if hasattr(result, "keys") else result if isinstance(result, (tuple, list)) else [result]
    return [t for t in held if isinstance(t, torch.Tensor)]


@dataclass
class Looked:
    """What was seen of one model: what the rewrites did, for each the places that there are and those that matched.

    Attributes:
        error: the largest difference of a result, relative to the largest number in it.
        gradient_error: the difference of all gradients as one vector, relative to its length.
    """

    outcomes: list[Any] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WANTED, 0))
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WANTED, 0))
    error: float = 0.0
    gradient_error: float = 0.0

    def silent(self, rewrite: str) -> int:
        """How many places neither match nor have a near miss."""
        misses = sum(isinstance(o, NearMiss) and o.rewrite == rewrite for o in self.outcomes)
        return max(self.places[rewrite] - self.hits[rewrite] - misses, 0)


def rewritten(model: Any, seen: Looked) -> Any:
    """``model`` compiled with the rewrites; ``seen`` is told of each graph."""

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        there = {name: {n.name for n in gm.graph.nodes if wanted(n)} for name, wanted in WANTED.items()}
        for made in (AttentionRewrite(always=True), rms_norm, Rotary(always=True)):
            outcomes = list(made.apply(gm.graph))
            matched = [set(o.nodes) for o in outcomes if isinstance(o, Match)]
            unlisted = sum(not nodes & there[made.name] for nodes in matched)
            seen.hits[made.name] += len(matched)
            seen.places[made.name] += len(there[made.name]) + unlisted
            seen.outcomes.extend(outcomes)
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(model, backend=backend)


def gradients(run: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Of all parameters that a result depends on, as one vector in float64; results have cotangents of 1, 0.5, ..."""
    model.zero_grad()
    parts = [
        (t * torch.linspace(1, -0.5, t.numel()).view(t.shape)).sum() for t in tensors(run(**inputs)) if t.requires_grad
    ]
    torch.stack(parts).sum().backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def look(model: Any, inputs: dict[str, Any]) -> Looked:
    """What the rewrites do in ``model``, and how far its results and gradients are from eager ones."""
    seen = Looked()
    with torch.no_grad():
        pairs = zip(tensors(rewritten(model, seen)(**inputs)), tensors(model(**inputs)), strict=True)
        seen.error = max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs), default=0.0)
    exact = gradients(model, model, inputs)
    seen.gradient_error = float((gradients(rewritten(model, Looked()), model, inputs) - exact).norm() / exact.norm())
    return seen


def chosen(wanted: list[str]) -> dict[str, Callable[[], Built]]:
    """The models to build: those that are named, all published ones, or a part of every model type."""
    if wanted[:1] == ["--every"]:
        from _every import build, kinds

        start, _, step = (wanted[1] if wanted[1:] else "0/1").partition("/")
        return {kind: partial(build, kind) for kind in kinds()[int(start) :: int(step)]}
    return {name: build for name, build in published().items() if not wanted or name in wanted}


def main() -> None:
    totals, models = {name: [0, 0, 0] for name in WANTED}, 0
    for name, build in chosen(sys.argv[1:]).items():
        torch.manual_seed(0)
        try:
            model, inputs = build()
            with torch.no_grad():
                model(**inputs)
        except Exception as e:  # a package that is not here, or a type that cannot be built from sizes alone
            print(f"{name:32} not here: {e}".replace("\n", " ")[:120])
            continue
        seen = look(model, inputs)
        models += 1
        shown = []
        for rewrite, total in totals.items():
            counts = (seen.hits[rewrite], seen.places[rewrite], seen.silent(rewrite))
            total[:] = [a + b for a, b in zip(total, counts, strict=True)]
            shown.append(f"{rewrite} {counts[0]} of {counts[1]}" + (f" ({counts[2]} SILENT)" if counts[2] else ""))
        print(
            f"{name:32} {', '.join(shown)}, results differ by {seen.error:.1e}, gradients by {seen.gradient_error:.1e}",
            flush=True,
        )
        for miss in (o for o in seen.outcomes if isinstance(o, NearMiss)):
            print(f"    {miss}")
    summed = (f"{name} {hit} of {of}, {silent} silent" for name, (hit, of, silent) in totals.items())
    print(f"{models} models: {', '.join(summed)}")


if __name__ == "__main__":
    main()
