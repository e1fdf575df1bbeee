"""How many attentions, RMS norms and rotaries of published models the shipped rewrites find, and whether results stay.

    python benchmarks/rewrite_coverage.py [NAME ...]
    python benchmarks/rewrite_coverage.py --every 3/200     every 200th model type of transformers from the third on

Models of transformers, and of timm and diffusers where these are installed, are built from their configs and traced on
the CPU; nothing is measured and nothing is downloaded. A softmax that is no attention (a router's) counts as none. A
rotary is counted by the function in which the model mixes pairs, whether the rewrite pays there or not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _published import Built, published

from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.shipped import attention, rms_norm
from shiplap.rewrite.shipped.rotary import Rotary
from shiplap.rewrite.trail import named

ROTARY = re.compile(
    r"in (?:_?rotate_|_?apply_rotary_emb$|apply_rotary_pos_emb_interleave$|apply_rotary_position_embeddings$)"
)


def rotates(node: torch.fx.Node) -> bool:
    """Whether a model exchanges the elements of pairs there: its own function says so, not the rewrite."""
    lines = [line for line in (node.meta.get("stack_trace") or "").splitlines() if line.startswith("  File")]
    return named(node) in ("cat", "stack", "view_as_complex") and bool(lines) and bool(ROTARY.search(lines[-1]))


WANTED = {
    "attention": lambda n: named(n) == "softmax",
    "rms_norm": lambda n: named(n) == "rsqrt",
    "rotary": rotates,
}


def tensors(result: Any) -> list[torch.Tensor]:
    held = result.values() if hasattr(result, "keys") else result if isinstance(result, (tuple, list)) else [result]
    return [t for t in held if isinstance(t, torch.Tensor)]


def look(model: Any, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, int], float]:
    """The outcomes, how many places there may be, and the largest difference relative to the largest result."""
    outcomes: list[Any] = []
    places = dict.fromkeys(WANTED, 0)

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        for rewrite, wanted in WANTED.items():
            places[rewrite] += sum(wanted(n) for n in gm.graph.nodes)
        for made in (*attention, rms_norm, Rotary(always=True)):
            outcomes.extend(made.apply(gm.graph))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        pairs = zip(tensors(torch.compile(model, backend=backend)(**inputs)), tensors(model(**inputs)), strict=True)
        errors = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs]
    return outcomes, places, max(errors, default=0.0)


def chosen(wanted: list[str]) -> dict[str, Callable[[], Built]]:
    """The models to build: those that are named, all published ones, or a part of every model type."""
    if wanted[:1] == ["--every"]:
        from _every import build, kinds

        start, _, step = (wanted[1] if wanted[1:] else "0/1").partition("/")
        return {kind: partial(build, kind) for kind in kinds()[int(start) :: int(step)]}
    return {name: build for name, build in published().items() if not wanted or name in wanted}


def main() -> None:
    totals, models = {name: [0, 0] for name in WANTED}, 0
    for name, build in chosen(sys.argv[1:]).items():
        torch.manual_seed(0)
        try:
            model, inputs = build()
            with torch.no_grad():
                model(**inputs)
        except Exception as e:  # a package that is not here, or a type that cannot be built from sizes alone
            print(f"{name:32} not here: {e}"[:120])
            continue
        outcomes, places, error = look(model, inputs)
        models += 1
        shown = []
        for rewrite, total in totals.items():
            hits = sum(isinstance(o, Match) and o.rewrite == rewrite for o in outcomes)
            total[0], total[1] = total[0] + hits, total[1] + places[rewrite]
            shown.append(f"{rewrite} {hits} of {places[rewrite]}")
        print(f"{name:32} {', '.join(shown)}, results differ by {error:.1e}", flush=True)
        for miss in (o for o in outcomes if isinstance(o, NearMiss)):
            print(f"    {miss}")
    print(f"{models} models: {', '.join(f'{n} {hits} of {of}' for n, (hits, of) in totals.items())}")


if __name__ == "__main__":
    main()
