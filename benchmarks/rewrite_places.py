"""How many attentions, RMS norms and rotaries of models the shipped rewrites know, counted by names of the models.

    python benchmarks/rewrite_places.py [--json] [NAME ...]

Places are counted in eager mode, by hooks, and without the recognisers: a module whose class is named like an attention
and that has no such module inside, a module named like an RMS norm, and a module from which a function named like a
rotary is called. A place is *fused* if torch's own function is called there, *matched* if a rewrite matches there,
*named* if a near miss is reported there, and *silent* otherwise. Rewrites are applied whether they pay or not.
Packages that are not installed are left out, and ``--json`` keeps what the record has of other models, so that packages
which exclude each other can be looked at one after the other. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from _published import published
from _record import ROOT, record, write
from torch import nn

from shiplap.rewrite import Match
from shiplap.rewrite.passthrough_ops import torch_call_name
from shiplap.rewrite.shipped import rms_norm
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap.rewrite.shipped.rotary import Rotary

RESULT = ROOT / "benchmarks" / "results" / "rewrite_places.json"
SOURCES = ("benchmarks/rewrite_places.py", "packages/shiplap/src/shiplap/rewrite/**/*.py")
PACKAGES = ("transformers", "timm", "diffusers", "vit-pytorch", "x-transformers", "torchtune", "litgpt")
ATTENTION = re.compile(r"attention|attn|mha|^lsa$", re.IGNORECASE)
NORM = re.compile(r"rms_?norm|^T5LayerNorm$", re.IGNORECASE)
ROTARY = re.compile(r"^_?(apply_.*rot|apply_rope|rotate_|rope_)", re.IGNORECASE)
FUSED = {"attention": {"scaled_dot_product_attention", "multi_head_attention_forward"}, "rms_norm": {"rms_norm"}}
PUBLISHED = (
    *("Llama", "Qwen3", "Gemma2", "GPTNeoX", "Phi3", "Cohere", "GptOss", "T5", "Bert", "ViT", "Mixtral", "Glm4"),
    *("GPTJ", "Olmo2", "ModernBert", "Swin", "Whisper", "Falcon"),
)
VISION = {
    "vit": "ViT",
    "simple_vit": "SimpleViT",
    "deepvit": "DeepViT",
    "simple_vit_with_qk_norm": "SimpleViT",
    "vit_with_patch_dropout": "ViT",
    "vit_for_small_dataset": "ViT",
    "parallel_vit": "ViT",
    "rvt": "RvT",
}

Place = tuple[str, str]  # a kind and the path of a module


def models() -> Iterator[tuple[str, Callable[[], tuple[Any, dict[str, Any]]]]]:
    """Yield the name and the builder of each model."""
    known = published()
    for name, build in known.items():
        if name in PUBLISHED or name.startswith(("timm", "vit_", "eva", "Flux", "DiT", "SD3", "diffusers")):
            yield name, build
    image, tokens = torch.randn(1, 3, 32, 32), torch.randint(0, 50, (2, 12))

    def vit(module: str) -> tuple[Any, dict[str, Any]]:
        cls = getattr(importlib.import_module(f"vit_pytorch.{module}"), VISION[module])
        sizes = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 1, "heads": 4, "mlp_dim": 64}
        return cls(**sizes).eval(), {"img": image}

    for module in VISION:
        yield f"vit-pytorch {module}", lambda module=module: vit(module)

    def decoder(**options: Any) -> tuple[Any, dict[str, Any]]:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=1, heads=4, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers).eval(), {"x": tokens}

    for label, options in (
        ("", {}),
        ("rotary, rms norm", {"rotary_pos_emb": True, "use_rmsnorm": True}),
        ("one key head", {"attn_one_kv_head": True, "use_simple_rmsnorm": True}),
        ("talking heads", {"attn_pre_talking_heads": True}),
        ("flash", {"attn_flash": True, "rotary_pos_emb": True}),
    ):
        yield f"x-transformers {label}".strip(), lambda options=options: decoder(**options)

    def tuned(family: str) -> tuple[Any, dict[str, Any]]:
        made = importlib.import_module(f"torchtune.models.{family}")
        sizes = {"vocab_size": 50, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
        more = {"gemma": {"head_dim": 8}}.get(family, {})
        usual = {"max_seq_len": 16, "intermediate_dim": 64}
        return getattr(made, family)(**sizes, **usual, **more).eval(), {"tokens": tokens}

    for family in ("llama2", "llama3", "qwen2", "gemma", "mistral", "phi3"):
        yield f"torchtune {family}", lambda family=family: tuned(family)

    def lit(name: str) -> tuple[Any, dict[str, Any]]:
        from litgpt import GPT, Config

        head = {"phi-2": 20}.get(name, 8)  # phi-2 turns two fifths of a head
        sizes = {"n_layer": 1, "n_embd": 4 * head, "n_head": 4, "padded_vocab_size": 64, "block_size": 16}
        more = {"head_size": head, "n_query_groups": 2, "intermediate_size": 64}
        return GPT(Config.from_name(name, **sizes, **more)).eval(), {"idx": tokens}

    for name in ("Llama-3.2-1B", "pythia-14m", "Gemma-2-2b", "Qwen3-0.6B", "OLMo-2-1124-7B", "phi-2"):
        yield f"litgpt {name}", lambda name=name: lit(name)


def count_places(model: nn.Module, inputs: dict[str, Any]) -> set[Place]:
    """Return the places of a model, by the names of modules and functions that run."""
    found, running = set[Place](), list[str]()
    paths = dict(model.named_modules())
    inside = {p for p, m in paths.items() if ATTENTION.search(type(m).__name__)}
    innermost = {p for p in inside if not any(q.startswith(f"{p}." if p else "") and q != p for q in inside)}
    handles = []
    for path, module in paths.items():
        name = type(module).__name__

        def enter(module: nn.Module, args: Any, path: str = path, name: str = name) -> None:
            running.append(path)
            if path in innermost and path:
                found.add(("attention", path))
            if NORM.search(name):
                found.add(("rms_norm", path))

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and running and ROTARY.search(code.co_name) and "/torch/" not in code.co_filename:
            found.add(("rotary", running[-1]))

    sys.setprofile(watch)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        sys.setprofile(None)
        for handle in handles:
            handle.remove()
    return found


def path_parts(path: str) -> list[str]:
    """Return the parts of the path of a module, as Dynamo or as ``named_modules`` writes it."""
    parts = re.findall(r"\w+", path)
    return [p for p in parts if p not in ("L", "self", "_modules", "G", "model_")]


def is_at(place: str, held: Any) -> bool:
    """Whether a node with this stack of modules belongs to the module at ``place``."""
    wanted = path_parts(place)
    for path, _ in (held or {}).values():
        parts = path_parts(str(path))
        if parts and (parts == wanted[-len(parts) :] or wanted == parts[-len(wanted) :]):
            return True
    return False


def look(model: nn.Module, inputs: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return what became of each place of a model, by kind and path."""
    places = count_places(model, inputs)
    state: dict[Place, str] = {}
    order = ("silent", "named", "matched", "fused")

    def told(kind: str, held: Any, what: str) -> None:
        for place in places:
            known = state.get(place, "silent")
            if place[0] == kind and order.index(what) > order.index(known) and is_at(place[1], held):
                state[place] = what

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        stacks = {n.name: n.meta.get("nn_module_stack") for n in gm.graph.nodes}
        for node in gm.graph.nodes:
            for kind, names in FUSED.items():
                if torch_call_name(node) in names:
                    told(kind, stacks[node.name], "fused")
        for made in (AttentionRewrite(always=True), rms_norm, Rotary(always=True)):
            for outcome in list(made.apply(gm.graph)):
                matched = isinstance(outcome, Match)
                for name in outcome.nodes if matched else (outcome.node,):
                    told(made.name, stacks.get(name), "matched" if matched else "named")
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(**inputs)
    made: dict[str, dict[str, str]] = {}
    for kind, path in sorted(places):
        made.setdefault(kind, {})[path] = state.get((kind, path), "silent")
    return made


def save(rows: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Write the record with these models and those that it has, and return the sums of all of them."""
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {"models": {}, "versions": {}}
    rows = known["models"] | rows
    totals = dict[str, dict[str, int]]()
    for kind, places in (entry for model in rows.values() for entry in model.items()):
        counted = totals.setdefault(kind, dict.fromkeys(("fused", "matched", "named", "silent"), 0))
        for state in places.values():
            counted[state] += 1
    made = record(SOURCES, PACKAGES, totals=totals, models=rows)
    here = {k: v for k, v in made["versions"].items() if v != "not installed"}
    write(RESULT, made | {"versions": known["versions"] | here})
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models whose name begins with one of these")
    parser.add_argument("--json", action="store_true", help="write the record")
    options = parser.parse_args()
    rows = dict[str, Any]()
    for name, build in models():
        if options.names and not name.startswith(tuple(options.names)):
            continue
        torch.manual_seed(0)
        try:
            built = build()
            seen = look(*built)
        except Exception as e:  # a package that is not here, or another release of it
            print(f"{name:40} not here: {type(e).__name__}: {e}".replace("\n", " ")[:150], flush=True)
            continue
        rows[name] = seen
        counts = {k: {s: list(p.values()).count(s) for s in sorted({*p.values()})} for k, p in seen.items()}
        silent = [f"{k} {p}" for k, places in seen.items() for p, s in places.items() if s == "silent"]
        print(f"{name:40} {counts}{' SILENT ' + ', '.join(silent) if silent else ''}", flush=True)
        if options.json:
            totals = save(rows)
    if options.json and rows:
        print(f"the record: {totals}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
